"""The answers of a call while they grow: tokens, text and counts of every prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specjax.decoding.detokenize import TextStream
from specjax.decoding.stats import PromptStats
from specjax.types import RoundInfo


@dataclass(frozen=True)
class Generation:
    """What one call made. A single prompt gives single values, a list gives lists.

    Attributes:
      text: the new text, special tokens left out; None for a target without tokenizer.
      tokens: the new ids, the stop id included.
      finish_reason: "stop" (an end-of-text id or a stop string) or "length".
      logprobs: log softmax of the raw logits (before temperature and filters) at every token, or
        None where not asked for.
      stats: a `PromptStats` per prompt.
      settings: what ran: rule, mode, drafting, reuse, num_draft, batch, dtype, kernel.
      seconds: wall time of the rounds, prefill excluded; the first call of a shape compiles in it.
    """

    text: Any
    tokens: Any
    finish_reason: Any
    logprobs: Any
    stats: Any
    settings: dict[str, Any]
    seconds: float


@dataclass
class Row:
    """One prompt and what has been decoded behind it."""

    index: int
    ids: list[int]
    limit: int
    stats: PromptStats
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    done: bool = False


def take(
    group: list[Row], log: RoundInfo, stops: tuple[int, ...], seconds: float
) -> Iterator[tuple[Row, str, float]]:
    """Hands the emitted tokens of a stack of rounds [n, B, ...] to their rows."""
    for b, row in enumerate(group):
        if row.done:
            continue
        new: list[int] = []
        for n in range(len(log.emitted)):
            count = int(log.emitted[n, b])
            if count == 0:
                continue
            new += log.tokens[n, b, :count].tolist()
            row.logprobs += log.logprobs[n, b, :count].tolist()
            if row.tokens:  # else it is the token of the prefill, which is no round
                row.stats.drafted.append(int(log.proposed[n, b]))
                row.stats.accepted.append(int(log.accepted[n, b]))
                row.stats.emitted.append(count)
        row.tokens += new
        yield row, _advance(row, new, stops), seconds
        seconds = 0.0


def _advance(row: Row, new: list[int], stops: tuple[int, ...]) -> str:
    """Updates a row behind its new tokens; returns the text to show."""
    piece = row.stream.push(new) if row.stream is not None else ""
    if row.stream is not None and row.stream.stopped_at is not None:
        _cut(row, row.stream.stopped_at)
        row.done, row.finish_reason = True, "stop"
    elif row.tokens and row.tokens[-1] in stops:
        row.done, row.finish_reason = True, "stop"
    elif len(row.tokens) >= row.limit:
        row.done, row.finish_reason = True, "length"
    row.stats.new_tokens = len(row.tokens)
    if row.done and row.stream is not None:
        piece += row.stream.finish()
    return piece


def _cut(row: Row, count: int) -> None:
    """Drops what was decoded behind a stop string: tokens, log probabilities and rounds."""
    del row.tokens[count:], row.logprobs[count:]
    left = count - 1
    kept = 0
    for emitted in row.stats.emitted:
        if left <= 0:
            break
        row.stats.emitted[kept] = min(emitted, left)
        left -= emitted
        kept += 1
    for series in (row.stats.emitted, row.stats.drafted, row.stats.accepted):
        del series[kept:]
