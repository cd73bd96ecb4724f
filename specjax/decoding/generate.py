"""Prompts in, text out: buckets, batches, stop strings, streaming."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import adaptive, loop, request
from specjax.decoding.answers import Generation, Row, take
from specjax.decoding.detokenize import TextStream
from specjax.decoding.drafting import NGram
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights, rows_needed
from specjax.decoding.stats import PromptStats, acceptance_length
from specjax.models import reuse as reuse_methods
from specjax.models.hub import Target
from specjax.models.packaged import keep_compiled
from specjax.types import RoundInfo, Sampling, SpecState

CHUNK = 64  # prompt rows of one prefill pass
BUCKET = 128  # smallest text bucket; each further one doubles
BATCH = 8  # prompts decoded together unless asked otherwise
STREAM_ROUNDS = 4  # rounds between two looks at the text, when somebody looks
LOW_TAU, LOW_ROUNDS = 1.1, 20  # a drafter this bad for so long is probably miswired


@dataclass(frozen=True)
class _Call:
    """Everything that the groups of one call share."""

    target: Target
    decoder: Decoder
    weights: Weights
    sampling: dict[str, Any]
    stops: tuple[int, ...]
    seed: int
    looks: bool  # whether text is looked at between chunks of rounds
    batch: int  # rows decoded together
    auto: str | None  # the drafter's name where the number of drafts adapts


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
    num_draft: int | Literal["auto"] | None = None,
    verify: str = "auto",
    reuse: Any = None,
    stop_below: float = 0.0,
    stream: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    enable_thinking: bool = False,
    batch_size: int = BATCH,
    **unsupported: Any,
) -> Any:
    """Decodes prompts, plainly or with a drafter.

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
      num_draft: drafts verified per round, by default all that the drafter makes. "auto" times
        rounds once per shape, follows the acceptance, and decodes plainly where that is faster.
      verify: a verification rule, or "auto": block verification where drafts are drawn, match
        where they are the likeliest tokens or num_draft is "auto"; `stats` says which.
      reuse: how the states of rejected drafts are used: by default as the drafter was trained;
        "off"; "reanchor" (or a `ReAnchor`), which every block drafter can; or the name of the
        method that it was trained for.
      stop_below: propose nothing from the first slot on that the drafter's verification head gives
        a lower probability of being accepted.
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
        stop_below=stop_below,
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
    """Decodes once and drops it, so that the same call of `generate` finds everything compiled."""
    made = generate(target, prompts, **arguments)
    if arguments.get("stream"):
        for _ in made:
            pass


def compiles() -> int:
    """How many programs of the loop this process has compiled."""
    programs: tuple[Any, ...] = (loop.prefill, loop.run_rounds)
    return sum(program._cache_size() for program in programs)


def started(
    target: Target, prompt: Any, **arguments: Any
) -> tuple[Decoder, Weights, Sampling, jax.Array, SpecState]:
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
    num_draft: int | Literal["auto"] | None = None,
    verify: str = "auto",
    reuse: Any = None,
    stop_below: float = 0.0,
    stream: bool = False,
    logprobs: bool = False,
    eos_token_id: int | Sequence[int] | None = None,
    enable_thinking: bool = False,
    batch_size: int = BATCH,
    **unsupported: Any,
) -> tuple[_Call, list[Row], bool]:
    """Checks everything that was asked for; no compute before it is all in order."""
    if unsupported:
        name = next(iter(unsupported))
        raise ValueError(f"{name} is not supported: it would be ignored, so take it out")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    single, items = request.split(prompts)
    ids = [request.token_ids(target, item, enable_thinking=enable_thinking) for item in items]
    limits = request.limits(target, ids, max_new_tokens)
    longest = max(len(row) + limit for row, limit in zip(ids, limits, strict=True))
    if num_draft is not None and drafter is None:
        raise ValueError(f"num_draft {num_draft} without a drafter")
    auto = num_draft == "auto"
    fixed = num_draft if isinstance(num_draft, int) else None
    if num_draft not in (None, "auto", fixed):
        raise ValueError(f"num_draft={num_draft!r} is not a number, None or 'auto'")
    network, weights = request.network(target, drafter, fixed, longest, reuse, stop_below)
    stops = request.stop_strings(target, stop, stream)
    values = request.sampling_values(target, temperature, top_k, top_p, len(ids))
    rule, drafting = request.rule(verify, values["temperature"], network, steady=not auto)
    # Refuses bad values before anything runs; the groups make their own.
    make_sampling(**values, batch=len(ids), vocab_size=target.config.vocab_size, drafting=drafting)
    call = _Call(
        target=target,
        decoder=Decoder(target.config, network, rule, logprobs),
        weights=Weights(target.params, weights),
        sampling=values | {"drafting": drafting},
        stops=request.stop_ids(target, eos_token_id),
        seed=seed,
        looks=bool(stops) or stream,
        batch=min(batch_size, len(ids)),
        auto=f"{target.name} {getattr(drafter, 'name', drafter)}"
        if auto and network.num_draft
        else None,
    )
    rows = [
        Row(i, row, limit, PromptStats(len(row), rule=rule), _text_stream(target, row, stops))
        for i, (row, limit) in enumerate(zip(ids, limits, strict=True))
    ]
    return call, rows, single


# ------------------------------------------------------------------------------------ running
def _events(call: _Call, rows: list[Row]) -> Iterator[tuple[Row, str, float]]:
    """Decodes the rows group by group; yields (row, new text, seconds since the last event)."""
    for start in range(0, len(rows), call.batch):
        # A last group that is smaller is filled with rows that are done, to share the compile.
        yield from _group(call, rows[start : start + call.batch], call.batch)
    _warn_if_useless(call, rows)


def _group(call: _Call, group: list[Row], width: int) -> Iterator[tuple[Row, str, float]]:
    state, info, sampling, stops = _start(call, group, width)
    yield from take(group, jax.tree.map(lambda x: x[None], info), call.stops, 0.0)

    def resume(state: SpecState) -> SpecState:
        if not call.looks:
            return state  # the device knows all there is to know about who is done
        done = np.ones(width, bool)
        done[: len(group)] = [row.done for row in group]
        return replace(state, done=jnp.asarray(done))

    if call.auto is None:
        rounds = STREAM_ROUNDS if call.looks else _bucket(max(row.limit for row in group))
        chunks = _chunks(call, sampling, stops, state, resume, rounds)
    else:
        capacity = state.tokens.shape[1]
        known = adaptive.known(call.auto, call.decoder, width, capacity, sampling.mode)
        chunks = adaptive.decode(known, call.weights, sampling, stops, state, resume)
    while not all(row.done for row in group):
        log, seconds = next(chunks)
        yield from take(group, log, call.stops, seconds)


def _chunks(
    call: _Call,
    sampling: Sampling,
    stops: jax.Array,
    state: SpecState,
    resume: Callable[[SpecState], SpecState],
    rounds: int,
) -> Iterator[tuple[RoundInfo, float]]:
    """Chunks of rounds with a fixed number of drafts: host infos and seconds of each."""
    while True:
        begin = time.perf_counter()
        state, log = loop.run_rounds(
            call.decoder, call.weights, sampling, stops, resume(state), rounds
        )
        log = jax.device_get(log)  # the one transfer of a chunk
        yield log, time.perf_counter() - begin


def _start(
    call: _Call, group: list[Row], width: int
) -> tuple[SpecState, RoundInfo, Sampling, jax.Array]:
    longest = max(len(row.ids) + row.limit for row in group)
    capacity = rows_needed(call.decoder, _bucket(longest), CHUNK)
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


def _stream(call: _Call, rows: list[Row]) -> Iterator[tuple[int, str]]:
    for row, piece, _ in _events(call, rows):
        if piece:
            yield row.index, piece


def _result(call: _Call, rows: list[Row], single: bool, seconds: float) -> Generation:
    def shaped(values: list[Any]) -> Any:
        return values[0] if single else values

    method = getattr(call.decoder.drafter, "reuse", None)
    return Generation(
        text=shaped([row.stream.text if row.stream else None for row in rows]),
        tokens=shaped([row.tokens for row in rows]),
        finish_reason=shaped([row.finish_reason for row in rows]),
        logprobs=shaped([row.logprobs for row in rows]) if call.decoder.logprobs else None,
        stats=shaped([row.stats for row in rows]),
        settings={
            "rule": call.decoder.rule,
            "drafting": call.sampling["drafting"],
            "reuse": None if method is None else reuse_methods.name_of(method),
            "num_draft": call.decoder.drafter.num_draft if call.auto is None else "auto",
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
    keep_compiled()
    _say(
        f"compiling {call.target.name} for batch {batch}, {capacity} rows, "
        f"{call.decoder.drafter.num_draft} drafts, {sampling.mode} (once per shape)"
    )


def _warn_if_useless(call: _Call, rows: list[Row]) -> None:
    if isinstance(call.decoder.drafter, NGram):
        return  # promises nothing
    rounds = [
        count
        for row in rows
        for count, drafted in zip(row.stats.emitted, row.stats.drafted, strict=True)
        if drafted
    ]
    tau = acceptance_length(rounds)
    if tau is not None and len(rounds) >= LOW_ROUNDS and tau < LOW_TAU:
        warnings.warn(
            f"acceptance length {tau:.2f} over {len(rounds)} rounds: the drafter hardly helps. "
            "Check that it was trained for this target and template, its taps, and its layout "
            "(load_drafter(..., layout=))",
            stacklevel=5,
        )
