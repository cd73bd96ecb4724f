"""Prompts in, text out: buckets, batches, stop strings, streaming."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import loop, request
from specjax.decoding.detokenize import TextStream
from specjax.decoding.drafting import NGram
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.stats import PromptStats, acceptance_length
from specjax.models.hub import Target
from specjax.models.packaged import cache_dir
from specjax.types import RoundInfo, Sampling, SpecState

CHUNK = 64  # prompt rows of one prefill pass
BUCKET = 128  # smallest text bucket; each further one doubles
BATCH = 8  # prompts decoded together unless asked otherwise
STREAM_ROUNDS = 4  # rounds between two looks at the text, when somebody looks
LOW_TAU, LOW_ROUNDS = 1.1, 20  # a drafter this bad for so long is probably miswired


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
      settings: what ran: rule, mode, drafting, num_draft, batch, dtype.
      seconds: wall time of the decoding rounds, prefill and compilation excluded.
    """

    text: Any
    tokens: Any
    finish_reason: Any
    logprobs: Any
    stats: Any
    settings: dict[str, Any]
    seconds: float


@dataclass
class _Row:
    """One prompt on its way through."""

    index: int
    ids: list[int]
    limit: int
    stats: PromptStats
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    done: bool = False


@dataclass(frozen=True)
class _Call:
    """Everything that the groups of one call share."""

    target: Target
    decoder: loop.Decoder
    weights: loop.Weights
    sampling: dict[str, Any]
    stops: tuple[int, ...]
    seed: int
    looks: bool  # whether text is looked at between chunks of rounds
    batch: int  # rows decoded together


def generate(
    target: Target,
    prompts: Any,
    *,
    drafter: Any = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int = 0,
    num_draft: int | None = None,
    verify: str = "auto",
    reuse: str | None = None,
    stream: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    enable_thinking: bool = False,
    batch_size: int = BATCH,
    **unsupported: Any,
) -> Any:
    """Decodes prompts, with a drafter several times faster and with the same output.

    Args:
      target: the model.
      prompts: text, chat messages (a list of role/content mappings) or token ids; or a list of
        such prompts. The result has the same shape.
      drafter: a loaded drafter, `NGram()`, any `Drafter` with its parameters as a pair, or None.
      max_new_tokens: at most so many new tokens, for all prompts or for each.
      temperature: 0 is greedy; one value or one per prompt.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens with so much probability; 1 keeps all.
      stop: strings that end an answer; the text stands before them.
      seed: of the noise; a prompt's noise depends on the seed and its index in the call.
      num_draft: drafts verified per round, by default all that the drafter makes.
      verify: a verification rule, or "auto".
      reuse: a method of reusing rejected states; none is available yet.
      stream: return an iterator of (index of the prompt, piece of text).
      logprobs: report log probabilities.
      eos_token_id: overrides the model's own end-of-text ids.
      enable_thinking: passed to the chat template.
      batch_size: prompts decoded together.

    Temperature, top-k and top-p default to the model's generation_config.json (greedy where it
    has none). Sampling under the rule "match" gives, whatever the drafter, the very tokens that
    plain decoding gives with the same seed.

    Returns:
      A `Generation`, or with `stream` an iterator.

    Raises:
      ValueError: input that cannot be decoded as asked, before any compute.
    """
    call, rows, single = _prepare(
        target,
        prompts,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        seed=seed,
        num_draft=num_draft,
        verify=verify,
        reuse=reuse,
        stream=stream,
        logprobs=logprobs,
        eos_token_id=eos_token_id,
        enable_thinking=enable_thinking,
        batch_size=batch_size,
        **unsupported,
    )
    if stream:
        return _stream(call, rows)
    seconds = sum(seconds for _, _, seconds in _events(call, rows))
    return _result(call, rows, single, seconds)


def warmup(target: Target, prompts: Any, **arguments: Any) -> None:
    """Compiles what `generate` needs for such prompts and arguments, so that it starts at once."""
    generate(target, prompts, **(arguments | {"stream": False}))


def compiles() -> int:
    """How many programs of the loop this process has compiled."""
    programs: tuple[Any, ...] = (loop.prefill, loop.run_rounds)
    return sum(program._cache_size() for program in programs)


def started(
    target: Target, prompt: Any, **arguments: Any
) -> tuple[loop.Decoder, loop.Weights, Sampling, jax.Array, SpecState]:
    """One prompt behind its prefill, ready for `loop.step` and the drivers.

    Takes the arguments of `generate`; returns (decoder, weights, sampling, stops, state).
    """
    call, rows, _ = _prepare(target, prompt, **arguments)
    state, _, sampling, stops = _start(call, rows, len(rows))
    return call.decoder, call.weights, sampling, stops, state


def _prepare(
    target: Target,
    prompts: Any,
    *,
    drafter: Any = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int = 0,
    num_draft: int | None = None,
    verify: str = "auto",
    reuse: str | None = None,
    stream: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    enable_thinking: bool = False,
    batch_size: int = BATCH,
    **unsupported: Any,
) -> tuple[_Call, list[_Row], bool]:
    """Checks everything that was asked for; no compute before it is all in order."""
    if unsupported:
        name = next(iter(unsupported))
        raise ValueError(f"{name} is not supported: it would be ignored, so take it out")
    if reuse is not None:
        raise ValueError(f"reuse={reuse!r}: this drafter was not trained to reuse rejected states")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    single, items = request.split(prompts)
    ids = [request.token_ids(target, item, enable_thinking=enable_thinking) for item in items]
    limits = request.limits(target, ids, max_new_tokens)
    longest = max(len(row) + limit for row, limit in zip(ids, limits, strict=True))
    network, weights = request.network(target, drafter, num_draft, longest)
    stops = request.stop_strings(target, stop, stream)
    values = request.sampling_values(target, temperature, top_k, top_p, len(ids))
    rule, drafting = request.rule(verify, values["temperature"])
    # Refuses bad values before anything runs; the groups make their own.
    make_sampling(**values, batch=len(ids), vocab_size=target.config.vocab_size, drafting=drafting)
    call = _Call(
        target=target,
        decoder=loop.Decoder(target.config, network, rule, logprobs),
        weights=loop.Weights(target.params, weights),
        sampling=values | {"drafting": drafting},
        stops=request.stop_ids(target, eos_token_id),
        seed=seed,
        looks=bool(stops) or stream,
        batch=min(batch_size, len(ids)),
    )
    rows = [
        _Row(i, row, limit, PromptStats(len(row)), _text_stream(target, row, stops))
        for i, (row, limit) in enumerate(zip(ids, limits, strict=True))
    ]
    return call, rows, single


# ------------------------------------------------------------------------------------ running
def _events(call: _Call, rows: list[_Row]) -> Iterator[tuple[_Row, str, float]]:
    """Decodes the rows group by group; yields (row, new text, seconds since the last event)."""
    for start in range(0, len(rows), call.batch):
        # A last group that is smaller is filled with rows that are done, to share the compile.
        yield from _group(call, rows[start : start + call.batch], call.batch)
    _warn_if_useless(call, rows)


def _group(call: _Call, group: list[_Row], width: int) -> Iterator[tuple[_Row, str, float]]:
    state, info, sampling, stops = _start(call, group, width)
    yield from _take(group, jax.tree.map(lambda x: x[None], info), call, 0.0)
    longest = max(row.limit for row in group)
    rounds = STREAM_ROUNDS if call.looks else _bucket(longest)
    while not all(row.done for row in group):
        if call.looks:
            done = np.ones(width, bool)
            done[: len(group)] = [row.done for row in group]
            state = replace(state, done=jnp.asarray(done))
        begin = time.perf_counter()
        state, log = loop.run_rounds(call.decoder, call.weights, sampling, stops, state, rounds)
        log = jax.device_get(log)  # the one transfer of a chunk
        yield from _take(group, log, call, time.perf_counter() - begin)


def _start(
    call: _Call, group: list[_Row], width: int
) -> tuple[SpecState, RoundInfo, Sampling, jax.Array]:
    longest = max(len(row.ids) + row.limit for row in group)
    capacity = loop.rows_needed(call.decoder, _bucket(longest), CHUNK)
    prompts = np.zeros((width, _bucket(longest)), np.int32)
    lengths, max_new = np.ones(width, np.int32), np.zeros(width, np.int32)
    indices = np.zeros(width, np.uint32)
    for b, row in enumerate(group):
        prompts[b, : len(row.ids)] = row.ids
        lengths[b], max_new[b], indices[b] = len(row.ids), row.limit, row.index
    temperature = np.zeros(width, np.float32)
    temperature[: len(group)] = call.sampling["temperature"][[row.index for row in group]]
    sampling = make_sampling(
        temperature,
        call.sampling["top_k"],
        call.sampling["top_p"],
        batch=width,
        vocab_size=call.target.config.vocab_size,
        drafting=call.sampling["drafting"],
    )
    stops = jnp.asarray(call.stops or (-1,), jnp.int32)
    _announce(call, width, capacity, sampling)
    state, info = loop.prefill(
        call.decoder,
        call.weights,
        sampling,
        stops,
        jnp.asarray(prompts),
        jnp.asarray(lengths),
        jnp.asarray(max_new),
        row_keys(call.seed, jnp.asarray(indices)),
        capacity,
        CHUNK,
    )
    return state, jax.device_get(info), sampling, stops


def _take(
    group: list[_Row], log: RoundInfo, call: _Call, seconds: float
) -> Iterator[tuple[_Row, str, float]]:
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
        yield row, _advance(row, new, call), seconds
        seconds = 0.0


def _advance(row: _Row, new: list[int], call: _Call) -> str:
    """Updates a row behind its new tokens; returns the text to show."""
    piece = row.stream.push(new) if row.stream is not None else ""
    if row.stream is not None and row.stream.stopped_at is not None:
        _cut(row, row.stream.stopped_at)
        row.done, row.finish_reason = True, "stop"
    elif row.tokens and row.tokens[-1] in call.stops:
        row.done, row.finish_reason = True, "stop"
    elif len(row.tokens) >= row.limit:
        row.done, row.finish_reason = True, "length"
    row.stats.new_tokens = len(row.tokens)
    if row.done and row.stream is not None:
        piece += row.stream.finish()
    return piece


def _cut(row: _Row, count: int) -> None:
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


def _stream(call: _Call, rows: list[_Row]) -> Iterator[tuple[int, str]]:
    for row, piece, _ in _events(call, rows):
        if piece:
            yield row.index, piece


def _result(call: _Call, rows: list[_Row], single: bool, seconds: float) -> Generation:
    def shaped(values: list[Any]) -> Any:
        return values[0] if single else values

    return Generation(
        text=shaped([row.stream.text if row.stream else None for row in rows]),
        tokens=shaped([row.tokens for row in rows]),
        finish_reason=shaped([row.finish_reason for row in rows]),
        logprobs=shaped([row.logprobs for row in rows]) if call.decoder.logprobs else None,
        stats=shaped([row.stats for row in rows]),
        settings={
            "rule": call.decoder.rule,
            "drafting": call.sampling["drafting"],
            "num_draft": call.decoder.drafter.num_draft,
            "batch": call.batch,
            "mode": "sampled" if (call.sampling["temperature"] > 0).any() else "greedy",
            "dtype": str(call.weights.target["embed"].dtype),
            "kernel": "xla",
        },
        seconds=seconds,
    )


def _text_stream(target: Target, prompt: list[int], stops: tuple[str, ...]) -> TextStream | None:
    return TextStream(target.tokenizer, prompt, stops) if target.has_tokenizer else None


def _bucket(rows: int) -> int:
    """The smallest text bucket that holds so many rows: few shapes, few compiles."""
    size = BUCKET
    while size < rows:
        size *= 2
    return size


@cache
def _say(message: str) -> None:
    print(f"specjax: {message}", file=sys.stderr)


def _announce(call: _Call, batch: int, capacity: int, sampling: Sampling) -> None:
    """Says once per shape that it compiles, and keeps what is compiled between processes."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # the user's choice wins
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    _say(
        f"compiling {call.target.name} for batch {batch}, {capacity} rows, "
        f"{call.decoder.drafter.num_draft} drafts, {sampling.mode} (once per shape)"
    )


def _warn_if_useless(call: _Call, rows: list[_Row]) -> None:
    emitted = [count for row in rows for count in row.stats.emitted]
    tau = acceptance_length(emitted)
    if isinstance(call.decoder.drafter, NGram):
        return  # promises nothing
    if call.decoder.drafter.num_draft and len(emitted) >= LOW_ROUNDS and tau and tau < LOW_TAU:
        warnings.warn(
            f"acceptance length {tau:.2f} over {len(emitted)} rounds: the drafter hardly helps. "
            "Check that it was trained for this target and template, its taps, and its layout "
            "(load_drafter(..., layout=))",
            stacklevel=4,
        )
