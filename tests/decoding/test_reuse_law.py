"""The exact law of three rounds with every method of reuse: all drafts, all verdicts, no chance.

Draft, verification and commit are the loop's own, on small random networks, so that what a draft is
given is what the loop kept of the round before. Every path of drafts is forced by its noise and
weighs what the drafter's law says; how often a rule accepts how much of it comes from the checker
of `exact.py`; and every such verdict is committed and drafted behind.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from exact import RULES, near
from exact import K as SLOTS
from exact import V as IDS
from exact import W as ROWS_OF_P

from specjax.decoding import loop
from specjax.decoding.drafting import DFlash
from specjax.decoding.sampling import law, make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights, rows_needed
from specjax.models import drafter as backbone
from specjax.models import drafter_hf, hub, params
from specjax.models import target as networks
from specjax.models.reuse import Carryover, DFlow, ReAnchor, ReTrace
from specjax.types import Verdict

V, K, N = 3, 2, 3  # tokens, drafts of a round, tokens of the text
B = 729  # rows of one compiled call: all that two rounds leave which reject everything
PATHS = np.array(list(product(range(V), repeat=K)), np.int32)
LONGER = ReAnchor((1,), threshold=0.4)  # behind a block of one draft: chains that may go past it
METHODS = {
    "plain": None,
    "carryover": Carryover(),
    "carryover post_norm": Carryover("post_norm"),
    "dflow": DFlow(),
    "retrace": ReTrace(),
    "reanchor": ReAnchor((1,), trust=0.5),
    "reanchor by choices alone": ReAnchor((), trust=0.8),
    "reanchor past its block": LONGER,
}
SAMPLING = make_sampling(1.0, 0, 1.0, batch=B, vocab_size=V, drafting="independent")
STOPS = jnp.array([-1], jnp.int32)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random network of three tokens whose law depends on all of the text."""
    raw = tiny.target_config(vocab_size=V, num_hidden_layers=2, eos_token_id=...)
    loaded = hub.load_target(
        tiny.write(tmp_path_factory.mktemp("target"), raw, tiny.target_tensors(raw))
    )
    return replace(loaded, params=loaded.params | {"head": 2 * loaded.params["head"]})


def drafting(target, method, layout="fill"):
    """A drafter of random weights with the method, and the state behind the first token."""
    slots = 1 if method is LONGER else K
    raw = tiny.drafter_config(
        vocab_size=V,
        block_size=slots + (layout == "fill"),
        sample_from_anchor=layout == "next",
        num_hidden_layers=1,
        num_target_layers=2,
        max_window_layers=1,
    )
    raw["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [0]}
    trained = None if isinstance(method, ReAnchor) else method
    config = replace(drafter_hf.config_from_hf(raw), reuse=trained)
    made = params.init(backbone.table(config), jax.random.key(3))
    keys = iter(jax.random.split(jax.random.key(4), 99))
    made = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), made)
    decoder, weights = (
        Decoder(target.config, DFlash(config, K, method), "token"),
        Weights(target.params, made),
    )
    one = partial(jnp.full, (1,), dtype=jnp.int32)
    start, _ = loop.prefill(
        decoder,
        weights,
        make_sampling(1.0, 0, 1.0, batch=1, vocab_size=V, drafting="independent"),
        STOPS,
        jnp.zeros((1, 1), jnp.int32),
        one(1),
        one(40),
        row_keys(0, jnp.arange(1)),
        rows_needed(decoder, 1 + N, 1),
        1,
    )
    return decoder, weights, start


# ---------------------------------------------------------------------------------- the pieces
@partial(jax.jit, static_argnums=0)
def drafted(decoder, weights, state, path):
    """A round up to its verdict, with the drafts that `path` [B, K] says."""
    noise = 1e6 * jax.nn.one_hot(path, V)
    with mock.patch.object(DFlash, "_noise", return_value=noise):
        proposal, context = loop.draft(decoder, weights, SAMPLING, state)
    _, verified = loop.verify(decoder, weights, SAMPLING, STOPS, state, proposal)
    return proposal, context, verified


@partial(jax.jit, static_argnums=0)
def committed(decoder, state, proposal, context, verified, accepted, following):
    rows = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32)[None], (B, K + 1))
    verdict = Verdict(accepted, rows, following, accepted + 1)
    return loop.commit(decoder, STOPS, state, proposal, context, verdict, verified)[0]


def some(tree, index):
    """Rows of every array, filled up to B with the first of them."""
    index = np.pad(index, (0, B - len(index)), constant_values=index[0] if len(index) else 0)
    return jax.tree.map(lambda x: x[index], tree)


def rounds_behind(decoder, weights, state, texts):
    """One round behind every text, along every path that drafts can take: (text, path, target's
    law, drafts' law) and what commits it."""
    owner, path = np.repeat(np.arange(len(texts)), len(PATHS)), np.tile(PATHS, (len(texts), 1))
    for first in range(0, len(owner), B):
        here = slice(first, first + B)
        before = some(state, owner[here])
        forced = np.pad(path[here], ((0, B - len(path[here])), (0, 0)))
        proposal, context, verified = drafted(decoder, weights, before, jnp.asarray(forced))
        count, q = np.asarray(proposal.count), np.array(proposal.law)
        # What is behind a chain's end counts for nothing: one path stands for all.
        q[np.arange(K) >= count[:, None]] = np.eye(V)[0]
        able = np.take_along_axis(q, forced[:, :, None], 2).all(axis=(1, 2))  # no chance of 0
        assert (np.asarray(proposal.tokens) == forced)[able].all()
        n = np.flatnonzero(able[: len(owner[here])])
        p = np.asarray(law(verified.logits, SAMPLING))
        held = some((before, proposal, context, verified), n)
        yield owner[here][n], path[here][n], p[n], q[n], count[n], held


def padded(p, q, path, count):
    """What the checker takes: its shapes, with what no rule may read."""
    n = len(path)
    P = np.full((n, ROWS_OF_P, IDS), np.nan, np.float32)
    P[:, : K + 1] = np.pad(p, ((0, 0), (0, 0), (0, IDS - V)))
    Q = np.full((n, SLOTS, IDS), np.nan, np.float32)
    Q[:, :K] = np.pad(q, ((0, 0), (0, 0), (0, IDS - V)))
    tokens = np.full((n, SLOTS), -1, np.int32)
    tokens[:, :K] = path
    return P, Q, tokens, count.astype(np.int32)


def enumerated(target, method, layout="fill", told=lambda q: q):
    """The law of N tokens under every rule: {rule: {text: probability}}; `told` is the law that
    the rules are told the drafts came from. And how far rejected rows change the drafts' laws, and
    the lengths of chains."""
    decoder, weights, state = drafting(target, method, layout)
    out = [{} for _ in RULES]
    texts, weight = [()], np.ones((1, len(RULES)))
    changed = 0.0  # by what was rejected: how far laws behind one text lie apart
    counts = set()
    while texts:
        longer, heavier, states, laws = [], [], [], {}
        for owner, path, p, q, count, held in rounds_behind(decoder, weights, state, texts):
            drawn = np.prod(np.take_along_axis(q, path[:, :, None], 2)[..., 0], axis=1)
            masses = [mass_of(rule, *padded(p, told(q), path, count)) for rule, mass_of in RULES]
            counts.update(count.tolist())
            kept = []
            for n, a, t in product(range(len(owner)), range(K + 1), range(V)):
                text = (*texts[owner[n]], *path[n, :a].tolist(), t)
                each = weight[owner[n]] * drawn[n] * [mass[n, a, t] for mass in masses]
                if len(text) < N:
                    longer.append(text)
                    heavier.append(each)
                    kept.append((n, a, t))
                    continue
                for of_rule, w in zip(out, each, strict=True):
                    of_rule[text[:N]] = of_rule.get(text[:N], 0.0) + w
            for n, own in enumerate(owner):  # a slot's law may depend on the drafts before it
                laws.setdefault((texts[own], *path[n, :-1].tolist()), []).append(q[n])
            if kept:
                n, a, t = (np.array(x, np.int32) for x in zip(*kept, strict=True))
                a, t = (jnp.asarray(np.pad(x, (0, B - len(x)))) for x in (a, t))
                made = committed(decoder, *some(held, n), a, t)
                states.append(jax.tree.map(lambda x, many=n.size: x[:many], made))
        changed = max([changed, *(np.ptp(np.array(x), axis=0).max() for x in laws.values())])
        texts, weight = longer, np.array(heavier)
        if texts:
            state = jax.tree.map(lambda *xs: jnp.concatenate(xs), *states)
    return out, changed, counts


def text_law(target, method):
    """The same by one pass of the target over all texts behind the first token."""
    _, _, state = drafting(target, method)
    texts = np.array(list(product(range(V), repeat=N)), np.int32)
    begin = np.broadcast_to(np.asarray(state.tokens[:, :2]), (len(texts), 2))
    tokens = jnp.asarray(np.concatenate([begin, texts], axis=1))[:, None]
    positions = jnp.broadcast_to(jnp.arange(2 + N, dtype=jnp.int32)[None, None], tokens.shape)
    states = networks.forward(target.config, target.params, tokens, positions).hidden[:, 0]
    logits = networks.unembed(networks.vocabulary(target.params), states)
    p = np.asarray(jax.nn.softmax(logits, axis=-1))[:, 1:-1]  # behind the first token
    chances = np.take_along_axis(p, texts[:, :, None], 2)[..., 0].prod(1)
    return {tuple(text): chance for text, chance in zip(texts.tolist(), chances, strict=True)}


# ----------------------------------------------------------------------------------- the tests
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "fill") for name in METHODS), *((name, "next") for name in ("dflow", "reanchor"))],
)
def test_three_rounds_have_the_law_of_the_target(target, name, layout):
    found, changed, counts = enumerated(target, METHODS[name], layout)
    want = text_law(target, METHODS[name])
    assert max(want.values()) > 3 * min(want.values())
    for law_of_rule in found:
        assert law_of_rule == near(want)
    assert (changed > 0.01) == (name != "plain")  # drafts depend on what was rejected
    assert counts == ({1, K} if METHODS[name] is LONGER else {K})


def test_a_law_that_forgets_what_was_rejected_is_found_out(target):
    """Rules that are told another law than that of the drafts: only match does not mind."""
    found, *_ = enumerated(target, Carryover(), told=lambda q: np.broadcast_to(q[:1], q.shape))
    want = text_law(target, Carryover())
    errors = [max(abs(one[text] - want[text]) for text in want) for one in found]
    assert errors[0] > 1e-3
    assert errors[1] > 1e-3
    assert errors[2] < 1e-6
