"""The state of a decoder: how it begins, changes size, and keeps what was rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.target import TargetConfig
from specjax.types import Array, KVCache, Params, Rejected, SpecState, Stats


@dataclass(frozen=True)
class Decoder:
    """What is static about decoding; two equal ones share a compile.

    Attributes:
      target: the target network.
      drafter: any `Drafter`; `Plain()` decodes without one.
      rule: a name of `verify.RULES`.
      logprobs: whether rounds report log probabilities.
    """

    target: TargetConfig
    drafter: Any
    rule: str = "match"
    logprobs: bool = False


class Weights(NamedTuple):
    """Parameters of both networks."""

    target: Params
    drafter: Params


def rows_needed(decoder: Decoder, length: int, chunk: int) -> int:
    """Capacity for texts of up to `length` tokens: finished rows and the last round write dead
    rows behind them, and an update that does not fit would overwrite good ones."""
    return length + max(chunk, decoder.drafter.num_draft + 1)


def fresh_state(
    decoder: Decoder,
    tokens: Array,
    lengths: Array,
    max_new: Array,
    done: Array,
    keys: Array,
    cache: KVCache,
    draft: Any,
) -> SpecState:
    """The state behind a prefill: one committed token more than the prompt, nothing rejected."""
    B, dtype = tokens.shape[0], cache.k[0].dtype
    features, rejected = nothing(decoder, B, dtype)

    def zeros(*shape: int) -> Array:
        return jnp.zeros((B, *shape), jnp.int32)

    return SpecState(
        tokens=tokens,
        length=lengths + (max_new > 0).astype(jnp.int32),
        limit=lengths + max_new,
        done=done,
        key=keys,
        round=zeros(),
        target=cache,
        features=features,
        fresh=zeros(),
        draft=draft,
        rejected=rejected,
        stats=Stats(zeros(), zeros(), zeros(), zeros(decoder.drafter.num_draft + 1)),
    )


def nothing(decoder: Decoder, batch: int, dtype: Any) -> tuple[Array, Rejected]:
    """No features that are new, and nothing rejected; a state that is not kept has no rows."""
    K, keeps = decoder.drafter.num_draft, decoder.drafter.keeps
    E = decoder.target.layers.hidden_size
    F = len(decoder.drafter.taps) * E

    def rows(name: str, *width: int, of: Any = jnp.int32) -> Array:
        return jnp.zeros((batch, K if name in keeps else 0, *width), of)

    rejected = Rejected(
        tokens=jnp.zeros((batch, K if keeps else 0), jnp.int32),
        count=jnp.zeros((batch,), jnp.int32),
        features=rows("features", F, of=dtype),
        final_hidden=rows("final_hidden", E, of=dtype),
        argmax=rows("argmax"),
        certainty=rows("certainty", of=jnp.float32),
        draft_hidden=rows("draft_hidden", E, of=dtype),
    )
    return jnp.zeros((batch, K + 1, F), dtype), rejected


@partial(jax.jit, static_argnums=(0, 1))
def resized(before: Decoder, after: Decoder, weights: Weights, state: SpecState) -> SpecState:
    """A copy of `state` for another number of drafts, or for none.

    The drafter first takes the rows committed last; nothing rejected is carried over. From a
    decoder without drafter there is no way back: its rounds leave no features behind.
    """
    B, W = state.length.shape[0], after.drafter.num_draft + 1
    rows = jnp.arange(state.features.shape[1], dtype=jnp.int32)[None]
    positions = (state.target.length - state.fresh)[:, None] + rows
    context = before.drafter.extend(
        weights.drafter, state.draft, state.features, positions, state.fresh
    )
    counts = jnp.zeros((B, W), jnp.int32).at[:, 0].set(state.stats.rounds)
    empty = nothing(after, B, state.target.k[0].dtype)
    return replace(
        state,
        features=empty[0],
        fresh=jnp.zeros_like(state.fresh),
        draft=context if after.drafter.num_draft else (),
        rejected=empty[1],
        stats=replace(state.stats, histogram=counts),
    )
