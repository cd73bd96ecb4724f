"""The target's states of training text: computed in the step, or once and kept on disk.

Both ways run the same pass, packed documents in chunks. Its states are those that decoding sees:
the feature of a token is what the target's tapped layers gave when the token was run, and the
anchor of a round, which has not been run, has none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm.auto import tqdm

from specjax.models import target as networks
from specjax.models.hub import Target
from specjax.models.storage import differences, read_json, write_json
from specjax.models.target import TargetConfig
from specjax.training.data import Documents
from specjax.training.identity import fingerprint
from specjax.training.packing import Batch
from specjax.types import Array, KVCache, Params

CHUNK = 256  # rows of one block of the clean pass; scores are rows x chunk, per head
ROW_LENGTH = 512  # rows of a cache's own batches, unless a document is longer
DTYPE = np.dtype(ml_dtypes.bfloat16)  # of everything in a cache

_MANIFEST = "manifest.json"
_PARTIAL = "manifest.partial.json"  # the same content, while the files below still grow
_BATCHES = "batches"  # a key of both: how states are batched, which must not change on the way
_FEATURES, _FINAL_HIDDEN = "features.bin", "final_hidden.bin"


class Clean(NamedTuple):
    """What the target knows of recorded text; without gradient."""

    features: Array  # [B, S, F]
    final_hidden: Array  # [B, S, E]
    context: KVCache  # keys and values of all rows, by row of the batch


def clean_pass(
    config: TargetConfig,
    params: Params,
    batch: Batch,
    taps: Sequence[int],
    *,
    chunk: int = CHUNK,
) -> Clean:
    """The target's states of packed documents: equal, row by row, to those of decoding.

    A row sees the earlier rows of its own document only. Nothing is differentiated.

    Args:
      config: the target.
      params: its parameters.
      batch: packed documents, [B, S].
      taps: layers whose outputs are the features; l is the residual stream after layer l.
      chunk: most rows of one block: bounds the memory of the attention scores, changes no result.

    Returns:
      features [B, S, F] and the hidden states after the final norm [B, S, E], in the dtype of the
      parameters, zeros in padding rows; and the context for rows that follow.

    Raises:
      ValueError: a tap that is not a layer before the last one, or no rows in a chunk.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    B, S = batch.tokens.shape
    chunk = -(-S // -(-S // chunk))  # as many chunks, of even size: 352 rows are 2 x 176

    def blocks(rows: Array, fill: int) -> Array:
        """[B, S] as [B, N, chunk], padded to whole chunks."""
        padded = jnp.pad(rows, ((0, 0), (0, -S % chunk)), constant_values=fill)
        return padded.reshape(B, -1, chunk)

    document = blocks(batch.document, -1)
    out = networks.forward(
        config,
        jax.lax.stop_gradient(params),
        blocks(batch.tokens, 0),
        blocks(batch.positions, 0),
        context_start=blocks(batch.start, 0),
        tail_valid=document >= 0,
        taps=tuple(taps),
    )

    def rows(states: Array) -> Array:
        """[B, N, chunk, ...] as [B, S, ...], zeros in padding."""
        states = jnp.where((document >= 0)[..., None], states, 0.0)
        return jax.lax.stop_gradient(states.reshape(B, -1, states.shape[-1])[:, :S])

    length = jnp.full((B,), out.k[0].shape[2], jnp.int32)
    context = jax.lax.stop_gradient(KVCache(out.k, out.v, length))
    return Clean(rows(out.features), rows(out.hidden), context)


@dataclass(frozen=True)
class FeatureCache:
    """The target's states of every token of the sources, one after another, in files.

    Stored in bfloat16: rounded to 8 bits, where the pass inside a step keeps the target's dtype.

    Attributes:
      directory: where the files are.
      features: [n, F] bfloat16, memory-mapped.
      final_hidden: [n, E] bfloat16 after the final norm, or None where it was not asked for.
    """

    directory: Path
    features: np.ndarray
    final_hidden: np.ndarray | None

    @classmethod
    def build(
        cls,
        target: Target,
        taps: Sequence[int],
        documents: Sequence[Documents],
        directory: str | Path,
        *,
        final_hidden: bool = False,
        limit_bytes: int | None = None,
        rows: int = 8,
        chunk: int = CHUNK,
        progress: bool = True,
    ) -> FeatureCache:
        """Fills a cache, goes on with one that was interrupted, or opens one that is complete.

        A cache that was interrupted ends with the same bytes as one that was not.

        Args:
          target: the model.
          taps: layers of the features, in concatenation order.
          documents: the sources, in the order in which `rows` counts their tokens.
          directory: of the cache.
          final_hidden: keep the states after the final norm as well.
          limit_bytes: a larger cache is refused; None: only the disk limits it.
          rows: packed rows of one pass; like `chunk`, to be kept until the cache is complete.
          chunk: as for `clean_pass`.
          progress: say what will be written, and a bar on stderr.

        Raises:
          ValueError: more bytes than `limit_bytes`; a cache of another target, other taps or other
            tokens in the directory, with every difference; files that are not whole.
          OSError: more bytes than the disk has left, before anything is written; or a write that
            failed, after which the cache can be continued.
        """
        directory = Path(directory)
        networks.check_taps(taps, target.config.layers.num_layers)
        wanted = _manifest(target, taps, documents, final_hidden)
        if (directory / _MANIFEST).exists():
            saved = read_json(directory / _MANIFEST)
            saved.pop(_BATCHES, None)
            _check_same(saved, wanted, directory)
            return cls._opened(directory, wanted)
        batches = {"rows": rows, "row_length": _row_length(documents), "chunk": chunk}
        begun = wanted | {_BATCHES: batches}
        if (directory / _PARTIAL).exists():
            _check_same(read_json(directory / _PARTIAL), begun, directory)
        elif any((directory / name).exists() for name in _files(wanted)):
            raise ValueError(f"{directory} holds features without a manifest: remove it")
        _check_room(directory, wanted, limit_bytes, progress)
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / _PARTIAL, begun)
        _fill(target, taps, documents, directory, wanted, rows, chunk, progress)
        os.replace(directory / _PARTIAL, directory / _MANIFEST)
        return cls._opened(directory, wanted)

    @classmethod
    def _opened(cls, directory: Path, manifest: dict[str, Any]) -> FeatureCache:
        found = {}
        for name, width in _files(manifest).items():
            path, size = directory / name, manifest["tokens"] * width * DTYPE.itemsize
            if _size(path) != size:
                raise ValueError(
                    f"{path} has {_size(path)} bytes, its manifest says {size}: remove {directory} "
                    "and build the cache again"
                )
            found[name] = np.memmap(path, DTYPE, "r", shape=(manifest["tokens"], width))
        return cls(directory, found[_FEATURES], found.get(_FINAL_HIDDEN))

    def rows(
        self, source: np.ndarray | Array, dtype: Any = np.float32
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """States of the tokens `source` [B, S], a flat index into the sources; zeros at -1.

        Returns:
          features [B, S, F] and final hidden states [B, S, E] (or None) in `dtype`.
        """
        source = np.asarray(source)

        def gathered(states: np.ndarray) -> np.ndarray:
            # Read in order: the rows of a document lie side by side.
            taken = np.asarray(states[np.maximum(source, 0)]).astype(dtype)
            taken[source < 0] = 0
            return taken

        hidden = None if self.final_hidden is None else gathered(self.final_hidden)
        return gathered(self.features), hidden


# ------------------------------------------------------------------------------- what is stored
def _manifest(
    target: Target, taps: Sequence[int], documents: Sequence[Documents], final_hidden: bool
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for one in documents:
        digest.update(np.ascontiguousarray(one.starts, np.int64).tobytes())
        digest.update(np.ascontiguousarray(one.tokens, np.int32).tobytes())
    E = target.config.layers.hidden_size
    return {
        "fingerprint": fingerprint(target),
        "computed_in": str(target.params["embed"].dtype),
        "taps": [int(tap) for tap in taps],
        "tokens": sum(len(one.tokens) for one in documents),
        "documents": sum(len(one) for one in documents),
        "tokens_sha256": digest.hexdigest(),
        "dtype": DTYPE.name,
        "feature_size": len(taps) * E,
        "final_hidden_size": E if final_hidden else 0,
    }


def _files(manifest: dict[str, Any]) -> dict[str, int]:
    """File -> numbers per token."""
    sizes = {_FEATURES: manifest["feature_size"], _FINAL_HIDDEN: manifest["final_hidden_size"]}
    return {name: size for name, size in sizes.items() if size}


def _check_same(saved: dict[str, Any], wanted: dict[str, Any], directory: Path) -> None:
    if lines := differences(saved, wanted):
        raise ValueError(
            "\n".join([f"{directory} holds other features:", *lines])
            + "\nUse another directory, or remove this one."
        )


def _check_room(
    directory: Path, manifest: dict[str, Any], limit_bytes: int | None, progress: bool
) -> None:
    """Refuses what is above the limit or does not fit the disk; says the size otherwise."""
    per_token = sum(_files(manifest).values()) * DTYPE.itemsize
    total = per_token * manifest["tokens"]
    size = f"{manifest['tokens']} tokens of {per_token} bytes, {total} bytes in all"
    if limit_bytes is not None and total > limit_bytes:
        raise ValueError(
            f"the feature cache would hold {size}, above the limit of {limit_bytes}: raise the "
            "limit, or compute the features online"
        )
    written = sum(_size(directory / name) for name in _files(manifest))
    disk = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if total - written > free:
        raise OSError(
            f"the feature cache would hold {size}; {disk} has {free} bytes left for the "
            f"{total - written} that are missing: free some, or compute the features online"
        )
    if progress:
        tqdm.write(f"feature cache: {size}, in {directory}", file=sys.stderr)


# -------------------------------------------------------------------------------------- filling
def _fill(
    target: Target,
    taps: Sequence[int],
    documents: Sequence[Documents],
    directory: Path,
    manifest: dict[str, Any],
    rows: int,
    chunk: int,
    progress: bool,
) -> None:
    """Appends the states in the order of the tokens, so that a file's length says what is done."""
    lengths = np.concatenate([np.diff(one.starts) for one in documents])
    ends = np.cumsum(lengths)  # of the documents, in tokens
    size = _row_length(documents)
    planned = list(_in_order(lengths, rows, size))
    behind = np.asarray([ends[batch[-1].stop - 1] for batch in planned], np.int64)
    widths = {name: width * DTYPE.itemsize for name, width in _files(manifest).items()}
    there = min((_size(directory / name) // width for name, width in widths.items()), default=0)
    # Only whole batches count: with other neighbours, a document's states would round otherwise.
    complete = int(np.searchsorted(behind, there, side="right"))
    done = int(behind[complete - 1]) if complete else 0
    tokens = np.concatenate([one.tokens for one in documents])
    with ExitStack() as stack:
        files = {}
        for name, width in widths.items():
            # Unbuffered: after a write that failed, closing has nothing left to write.
            files[name] = stack.enter_context((directory / name).open("ab", buffering=0))
            files[name].truncate(done * width)
        bar = tqdm(
            total=len(tokens), initial=done, unit="tok", desc="features", disable=not progress
        )
        stack.callback(bar.close)
        for ranges in planned[complete:]:
            batch = _batch(tokens, ends - lengths, ends, ranges, size)
            states = _states(target.config, target.params, batch, tuple(taps), chunk)
            real = batch.document >= 0
            for name, values in zip((_FEATURES, _FINAL_HIDDEN), states, strict=True):
                if name in files:
                    total = len(tokens) * widths[name]
                    _append(files[name], np.asarray(values)[real].tobytes(), total)
            bar.update(int(real.sum()))
        for file in files.values():
            os.fsync(file.fileno())  # before the manifest says that they are complete


def _append(file: FileIO, data: bytes, total: int) -> None:
    """Writes all of `data`; `total` is the size of the file when it is complete."""
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise OSError(
            error.errno,
            f"{file.name} could not be written ({error.strerror}): {_size(Path(file.name))} of its "
            f"{total} bytes are there and kept; make room and build the cache again, which goes on",
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _row_length(documents: Sequence[Documents]) -> int:
    """Rows of a packed row: no document is cut."""
    return max([ROW_LENGTH, *(int(np.diff(one.starts).max(initial=0)) for one in documents)])


def _in_order(lengths: np.ndarray, rows: int, size: int) -> Iterator[list[range]]:
    """The documents of each batch, row by row: always the same from the first document on."""
    at = 0
    while at < len(lengths):
        batch = []
        for _ in range(rows):
            first, free = at, size
            while at < len(lengths) and lengths[at] <= free:
                free -= lengths[at]
                at += 1
            batch.append(range(first, at))
        yield batch


def _batch(
    tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, ranges: list[range], size: int
) -> Batch:
    """Packs ranges of documents, one per row; `starts` and `ends` are theirs within `tokens`."""
    fills = {"tokens": 0, "positions": 0, "start": 0, "document": -1, "source": -1}
    shape = (len(ranges), size)
    arrays: dict[str, Any] = {name: np.full(shape, fill, np.int32) for name, fill in fills.items()}
    arrays["supervised"] = np.zeros(shape, bool)
    for row, inside in enumerate(ranges):
        for i in inside:
            at = starts[i] - starts[inside.start]
            here = slice(at, at + ends[i] - starts[i])
            arrays["tokens"][row, here] = tokens[starts[i] : ends[i]]
            arrays["source"][row, here] = np.arange(starts[i], ends[i])
            arrays["positions"][row, here] = np.arange(ends[i] - starts[i])
            arrays["start"][row, here] = at
            arrays["document"][row, here] = i
    return Batch(**arrays)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _states(
    config: TargetConfig, params: Params, batch: Batch, taps: tuple[int, ...], chunk: int
) -> tuple[Array, Array]:
    states = clean_pass(config, params, batch, taps, chunk=chunk)[:2]
    return states[0].astype(jnp.bfloat16), states[1].astype(jnp.bfloat16)
