"""Shifted blocks as one chain, against the rule written down slot by slot in plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.merging import merge
from specjax.decoding.sampling import make_sampling
from specjax.models.reuse import ReAnchor
from specjax.types import Block, Rejected

B, D, V = 256, 3, 4
METHOD = ReAnchor((1, 3), threshold=0.6, trust=0.4)
SHIFTS = (0, *METHOD.shifts)
K = D + 3


def case(seed=0, rows=B):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, len(SHIFTS), D, V)).astype(np.float32) * 1.5
    choices = rng.integers(0, V, (rows, K))
    anchors = np.concatenate([np.zeros((rows, 1), int), choices[:, np.array(METHOD.shifts) - 1]], 1)
    drafts = rng.integers(0, V, (rows, K))
    certainty = rng.uniform(size=(rows, K)).astype(np.float32)
    return logits, anchors, (drafts, rng.integers(0, K + 1, rows), choices, certainty)


def by_hand(logits, anchors, stale, law, draw):
    """One row: tokens, count and the law of every slot that counts."""
    drafts, count, choices, certainty = stale
    opened, tokens, laws = {0}, [], []
    for j in range(1, K + 1):
        reach = [n for n in sorted(opened) if SHIFTS[n] < j <= SHIFTS[n] + D]
        if not reach:
            break
        q = np.mean([law(logits[n, j - SHIFTS[n] - 1]) for n in reach], axis=0)
        if j <= count and tokens == drafts[1:j].tolist():
            share = METHOD.trust * certainty[j - 1]
            choice = np.eye(V)[choices[j - 1]]
            mixed = (1 - share) * q + share * choice
            q = choice if mixed.argmax() == choices[j - 1] != q.argmax() else q
        if j > D and q.max() <= METHOD.threshold:
            break
        tokens.append(int(draw(j - 1, q)))
        laws.append(q)
        opened |= {
            n
            for n, s in enumerate(SHIFTS)
            if n and s == j and s <= count and tokens[-1] == anchors[n]
        }
    return tokens, laws


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@partial(jax.jit, static_argnums=4)
def merged(logits, anchors, stale, noise, drafting):
    rows = logits.shape[0]
    heat = 0.0 if drafting == "greedy" else 1.0
    sampling = make_sampling(heat, 0, 1.0, batch=rows, vocab_size=V, drafting=drafting)
    tokens = jnp.zeros((rows, len(SHIFTS), D + 1), jnp.int32).at[:, :, 0].set(anchors)
    block = Block(tokens, tokens, tokens[:, :, 0])
    return merge(block, logits, METHOD, stale, K, sampling, noise)


def run(logits, anchors, stale, noise=None, drafting="greedy"):
    ints = partial(jnp.asarray, dtype=jnp.int32)
    drafts, count, choices, certainty = stale
    nothing = jnp.zeros((len(count), 0))
    rejected = Rejected(
        tokens=ints(drafts),
        count=ints(count),
        features=nothing,
        final_hidden=nothing,
        argmax=ints(choices),
        certainty=jnp.asarray(certainty),
        draft_hidden=nothing,
    )
    return merged(jnp.asarray(logits), ints(anchors), rejected, noise, drafting)


def row(stale, b):
    return [x[b] for x in stale]


def test_the_chain_of_argmaxes():
    logits, anchors, stale = case()
    got = run(logits, anchors, stale)
    lengths = set()
    for b in range(B):
        tokens, _ = by_hand(logits[b], anchors[b], row(stale, b), softmax, lambda j, q: q.argmax())
        assert int(got.count[b]) == len(tokens)
        assert got.tokens[b, : len(tokens)].tolist() == tokens
        lengths.add(len(tokens))
    assert lengths == set(range(D, K + 1))
    assert got.law is None


@pytest.mark.parametrize("drafting", ["independent", "coupled"])
def test_the_chain_that_is_drawn_and_its_law(drafting):
    logits, anchors, stale = case(1)
    noise = np.asarray(jax.random.gumbel(jax.random.key(2), (B, K, V)))
    got = run(logits, anchors, stale, jnp.asarray(noise), drafting)
    for b in range(B):
        tokens, laws = by_hand(
            logits[b],
            anchors[b],
            row(stale, b),
            softmax,
            lambda j, q, b=b: (np.log(np.maximum(q, 1e-30)) + noise[b, j]).argmax(),
        )
        assert int(got.count[b]) == len(tokens)
        assert got.tokens[b, : len(tokens)].tolist() == tokens
        if drafting == "independent":
            np.testing.assert_allclose(got.law[b, : len(laws)], laws, atol=1e-6)
    assert (got.law is None) == (drafting == "coupled")


def test_a_law_does_not_see_its_own_draft_or_later_ones():
    """What the token rule needs: gates, weights and the end of the chain look back only."""
    logits, anchors, stale = case(3)
    noise = jax.random.gumbel(jax.random.key(4), (B, K, V))
    one = run(logits, anchors, stale, noise, "independent")
    for slot in range(K):
        fresh = noise.at[:, slot:].set(
            jax.random.gumbel(jax.random.key(5 + slot), (B, K - slot, V))
        )
        two = run(logits, anchors, stale, fresh, "independent")
        np.testing.assert_array_equal(one.law[:, : slot + 1], two.law[:, : slot + 1])
        np.testing.assert_array_equal(one.count > slot, two.count > slot)


def test_nothing_stale_is_the_first_block():
    logits, anchors, (drafts, _, choices, certainty) = case(6)
    got = run(logits, anchors, (drafts, np.zeros(B), choices, certainty))
    np.testing.assert_array_equal(got.tokens[:, :D], logits[:, 0].argmax(-1))
    assert (got.count == D).all()
