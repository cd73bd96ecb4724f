"""The speculative loop: draft, verify, commit, under one jit with fixed shapes.

`prefill` runs the prompts and draws the first token of each. A round then proposes up to K tokens,
runs the target once over the anchor and all of them, commits what the rule accepts and one token
more. Nothing here looks at text, and nothing leaves the device between rounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding import verify as rules
from specjax.decoding.sampling import argmax, choose, law, position_noise, round_keys
from specjax.decoding.state import Decoder, Weights, fresh_state
from specjax.models import cache as kv
from specjax.models import target as networks
from specjax.models.layers import empty_cache
from specjax.models.target import Output
from specjax.types import (
    Array,
    Proposal,
    Rejected,
    RoundInfo,
    Sampling,
    SpecState,
    Stats,
    Verdict,
)


class Verified(NamedTuple):
    """What the commit needs from the target pass."""

    out: Output
    logits: Array  # [B, W, V] float32
    tokens: Array  # [B, W]: the anchor and the proposal


@partial(jax.jit, static_argnums=(0, 8, 9))
def prefill(
    decoder: Decoder,
    weights: Weights,
    sampling: Sampling,
    stops: Array,
    prompts: Array,
    lengths: Array,
    max_new: Array,
    keys: Array,
    capacity: int,
    chunk: int,
) -> tuple[SpecState, RoundInfo]:
    """Runs the prompts in chunks and draws the first token of each.

    Args:
      decoder, weights, sampling: as for `step`.
      stops: [M] int32, ids that end a row; -1 for none.
      prompts: [B, P] int32, right-padded; `P` is a multiple of `chunk`.
      lengths: [B] int32, at least 1.
      max_new: [B] int32, at least 1; 0 makes a row that is done from the start.
      keys: [B] PRNG keys, one per prompt.
      capacity: rows of the caches, at least `rows_needed`.
      chunk: prompt rows of one pass.

    Returns:
      The state, and the first token of each row as a round without proposals.
    """
    B, E = prompts.shape[0], decoder.target.layers.hidden_size
    drafter, dtype = decoder.drafter, weights.target["embed"].dtype
    cache = empty_cache(decoder.target.layers, B, capacity, dtype)
    draft = drafter.init(B, capacity, dtype)
    offsets = jnp.arange(chunk, dtype=jnp.int32)[None]

    def body(i: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
        cache, draft, last = carry
        piece = jax.lax.dynamic_slice_in_dim(prompts, i * chunk, chunk, axis=1)
        # A row whose prompt has ended goes on writing dead rows behind it.
        count = jnp.clip(lengths - i * chunk, 0, chunk)
        positions = cache.length[:, None] + offsets
        out = networks.forward(
            decoder.target,
            weights.target,
            piece[:, None],
            positions[:, None],
            context=cache,
            taps=drafter.taps,
        )
        draft = drafter.extend(weights.drafter, draft, out.features[:, 0], positions, count)
        cache = kv.commit(cache, out.k, out.v, count)
        at_end = jnp.take_along_axis(out.hidden[:, 0], jnp.maximum(count - 1, 0)[:, None, None], 1)
        return cache, draft, jnp.where((count > 0)[:, None], at_end[:, 0], last)

    chunks = (jnp.max(lengths) + chunk - 1) // chunk
    start = (cache, draft, jnp.zeros((B, E), dtype))
    cache, draft, last = jax.lax.fori_loop(0, chunks, body, start)
    logits = networks.unembed(networks.vocabulary(weights.target), last)[:, None]
    noise = _noise(decoder, sampling, keys, lengths[:, None])
    first = choose(logits, sampling, noise)  # [B, 1]
    emitted = (max_new > 0).astype(jnp.int32)
    tokens = jnp.zeros((B, capacity), jnp.int32)
    tokens = jax.lax.dynamic_update_slice(tokens, prompts, (0, 0))
    tokens = _place(tokens, first, lengths)
    info = RoundInfo(
        proposed=jnp.zeros_like(emitted),
        accepted=jnp.zeros_like(emitted),
        emitted=emitted,
        tokens=first,
        logprobs=_logprobs(decoder, logits, first),
    )
    done = (max_new <= 1) | jnp.isin(first[:, 0], stops)
    return fresh_state(decoder, tokens, lengths, max_new, done, keys, cache, draft), info


def step(
    decoder: Decoder, weights: Weights, sampling: Sampling, stops: Array, state: SpecState
) -> tuple[SpecState, RoundInfo]:
    """One round: draft, verify, commit. Rows that are done stay as they are."""
    proposal, context = draft(decoder, weights, sampling, state)
    verdict, verified = verify(decoder, weights, sampling, stops, state, proposal)
    return commit(decoder, stops, state, proposal, context, verdict, verified)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def run(
    decoder: Decoder, weights: Weights, sampling: Sampling, stops: Array, state: SpecState
) -> SpecState:
    """Rounds until every row is done. The state given is consumed."""
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done),
        lambda state: step(decoder, weights, sampling, stops, state)[0],
        state,
    )


@partial(jax.jit, static_argnums=(0, 5), donate_argnums=4)
def run_rounds(
    decoder: Decoder,
    weights: Weights,
    sampling: Sampling,
    stops: Array,
    state: SpecState,
    rounds: int,
) -> tuple[SpecState, RoundInfo]:
    """Up to `rounds` rounds, fewer when every row is done; their infos stacked [rounds, B, ...].

    Rounds that did not run emitted nothing. The state given is consumed.
    """
    _, info = jax.eval_shape(partial(step, decoder), weights, sampling, stops, state)
    log = jax.tree.map(lambda x: jnp.zeros((rounds, *x.shape), x.dtype), info)

    def body(carry: tuple[Array, SpecState, RoundInfo]) -> tuple[Array, SpecState, RoundInfo]:
        i, state, log = carry
        state, info = step(decoder, weights, sampling, stops, state)
        log = jax.tree.map(lambda rows, row: rows.at[i].set(row), log, info)
        return i + 1, state, log

    def unfinished(carry: tuple[Array, SpecState, RoundInfo]) -> Array:
        return (carry[0] < rounds) & ~jnp.all(carry[1].done)

    _, state, log = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, log))
    return state, log


def draft(
    decoder: Decoder, weights: Weights, sampling: Sampling, state: SpecState
) -> tuple[Proposal, Any]:
    """Gives the drafter the rows committed last, then lets it propose."""
    drafter = decoder.drafter
    rows = jnp.arange(state.features.shape[1], dtype=jnp.int32)[None]
    positions = (state.target.length - state.fresh)[:, None] + rows
    context = drafter.extend(weights.drafter, state.draft, state.features, positions, state.fresh)
    key = state.key if sampling.drafting == "coupled" else round_keys(state.key, state.round)[0]
    return drafter.propose(
        weights.drafter,
        networks.vocabulary(weights.target),
        context,
        state.tokens,
        state.length,
        state.rejected,
        key,
        sampling,
    )


def verify(
    decoder: Decoder,
    weights: Weights,
    sampling: Sampling,
    stops: Array,
    state: SpecState,
    proposal: Proposal,
) -> tuple[Verdict, Verified]:
    """Runs the target once over the anchor and the proposal, and applies the rule."""
    rules.check_rule(decoder.rule, sampling.drafting)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([anchor, proposal.tokens], axis=1)  # [B, W]
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = state.target.length[:, None] + rows
    out = networks.forward(
        decoder.target,
        weights.target,
        tokens[:, None],
        positions[:, None],
        context=state.target,
        taps=decoder.drafter.taps,
    )
    logits = networks.unembed(networks.vocabulary(weights.target), out.hidden[:, 0])
    if decoder.rule == "match":
        choice = choose(logits, sampling, _noise(decoder, sampling, state.key, positions + 1))
        accepted = jax.vmap(rules.match)(choice, proposal.tokens, proposal.count)
        following = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    else:
        accepted, following = _reject(decoder.rule, sampling, state, proposal, logits)
    verdict = Verdict(
        accepted=accepted,
        path=jnp.broadcast_to(rows, tokens.shape),
        next_token=following,
        emitted=_emitted(state, stops, tokens, accepted, following),
    )
    return verdict, Verified(out, logits, tokens)


def _reject(
    rule: str, sampling: Sampling, state: SpecState, proposal: Proposal, logits: Array
) -> tuple[Array, Array]:
    """A rule that reads the drafter's law, with fresh noise of this round."""
    _, accept_key, residual_key = round_keys(state.key, state.round)
    K = proposal.tokens.shape[1]
    uniforms = jax.vmap(lambda k: jax.random.uniform(k, (K,), jnp.float32))(accept_key)
    q_axes = None if proposal.law is None else 0
    accepted, residual = jax.vmap(getattr(rules, rule), in_axes=(0, q_axes, 0, 0, 0))(
        law(logits, sampling), proposal.law, proposal.tokens, proposal.count, uniforms
    )
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, residual.shape[1:], jnp.float32))
    return accepted, argmax(jnp.log(residual) + gumbel(residual_key))


def _emitted(
    state: SpecState, stops: Array, tokens: Array, accepted: Array, following: Array
) -> Array:
    """How many of the accepted tokens and the next one stand before a stop or the limit."""
    line = _line(tokens, accepted, following)
    rows = jnp.arange(line.shape[1], dtype=jnp.int32)[None]
    count = accepted + 1
    stop = jnp.isin(line, stops) & (rows < count[:, None])
    first_stop = jnp.min(jnp.where(stop, rows + 1, line.shape[1]), axis=1)
    count = jnp.minimum(jnp.minimum(count, first_stop), state.limit - state.length)
    return jnp.where(state.done, 0, count)


def _line(tokens: Array, accepted: Array, following: Array) -> Array:
    """[B, W]: the accepted drafts, then the next token; what is behind it means nothing."""
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    drafts = jnp.roll(tokens, -1, axis=1)
    return jnp.where(rows == accepted[:, None], following[:, None], drafts)


def commit(
    decoder: Decoder,
    stops: Array,
    state: SpecState,
    proposal: Proposal,
    context: Any,
    verdict: Verdict,
    verified: Verified,
) -> tuple[SpecState, RoundInfo]:
    """Moves the state behind the emitted tokens."""
    emitted = verdict.emitted
    line = _line(verified.tokens, verdict.accepted, verdict.next_token)
    rows = jnp.arange(line.shape[1], dtype=jnp.int32)[None]
    length = state.length + emitted
    stopped = jnp.any(jnp.isin(line, stops) & (rows < emitted[:, None]), axis=1)
    done = state.done | stopped | (length >= state.limit)
    active = (~state.done).astype(jnp.int32)
    info = RoundInfo(
        proposed=proposal.count * active,
        accepted=verdict.accepted * active,
        emitted=emitted,
        tokens=line,
        logprobs=_logprobs(decoder, verified.logits, line),
    )
    out = verified.out
    taken = (rows == verdict.accepted[:, None]).astype(jnp.int32) * active[:, None]
    new = replace(
        state,
        tokens=_place(state.tokens, line, state.length),
        length=length,
        done=done,
        round=state.round + active,
        target=kv.commit(state.target, out.k, out.v, emitted),
        features=out.features[:, 0],
        fresh=emitted,
        draft=context,
        rejected=_rejected(decoder, proposal, verdict, verified, done),
        stats=Stats(
            rounds=state.stats.rounds + active,
            proposed=state.stats.proposed + info.proposed,
            accepted=state.stats.accepted + info.accepted,
            histogram=state.stats.histogram + taken,
        ),
    )
    return new, info


def _rejected(
    decoder: Decoder, proposal: Proposal, verdict: Verdict, verified: Verified, done: Array
) -> Rejected:
    """The rejected rows, moved to the front: row r stands for the position of a' + r."""
    K = proposal.tokens.shape[1]
    keeps = decoder.drafter.keeps and {*decoder.drafter.keeps, "tokens"}
    row = jnp.arange(K, dtype=jnp.int32)[None] + verdict.accepted[:, None]  # [B, K]

    def keep(name: str, values: Array, shift: int) -> Array:
        """Values of rows accepted + shift .. on, or nothing."""
        if name not in keeps:
            return values[:, :0]
        index = jnp.minimum(row + shift, values.shape[1] - 1)
        return jnp.take_along_axis(
            values, index.reshape(*index.shape, *(1,) * (values.ndim - 2)), 1
        )

    out = verified.out
    if "draft_hidden" in keeps and proposal.hidden is None:
        raise ValueError("the drafter keeps draft_hidden, but its proposal has none")
    hidden = out.hidden[:, 0, :K] if proposal.hidden is None else proposal.hidden
    own_choice = argmax(verified.logits)
    certainty = jnp.exp(jnp.max(verified.logits, -1) - jax.nn.logsumexp(verified.logits, -1))
    return Rejected(
        tokens=keep("tokens", proposal.tokens, 0),
        count=jnp.where(done, 0, proposal.count - verdict.accepted),
        features=keep("features", out.features[:, 0], 1),
        final_hidden=keep("final_hidden", out.hidden[:, 0], 1),
        argmax=keep("argmax", own_choice, 1),
        certainty=keep("certainty", certainty, 1),
        draft_hidden=keep("draft_hidden", hidden, 0),
    )


def _place(tokens: Array, new: Array, start: Array) -> Array:
    """Writes new [B, n] into tokens [B, S] from start [B] on."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(tokens, new, start)


def _logprobs(decoder: Decoder, logits: Array, tokens: Array) -> Array:
    if not decoder.logprobs:
        return jnp.zeros((*tokens.shape[:1], 0), jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _noise(decoder: Decoder, sampling: Sampling, keys: Array, positions: Array) -> Array | None:
    if sampling.mode == "greedy":
        return None
    return position_noise(keys, positions, decoder.target.vocab_size)
