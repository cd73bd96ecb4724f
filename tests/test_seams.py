"""Every kind of method fits the protocols: one step, traced abstractly, keeps its state's shape.

The methods here are stubs of the right shape around the real networks. They exist to show that
the seams hold before the methods do; a method that does not fit is a reason to mend the seam.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from specjax.models import cache as kv
from specjax.models import drafter as backbone
from specjax.models import drafter_hf, params, target
from specjax.models.layers import empty_cache
from specjax.models.params import Param
from specjax.models.visibility import ancestors
from specjax.types import (
    Carried,
    Proposal,
    Rejected,
    RoundInfo,
    Sampling,
    SpecState,
    Stats,
    Verdict,
)

B, CAPACITY = 2, 64
TARGET = target.config_from_hf(tiny.target_config("qwen3"))
DRAFTER = drafter_hf.config_from_hf(tiny.drafter_config())
E, V = TARGET.layers.hidden_size, TARGET.vocab_size
F = len(DRAFTER.taps) * E
FIELDS = ("features", "final_hidden", "argmax", "certainty", "draft_hidden")


# ------------------------------------------------------------------------------------- heads
@dataclass(frozen=True)
class Independent:
    """Every slot by itself: plain DFlash, sampled."""

    K: int = DRAFTER.num_drafts

    def table(self, config):
        return {}

    def propose(self, weights, block, hidden, logits, key, sampling):
        law = jax.nn.softmax(logits[:, 0, DRAFTER.first_slot :], axis=-1)
        tokens = jnp.argmax(law, axis=-1).astype(jnp.int32)
        return Proposal(tokens, full(self.K), law, hidden=hidden[:, 0, DRAFTER.first_slot :])


@dataclass(frozen=True)
class Markov:
    """A low-rank bias by the previous token, walked slot by slot."""

    K: int = DRAFTER.num_drafts
    rank: int = 4

    def table(self, config):
        return {
            "from": Param(
                (V, self.rank), ("vocab", None), "normal", "markov_head.markov_w1.weight"
            ),
            "to": Param((V, self.rank), ("vocab", None), "zeros", "markov_head.markov_w2.weight"),
        }

    def propose(self, weights, block, hidden, logits, key, sampling):
        def slot(previous, base):
            biased = base + jnp.einsum("br,vr->bv", weights["from"][previous], weights["to"])
            token = jnp.argmax(biased, axis=-1).astype(jnp.int32)
            return token, (token, jax.nn.softmax(biased, axis=-1))

        base = logits[:, 0, DRAFTER.first_slot :].swapaxes(0, 1)
        _, (tokens, law) = jax.lax.scan(slot, block.tokens[:, 0, 0], base)
        return Proposal(tokens.swapaxes(0, 1), full(self.K), law.swapaxes(0, 1))


@dataclass(frozen=True)
class Tree:
    """A fixed-shape tree over the best two tokens of every slot (DDTree)."""

    K: int = 2 * DRAFTER.num_drafts

    def table(self, config):
        return {}

    def propose(self, weights, block, hidden, logits, key, sampling):
        _, ids = jax.lax.top_k(logits[:, 0, DRAFTER.first_slot :], 2)
        depth = jnp.arange(self.K, dtype=jnp.int32) // 2
        parents = jnp.broadcast_to((2 * (depth - 1))[None], (B, self.K))
        return Proposal(
            ids.reshape(B, self.K).astype(jnp.int32), full(self.K), parents=jnp.maximum(parents, -1)
        )


@dataclass(frozen=True)
class Merge:
    """Shifted blocks merged by position into one chain that may outgrow the block (ReAnchor)."""

    K: int = DRAFTER.num_drafts + 2

    def table(self, config):
        return {}

    def propose(self, weights, block, hidden, logits, key, sampling):
        start = block.positions[:, :1, :1] + 1
        slot = block.positions - start  # [B, N, T]
        hits = slot[..., None] == jnp.arange(self.K, dtype=jnp.int32)[None, None, None]
        pooled = jnp.einsum("bntk,bntv->bkv", hits.astype(logits.dtype), logits)
        return Proposal(jnp.argmax(pooled, axis=-1).astype(jnp.int32), full(self.K))


# ------------------------------------------------------------------------------------- reuse
@dataclass(frozen=True)
class Carryover:
    keeps = frozenset({"features"})

    def table(self, config):
        return {"carry": Param((F,), (None,), "zeros", "carry_embedding")}

    def inject(self, config, weights, vocabulary, rejected, block):
        features = rejected.features + weights["reuse"]["carry"][None, None]
        return block.replace(carried=carried_rows(rejected, block, features))


@dataclass(frozen=True)
class DFlow:
    keeps = frozenset({"features"})

    def table(self, config):
        return {"mlp": Param((2 * E, 3 * E), (None, None), "zeros", "relay.weight")}

    def inject(self, config, weights, vocabulary, rejected, block):
        state = backbone.fuse(config, weights, rejected.features)
        pair = jnp.stack([block.tokens[:, 0, 0], rejected.tokens[:, 0]], axis=1)
        words = vocabulary.embedding[pair].reshape(B, 1, 2 * E)
        joint = jnp.concatenate([jnp.broadcast_to(words, (*state.shape[:2], 2 * E)), state], -1)
        scale, shift = jnp.split(jnp.einsum("bki,oi->bko", joint, weights["reuse"]["mlp"]), 2, -1)
        delta = jnp.pad(scale * state + shift, ((0, 0), (1, 0), (0, 0)))[:, None]
        return block.replace(delta=delta[:, :, : block.tokens.shape[2]])


@dataclass(frozen=True)
class ReTrace:
    keeps = frozenset({"draft_hidden", "final_hidden"})

    def table(self, config):
        return {"value": Param((E, 2 * E), (None, None), "zeros", "retrace.value.weight")}

    def inject(self, config, weights, vocabulary, rejected, block):
        memory = jnp.concatenate(
            [rejected.draft_hidden[:, 1:], rejected.final_hidden[:, :-1]], axis=-1
        )
        delta = jnp.einsum("bki,oi->bko", memory, weights["reuse"]["value"])
        room = block.tokens.shape[2] - delta.shape[1] - 1
        return block.replace(delta=jnp.pad(delta, ((0, 0), (1, room), (0, 0)))[:, None])


@dataclass(frozen=True)
class ReAnchor:
    keeps = frozenset({"features", "argmax"})
    shifts: tuple[int, ...] = (1, 3)

    def table(self, config):
        return {}

    def inject(self, config, weights, vocabulary, rejected, block):
        T = block.tokens.shape[2]
        shift = jnp.array((0, *self.shifts), jnp.int32)[None, :, None]
        stale = rejected.argmax[:, jnp.array(self.shifts, jnp.int32) - 1]
        anchors = jnp.concatenate([block.tokens[:, 0, :1], stale], axis=1)
        masks = jnp.broadcast_to(block.tokens[:, :, 1:], (B, shift.shape[1], T - 1))
        shifted = block.replace(
            tokens=jnp.concatenate([anchors[..., None], masks], axis=2),
            positions=block.positions + shift,
            context_end=jnp.broadcast_to(block.context_end, (B, shift.shape[1])),
        )
        rows = carried_rows(rejected, shifted, rejected.features)
        own_past = rows.positions < shifted.positions[:, :, :1]
        return shifted.replace(carried=rows.replace(valid=rows.valid & own_past))


def carried_rows(rejected, block, features):
    N, K = block.tokens.shape[1], features.shape[1]
    row = jnp.arange(K, dtype=jnp.int32)[None, None]
    shape = (B, N, K)
    return Carried(
        jnp.broadcast_to(features[:, None], (*shape, F)),
        jnp.broadcast_to(block.positions[:, :1, :1] + row, shape),
        jnp.broadcast_to(row < rejected.count[:, None, None], shape),
    )


# ---------------------------------------------------------------------------------- drafters
@dataclass(frozen=True)
class Diffusion:
    """Backbone + head + reuse."""

    head: Any = field(default_factory=Independent)
    reuse: Any = None
    taps = DRAFTER.taps

    @property
    def K(self):
        return self.head.K

    @property
    def keeps(self):
        return self.reuse.keeps if self.reuse else frozenset()

    def table(self):
        reuse = self.reuse.table(DRAFTER) if self.reuse else {}
        return backbone.table(DRAFTER) | {"out": self.head.table(DRAFTER), "reuse": reuse}

    def init(self, batch, capacity, dtype):
        return empty_cache(DRAFTER.layers, batch, capacity, dtype)

    def extend(self, weights, draft, features, positions, count):
        fused = backbone.fuse(DRAFTER, weights, features)
        k, v = backbone.context_rows(DRAFTER, weights, fused, positions)
        return kv.append(draft, k, v, count)

    def propose(self, weights, vocabulary, draft, tokens, length, rejected, key, sampling):
        anchor = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        block = backbone.draft_block(DRAFTER, anchor, length - 1)
        if self.reuse:
            block = self.reuse.inject(DRAFTER, weights, vocabulary, rejected, block)
        hidden = backbone.forward(DRAFTER, weights, vocabulary, block, draft)
        logits = backbone.unembed(DRAFTER, weights, vocabulary, hidden)
        return self.head.propose(weights["out"], block, hidden, logits, key, sampling), draft


@dataclass(frozen=True)
class NGram:
    """Copies what followed the last token the time before: no parameters, no features."""

    K: int = 5
    taps = ()
    keeps = frozenset()

    def table(self):
        return {}

    def init(self, batch, capacity, dtype):
        return ()

    def extend(self, weights, draft, features, positions, count):
        return draft

    def propose(self, weights, vocabulary, draft, tokens, length, rejected, key, sampling):
        row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        before = jnp.max(jnp.where((tokens == last) & (row < length[:, None] - 1), row, -1), axis=1)
        following = before[:, None] + 1 + jnp.arange(self.K, dtype=jnp.int32)[None]
        return Proposal(jnp.take_along_axis(tokens, following, axis=1), full(self.K)), draft


# -------------------------------------------------------------------------------------- step
def full(count):
    return jnp.full((B,), count, jnp.int32)


def match(p, proposal, key):
    """A rule of the right shape: accepts the chain of argmaxes."""
    W = proposal.tokens.shape[1] + 1
    choice = jnp.argmax(p, axis=-1).astype(jnp.int32)
    same = jnp.cumprod((choice[:, :-1] == proposal.tokens).astype(jnp.int32), axis=1)
    accepted = same.sum(axis=1)
    path = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None], (B, W))
    bonus = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, path, bonus, accepted + 1)


def step(drafter, rule, weights, sampling, state):
    """Draft, verify, commit."""
    target_params, drafter_params = weights
    K, W = drafter.K, drafter.K + 1
    vocabulary = target.vocabulary(target_params)
    key = jax.vmap(jax.random.fold_in)(state.key, state.round)
    rows = jnp.arange(W, dtype=jnp.int32)[None]

    # draft
    known = state.length - 1 - state.fresh
    draft = drafter.extend(
        drafter_params, state.draft, state.features, known[:, None] + rows, state.fresh
    )
    proposal, draft = drafter.propose(
        drafter_params, vocabulary, draft, state.tokens, state.length, state.rejected, key, sampling
    )

    # verify
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([anchor, proposal.tokens], axis=1)
    allowed, depth = None, rows
    if proposal.parents is not None:
        allowed = ancestors(proposal.parents)
        depth = allowed[:, 0].astype(jnp.int32).sum(axis=-1) - 1
    positions = state.target.length[:, None] + depth
    out = target.forward(
        TARGET,
        target_params,
        tokens[:, None],
        jnp.broadcast_to(positions, tokens.shape)[:, None],
        context=state.target,
        tail_allowed=allowed,
        taps=drafter.taps,
    )
    p = jax.nn.softmax(target.unembed(vocabulary, out.hidden[:, 0]), axis=-1)
    verdict = rule(p, proposal, key)

    # commit
    def by_path(x):  # [B, 1, W, ...] in committed order
        index = verdict.path.reshape(B, 1, W, *(1,) * (x.ndim - 3))
        return jnp.take_along_axis(x, index, axis=2)

    def in_order(rows):  # [B, G, S, D]: the verify rows, moved into committed order
        where = jnp.broadcast_to(state.target.length[:, None], (B, W)) + verdict.path
        taken = jnp.take_along_axis(rows, where[:, None, :, None], axis=2)
        return kv.write(rows, taken.transpose(0, 2, 1, 3), state.target.length)

    moved = jnp.roll(tokens, -1, axis=1).at[:, -1].set(verdict.next_token)
    states = {
        "features": out.features[:, 0],
        "final_hidden": out.hidden[:, 0],
        "argmax": jnp.argmax(p, axis=-1).astype(jnp.int32),
        "certainty": jnp.max(p, axis=-1),
        "draft_hidden": jnp.zeros((B, W, E)) if proposal.hidden is None else proposal.hidden,
    }
    kept = {name: states[name][:, -K if name in drafter.keeps else W :] for name in FIELDS}
    new = SpecState(
        tokens=jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(
            state.tokens, moved, state.length
        ),
        length=state.length + verdict.emitted,
        limit=state.limit,
        done=state.length + verdict.emitted >= state.limit,
        key=state.key,
        round=state.round + 1,
        target=kv.commit(
            state.target, tuple(map(in_order, out.k)), tuple(map(in_order, out.v)), verdict.emitted
        ),
        features=by_path(out.features)[:, 0],
        fresh=verdict.emitted,
        draft=draft,
        rejected=Rejected(
            tokens=proposal.tokens[:, : state.rejected.tokens.shape[1]],
            count=proposal.count - verdict.accepted,
            **kept,
        ),
        stats=Stats(
            state.stats.rounds + 1,
            state.stats.proposed + proposal.count,
            state.stats.accepted + verdict.accepted,
            state.stats.histogram + (rows == verdict.accepted[:, None]).astype(jnp.int32),
        ),
    )
    info = RoundInfo(proposal.count, verdict.accepted, verdict.emitted, moved, jnp.zeros((B, 0)))
    return new, info


def initial(drafter):
    K, W = drafter.K, drafter.K + 1
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    kept = {name: K if name in drafter.keeps else 0 for name in FIELDS}
    width = len(drafter.taps) * E
    return SpecState(
        tokens=zeros((B, CAPACITY)),
        length=full(1),
        limit=full(40),
        done=jnp.zeros((B,), bool),
        key=jax.random.split(jax.random.key(0), B),
        round=zeros((B,)),
        target=empty_cache(TARGET.layers, B, CAPACITY, jnp.float32),
        features=jnp.zeros((B, W, width)),
        fresh=zeros((B,)),
        draft=drafter.init(B, CAPACITY, jnp.float32),
        rejected=Rejected(
            tokens=zeros((B, K if drafter.keeps else 0)),
            count=zeros((B,)),
            features=jnp.zeros((B, kept["features"], width)),
            final_hidden=jnp.zeros((B, kept["final_hidden"], E)),
            argmax=zeros((B, kept["argmax"])),
            certainty=jnp.zeros((B, kept["certainty"])),
            draft_hidden=jnp.zeros((B, kept["draft_hidden"], E)),
        ),
        stats=Stats(*(zeros((B,)) for _ in range(3)), histogram=zeros((B, W))),
    )


METHODS = {
    "dflash": Diffusion(),
    "n-gram": NGram(),
    "carryover": Diffusion(reuse=Carryover()),
    "dflow": Diffusion(reuse=DFlow()),
    "retrace": Diffusion(reuse=ReTrace()),
    "reanchor": Diffusion(Merge(), ReAnchor()),
    "markov head": Diffusion(Markov()),
    "ddtree": Diffusion(Tree()),
    "carryover with a tree": Diffusion(Tree(), Carryover()),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_step_keeps_the_shape_of_its_state(name):
    drafter = METHODS[name]
    assert hash(drafter) == hash(METHODS[name])  # static: equal configs share a compile
    weights = params.abstract(target.table(TARGET)), params.abstract(drafter.table())
    number = jax.ShapeDtypeStruct
    sampling = Sampling(number((B,), jnp.float32), number((), jnp.int32), number((), jnp.float32))
    state = jax.eval_shape(lambda: initial(drafter))
    after, info = jax.eval_shape(partial(step, drafter, match), weights, sampling, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert info.tokens.shape == (B, drafter.K + 1)
    unread = set(FIELDS) - drafter.keeps
    assert all(getattr(after.rejected, name).size == 0 for name in unread)
