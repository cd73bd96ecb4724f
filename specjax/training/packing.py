"""Documents packed into rows of one length, and batches of them by step.

Which rows a batch holds is a function of the seed and the step: the step is all there is to save
of the iterator, and every host reads its own share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from specjax.training.data import Documents
from specjax.types import Array

OPEN = 1024  # rows that still take documents; older ones are closed, which keeps packing linear


@struct.dataclass
class Batch:
    """Rows of packed documents. What lies behind the last one counts as a document of its own."""

    tokens: Array  # [B, S] int32; 0 for padding
    positions: Array  # [B, S] int32, within the document
    start: Array  # [B, S] int32: the row index where the own document begins
    document: Array  # [B, S] int32: unique per document and copy; -1 for padding
    supervised: Array  # [B, S] bool: tokens of answers
    source: Array  # [B, S] int32: index into `Packing.tokens`; -1 for padding


class Packing:
    """Packs documents into rows once, and gives any batch of them.

    Rows come in epochs, each with an order of its own; an epoch goes on where the one before ended,
    within a batch where the rows do not divide, so that every row occurs once an epoch.

    Args:
      sources: documents with a weight each: how often a document occurs in an epoch. The
        fraction of a weight is drawn by the seed, document by document without replacement.
      row_length: S.
      rows: B, of all hosts together.
      seed: of the draw, the packing and the order.

    Attributes:
      tokens: [n] int32, those of all sources one after another.
      cut: documents (copies counted) that are longer than a row; their end is not seen.
      dropped: those of them whose prompt alone fills the row: they are left out.
      packed: rows that the documents fill.

    Raises:
      ValueError: nothing to pack, a weight that is not positive or takes no document at all, or
        more rows than there are.
    """

    def __init__(
        self, sources: Sequence[tuple[Documents, float]], row_length: int, rows: int, seed: int
    ):
        for name, value, least in (("row_length", row_length, 2), ("rows", rows, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for i, (documents, weight) in enumerate(sources):
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of source {i} must be above 0, not {weight}")
            if not len(documents):
                raise ValueError(f"source {i} holds no documents")
            if not sum(_times(documents, weight)):
                raise ValueError(
                    f"the weight {weight} of source {i} takes none of its {len(documents)} "
                    f"documents: {1 / len(documents):.2g} takes one, or leave the source out"
                )
        if not sources:
            raise ValueError("there are no sources to pack")
        self.row_length, self.rows, self.seed = row_length, rows, seed
        self.tokens = np.concatenate([one.tokens for one, _ in sources]).astype(np.int32)
        if len(self.tokens) > np.iinfo(np.int32).max:
            raise ValueError(f"{len(self.tokens)} tokens exceed an index of 32 bits: use fewer")
        lengths = np.concatenate([np.diff(one.starts) for one, _ in sources])
        self._starts = np.cumsum(lengths) - lengths  # within `tokens`, by document
        self._prompts = np.concatenate([one.prompt_lengths for one, _ in sources])
        self._lengths = np.minimum(lengths, row_length)
        rng = np.random.default_rng(seed)
        placed = rng.permutation(_copies(sources, rng))
        self.cut = int((lengths[placed % len(lengths)] > row_length).sum())
        kept = placed[self._prompts[placed % len(lengths)] < row_length]
        self.dropped = len(placed) - len(kept)
        if not len(kept):
            raise ValueError(
                f"the prompts of all {len(placed)} documents fill a row of {row_length} tokens: "
                "use longer rows"
            )
        self._packed = _first_fit(kept, self._lengths[kept % len(lengths)], row_length)
        self.packed = len(self._packed)
        if rows > self.packed:
            raise ValueError(
                f"a batch of {rows} rows needs as many; {len(kept)} documents fill {self.packed} "
                f"rows of {row_length}: use fewer or shorter rows, or more documents"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # epoch, its rows

    def __str__(self) -> str:
        text = f"{len(self.tokens):,} tokens in {self.packed:,} rows, {self.fill:.0%} full"
        if self.cut:
            text += f"; {self.cut} documents are longer than a row and lose their end"
        if self.dropped:
            text += f"; {self.dropped} of them lose all of their answer and are left out"
        return text

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row has been seen."""
        return -(-self.packed // self.rows)

    @property
    def fill(self) -> float:
        """The part of all rows that is not padding."""
        used = sum(self._lengths[row % len(self._lengths)].sum() for row in self._packed)
        return float(used) / (self.packed * self.row_length)

    def batch(self, step: int, process_index: int = 0, process_count: int = 1) -> Batch:
        """The rows of one step, those of one host: [B / process_count, S] numpy arrays.

        Raises:
          ValueError: a step or host that does not exist, or hosts that do not divide the rows.
        """
        if step < 0 or not 0 <= process_index < process_count:
            raise ValueError(f"there is no step {step} on process {process_index}/{process_count}")
        if self.rows % process_count:
            raise ValueError(f"{self.rows} rows do not divide among {process_count} processes")
        share = self.rows // process_count
        first = step * self.rows + process_index * share
        shape = (share, self.row_length)
        column = np.broadcast_to(np.arange(self.row_length, dtype=np.int32)[None], shape)
        start = np.zeros(shape, np.int32)
        document, source = np.full((2, *shape), -1, np.int32)
        supervised = np.zeros(shape, bool)
        for b in range(share):
            at = 0
            for placed in self._row(first + b):
                which = placed % len(self._lengths)
                end = at + self._lengths[which]
                start[b, at:end], document[b, at:end] = at, placed
                source[b, at:end] = self._starts[which] + np.arange(end - at)
                supervised[b, at + self._prompts[which] : end] = True
                at = end
            start[b, at:] = at
        arrays: dict[str, Any] = {
            "tokens": np.where(source < 0, np.int32(0), self.tokens[source]),
            "positions": column - start,
            "start": start,
            "document": document,
            "supervised": supervised,
            "source": source,
        }
        return Batch(**arrays)

    def _row(self, index: int) -> np.ndarray:
        """The documents of one row of the endless sequence of epochs."""
        epoch, within = divmod(index, self.packed)
        if self._order[0] != epoch:  # kept, since a permutation per row would be slow
            rng = np.random.default_rng([self.seed, epoch])
            self._order = (epoch, rng.permutation(self.packed))
        return self._packed[self._order[1][within]]


def _times(documents: Documents, weight: float) -> tuple[int, int]:
    """How often a weight takes every document, and how many it takes once more."""
    whole = math.floor(weight)
    return whole, round((weight - whole) * len(documents))


def _copies(sources: Sequence[tuple[Documents, float]], rng: np.random.Generator) -> np.ndarray:
    """A number for every document and copy: index + copy x the number of all documents."""
    total = sum(len(documents) for documents, _ in sources)
    made, first = [], 0
    for documents, weight in sources:
        count = len(documents)
        whole, more = _times(documents, weight)
        some = rng.permutation(count)[:more]
        own = np.concatenate([np.tile(np.arange(count), whole), some])
        copy = np.concatenate([np.repeat(np.arange(whole), count), np.full(len(some), whole)])
        made.append(first + own + copy * total)
        first += count
    return np.concatenate(made).astype(np.int64)


def _first_fit(documents: np.ndarray, lengths: np.ndarray, row_length: int) -> list[np.ndarray]:
    """Puts each document into the first open row with room; returns the documents by row."""
    rows: list[list[int]] = []
    free = np.zeros(len(documents), np.int64)
    for document, length in zip(documents.tolist(), lengths.tolist(), strict=True):
        oldest = max(len(rows) - OPEN, 0)
        fits = free[oldest : len(rows)] >= length
        at = oldest + int(fits.argmax()) if fits.any() else len(rows)
        if at == len(rows):
            rows.append([])
            free[at] = row_length
        rows[at].append(document)
        free[at] -= length
    return [np.asarray(row) for row in rows]
