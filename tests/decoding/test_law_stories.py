"""The law of what stories260k and its drafter really decode at T = 1 with top-p, counted.

Three tokens behind a prompt: the first one is of the prefill, the others of one or two rounds. The
exact probabilities of the 20 likeliest outcomes come from the target alone; all else is a cell of
its own.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import critical

import specjax
from specjax.decoding import loop
from specjax.decoding import verify as rules
from specjax.decoding.drafting import DFlash
from specjax.decoding.request import RULES
from specjax.decoding.sampling import law, make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights, rows_needed
from specjax.models import target as networks

PROMPT, TOP_P, CELLS, K = "One day, Lily", 0.9, 20, 3
ROWS, CALLS = 100, 1000  # 10^5 outcomes
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return specjax.load_target("stories260k", dtype="float32")


@pytest.fixture(scope="module")
def cells(target):
    """The likeliest outcomes [CELLS, 3] and their exact probabilities."""
    prompt = target.tokenizer(PROMPT).input_ids
    texts, chances, left_out = np.zeros((1, 0), int), np.ones(1), 0.0
    for _ in range(3):
        rows = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
        joint = (chances[:, None] * laws_behind(target, rows)).ravel()
        order = np.argsort(-joint, kind="stable")
        best, rest = order[:512], order[512:]
        left_out = max(left_out, joint[rest].max(initial=0))
        behind, token = np.divmod(best, target.config.vocab_size)
        texts, chances = np.column_stack([texts[behind], token]), joint[best]
    # No outcome is likelier than its beginning.
    assert chances[CELLS - 1] > max(left_out, 1e-3)
    return texts[:CELLS], chances[:CELLS]


def laws_behind(target, rows):
    """The processed next-token laws [n, V] behind rows [n, S] of ids, in float64."""
    sampling = make_sampling(
        1.0, 0, TOP_P, batch=len(rows), vocab_size=target.config.vocab_size, drafting="greedy"
    )
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    tokens = jnp.asarray(rows, jnp.int32)
    out = networks.forward(target.config, target.params, tokens[:, None], positions[:, None])
    logits = networks.unembed(networks.vocabulary(target.params), out.hidden[:, :, -1])
    return np.asarray(law(logits, sampling)[:, 0], float)


@partial(jax.jit, static_argnums=0)
def decoded(decoder, weights, sampling, prompts, keys):
    """Three tokens behind every prompt, for keys [calls, rows], and drafts proposed, accepted."""

    def one(keys):
        full = partial(jnp.full, keys.shape, dtype=jnp.int32)
        size, stops = prompts.shape[1], jnp.array([-1], jnp.int32)
        capacity = rows_needed(decoder, size + 3, size)
        state, _ = loop.prefill(
            *(decoder, weights, sampling, stops, prompts),
            *(full(size), full(3), keys, capacity, size),
        )
        state = loop.run(decoder, weights, sampling, stops, state)
        stats = state.stats
        return state.tokens[:, size : size + 3], jnp.sum(stats.proposed), jnp.sum(stats.accepted)

    return jax.lax.map(one, keys)


def chi_square(target, cells, verify, network=DFlash, calls=CALLS):
    """The statistic of the cells and of everything else, and the share of drafts accepted."""
    loaded = specjax.load_drafter("stories260k-dflash", target)
    rule, drafting = RULES[verify]
    decoder = Decoder(target.config, network(loaded.config, K), rule)
    sampling = make_sampling(
        1.0, 0, TOP_P, batch=ROWS, vocab_size=target.config.vocab_size, drafting=drafting
    )
    prompts = jnp.tile(jnp.asarray([target.tokenizer(PROMPT).input_ids], jnp.int32), (ROWS, 1))
    keys = row_keys(5, jnp.arange(calls * ROWS)).reshape(calls, ROWS)
    weights = Weights(target.params, loaded.params)
    tokens, proposed, accepted = jax.device_get(decoded(decoder, weights, sampling, prompts, keys))
    outcomes, chances = cells
    seen = np.array([(tokens == one).all(-1).sum() for one in outcomes])
    total = calls * ROWS
    seen, chances = np.append(seen, total - seen.sum()), np.append(chances, 1 - chances.sum())
    statistic = np.sum((seen - total * chances) ** 2 / (total * chances))
    return float(statistic), accepted.sum() / proposed.sum()


@pytest.mark.parametrize("verify", RULES)
def test_the_likeliest_outcomes_come_as_often_as_the_target_says(target, cells, verify):
    statistic, share = chi_square(target, cells, verify)
    assert statistic < critical(CELLS)
    assert 0.1 < share < 0.9


@dataclass(frozen=True)
class Control(DFlash):
    """A compile of its own for a loop that is patched."""


@pytest.mark.parametrize("verify", ["token", "match-independent"])
def test_a_rule_that_accepts_too_much_is_rejected(target, cells, verify, monkeypatch):
    name = RULES[verify][0]
    right = getattr(rules, name)

    def wrong(*arguments):
        *rest, last = arguments  # the uniforms; of match the count
        if name == "match":
            return jnp.minimum(right(*arguments) + 1, last)
        return right(*rest, 0.0 * last)

    monkeypatch.setattr(rules, name, wrong)
    assert chi_square(target, cells, verify, Control, 100)[0] > 2 * critical(CELLS)
