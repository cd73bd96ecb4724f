"""Parallel draft, verify, draft: how a drafter learns from what is rejected.

Pass 1 drafts at every anchor, without gradient. One pass of the frozen target then verifies all
drafts at once: the K drafts of an anchor are a branch off the recorded text, and see it up to the
anchor and each other. The first draft that the recording does not confirm ends a branch, the anchor
moves behind it, and pass 2 drafts there with the method's reuse of the branch's rejected rows. Only
the accepted part is forced to the recording, and it equals it: nothing leaks from the labels.

Where proposals are deterministic, or the recording was drawn by the target and is verified by
equality, the accepted length has the law of decoding (Carryover, arXiv 2609.14717; DFlow's rounds,
arXiv 2609.06498; ReTrace's memory cut at one round).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.sampling import argmax
from specjax.models import drafter
from specjax.models import target as networks
from specjax.models.drafter import DrafterConfig
from specjax.models.target import TargetConfig
from specjax.training import blocks
from specjax.training.blocks import Anchors, Labels
from specjax.training.features import Clean
from specjax.training.packing import Batch
from specjax.types import Array, Block, KVCache, Params, Rejected, Reuse, Vocabulary


@dataclass(frozen=True)
class Branches:
    """How many branches, and what they carry.

    Attributes:
      anchors: branches per row, beside the plain blocks.
      rounds: drafts behind a rejection; each is verified for the next (DFlow: 2).
      empty: share of branches that carry nothing, as the first round behind a prompt.
      temperature: at which proposals are drawn; 0 takes the most likely tokens.
      before: rounds that run before the ones that are trained, without gradient: what these are
        given was then left by drafts that had been given something themselves, as in decoding
        (the recurrent form of ReTrace; 0 is the parallel one).
      ramp: updates over which parameters that a method calls `grows` go from nothing to what they
        are (ReTrace: 50).
    """

    anchors: int = 16
    rounds: int = 1
    empty: float = 0.1
    temperature: float = 0.0
    before: int = 0
    ramp: int = 0

    def __post_init__(self) -> None:
        for name, least in (("anchors", 1), ("rounds", 1), ("before", 0), ("ramp", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.empty < 1:
            raise ValueError(f"empty must be at least 0 and below 1, not {self.empty}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")

    @property
    def verified(self) -> int:
        """Drafts of a row that the target verifies in a step."""
        return self.anchors * (self.before + self.rounds)


class Draft(NamedTuple):
    """One draft that is trained."""

    hidden: Array  # [B, A, K, E] of the slots that predict
    labels: Labels
    rejected: Array  # [B, A] int32, rows that it was given


def drafts(
    wanted: Branches,
    target: TargetConfig,
    config: DrafterConfig,
    target_params: Params,
    params: Params,
    vocabulary: Vocabulary,
    batch: Batch,
    clean: Clean,
    anchors: Anchors,
    keys: Array,
    updates: Array | float = jnp.inf,
) -> Iterator[Draft]:
    """The drafts behind a rejection, round by round, with gradient into `params` alone.

    Args:
      wanted: rounds, empty share and how proposals are drawn.
      target, config: the networks; `config.reuse` says how rejected rows are used.
      target_params, params: their parameters, the drafter's in its compute dtype; with
        `drafter.restrict` it proposes some tokens only, as in decoding.
      vocabulary: the target's, in that dtype.
      batch: packed documents.
      clean: the target's pass over them.
      anchors: where the first drafts start.
      keys: [B] PRNG keys, of the proposals and of the empty branches.
      updates: made so far, for the ramp.
    """
    vocabulary, clean = jax.lax.stop_gradient((vocabulary, clean))
    params = ramped(wanted, config, params, updates)
    context = blocks.context(config, params, clean.features, batch.positions)
    # What only proposes reads the parameters as they are.
    frozen, frozen_context = jax.lax.stop_gradient((params, context))
    hidden = _pass(config, frozen, vocabulary, batch, frozen_context, anchors, None)
    for number in range(wanted.before + wanted.rounds):
        draw, empty = (_fold(keys, 2 * number + i) for i in (0, 1))
        hidden = jax.lax.stop_gradient(hidden)
        tokens = _propose(wanted, config, params, vocabulary, hidden, draw)
        states = verify(target, config, target_params, batch, clean, anchors, tokens)
        labels = blocks.block_labels(config, batch, anchors)
        moved, accepted = advance(batch, anchors, labels, tokens)
        rejected = rejected_rows(config, tokens, hidden, states, accepted, moved.valid)
        shape = rejected.count.shape[1:]
        luck = jax.vmap(lambda key, shape=shape: jax.random.uniform(key, shape))(empty)
        count = jnp.where(luck >= wanted.empty, rejected.count, 0)
        rejected = replace(rejected, count=count)
        anchors = moved
        if number < wanted.before:
            hidden = _pass(config, frozen, vocabulary, batch, frozen_context, anchors, rejected)
            continue
        hidden = _pass(config, params, vocabulary, batch, context, anchors, rejected)
        yield Draft(hidden, blocks.block_labels(config, batch, anchors), rejected.count)


def ramped(
    wanted: Branches, config: DrafterConfig, params: Params, updates: Array | float
) -> Params:
    """The parameters as they count after so many updates: what grows times its share."""
    if not wanted.ramp:
        return params
    share = jnp.minimum(jnp.asarray(updates, jnp.float32) / wanted.ramp, 1.0)
    own = dict(params["reuse"])
    for name in growing(config.reuse):
        own[name] = own[name] * share.astype(own[name].dtype)
    return params | {"reuse": own}


def growing(method: Reuse | None) -> frozenset[str]:
    """The parameters of a method that a ramp is for."""
    return getattr(method, "grows", frozenset())


def _fold(keys: Array, data: int) -> Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys)


def _pass(
    config: DrafterConfig,
    params: Params,
    vocabulary: Vocabulary,
    batch: Batch,
    context: KVCache,
    anchors: Anchors,
    rejected: Rejected | None,
) -> Array:
    """One packed drafter pass at the anchors, [B, A, K, E], with reuse where rows are given."""
    block = blocks.block_inputs(config, batch, anchors)
    if rejected is not None:
        block = injected(config, params, vocabulary, rejected, block)
    return drafter.forward(config, params, vocabulary, block, context)[:, :, config.first_slot :]


def injected(
    config: DrafterConfig, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
) -> Block:
    """What `Reuse.inject` gives a round of decoding, for every block [B, A] of a packed pass."""
    assert config.reuse is not None
    B, A = block.tokens.shape[:2]

    def each(x: Array) -> Array:  # every block as a batch row of its own
        return x.reshape(B * A, *x.shape[2:])

    alone = jax.tree.map(lambda x: each(x)[:, None], block)
    made = config.reuse.inject(config, params, vocabulary, jax.tree.map(each, rejected), alone)

    def together(x: Array) -> Array:
        return x.reshape(B, A, *x.shape[2:]) if x.shape[:2] == (B * A, 1) else x

    return jax.tree.map(together, made)


def _propose(
    wanted: Branches,
    config: DrafterConfig,
    params: Params,
    vocabulary: Vocabulary,
    hidden: Array,
    keys: Array,
) -> Array:
    """Tokens [B, A, K] of states [B, A, K, E]; logits exist for one batch row at a time."""

    def of_row(inputs: tuple[Array, Array]) -> Array:
        states, key = inputs
        logits = drafter.unembed(config, params, vocabulary, states)
        if wanted.temperature:
            logits = logits / wanted.temperature + jax.random.gumbel(key, logits.shape)
        return drafter.target_ids(params, argmax(logits))

    return jax.lax.map(of_row, (hidden, keys))


def verify(
    target: TargetConfig,
    config: DrafterConfig,
    target_params: Params,
    batch: Batch,
    clean: Clean,
    anchors: Anchors,
    tokens: Array,
) -> networks.Output:
    """The frozen target over all branches at once: states of drafts [B, A, K, ...].

    Draft i stands i behind its anchor and sees the recorded text of its document up to the anchor,
    and the drafts before it. Branches do not see each other.
    """
    steps = jnp.arange(1, tokens.shape[2] + 1, dtype=jnp.int32)[None, None]
    out = networks.forward(
        target,
        jax.lax.stop_gradient(target_params),
        tokens,
        blocks.pick(batch.positions, anchors.at)[:, :, None] + steps,
        context=clean.context,
        context_end=anchors.at + 1,
        context_start=blocks.pick(batch.start, anchors.at),
        taps=config.taps,
    )
    return jax.lax.stop_gradient(out)


def advance(batch: Batch, anchors: Anchors, labels: Labels, tokens: Array) -> tuple[Anchors, Array]:
    """Where the next round starts, and how many drafts [B, A] the recording confirms.

    An anchor that would leave its answer is not valid any more.
    """
    confirmed = (tokens == labels.tokens) & labels.mask
    accepted = jnp.sum(jnp.cumprod(confirmed.astype(jnp.int32), axis=2), axis=2)
    last = batch.tokens.shape[1] - 1
    at = anchors.at + accepted + 1
    inside = at <= last
    at = jnp.minimum(at, last)
    same = blocks.pick(batch.document, at) == blocks.pick(batch.document, anchors.at)
    valid = anchors.valid & inside & same & blocks.pick(batch.supervised, at)
    return Anchors(jnp.where(valid, at, 0), valid), accepted


def rejected_rows(
    config: DrafterConfig,
    tokens: Array,
    draft_hidden: Array,
    states: Any,
    accepted: Array,
    valid: Array,
) -> Rejected:
    """The rejected rows of every branch [B, A, K, ...], moved to the front as in decoding."""
    assert config.reuse is not None
    K, keeps = tokens.shape[2], config.reuse.keeps
    row = jnp.arange(K, dtype=jnp.int32)[None, None] + accepted[:, :, None]
    row = jnp.minimum(row, K - 1)

    def keep(name: str, values: Array) -> Array:
        if name not in keeps:
            return values[:, :, :0]
        return jnp.take_along_axis(values, row.reshape(*row.shape, *(1,) * (values.ndim - 3)), 2)

    return Rejected(
        tokens=jnp.take_along_axis(tokens, row, 2),
        count=jnp.where(valid, K - accepted, 0),
        features=keep("features", states.features.astype(draft_hidden.dtype)),
        final_hidden=keep("final_hidden", states.hidden.astype(draft_hidden.dtype)),
        argmax=tokens[:, :, :0],  # of methods that are not trained
        certainty=draft_hidden[:, :, :0, 0],
        draft_hidden=keep("draft_hidden", draft_hidden),
    )
