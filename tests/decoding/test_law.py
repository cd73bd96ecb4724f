"""The law of what the real loop decodes, counted: target and drafter are tables (`markov.py`).

The exact law of the first three tokens has 64 cells. Every wrong variant goes through the code
that passes the right ones, and must be rejected by it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import Boastful, Table, chi_square, critical, target, text_law

from specjax.decoding import loop
from specjax.decoding import verify as rules
from specjax.decoding.request import RULES
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights, rows_needed

B, CALLS, FIRST, SEED = 8, 6400, 2, 11
FAST = {"match", "token", 3}
P = np.array([[4, 3, 2, 1], [1, 5, 2, 2], [3, 3, 1, 3], [1, 1, 2, 6]]) / 10


@pytest.fixture(scope="module")
def markov(tmp_path_factory):
    return target(tmp_path_factory.mktemp("markov"), P)


@pytest.fixture(scope="module")
def drafts():
    """Laws by last token and memory; token 0, once rejected, is drafted more often."""
    q = np.random.default_rng(1).normal(size=(4, 5, 4)) * 0.3
    q[:, :, 0] += 1.1
    q[:, 0, 0] += 2.5
    return {"q": jnp.asarray(q, jnp.float32)}


@partial(jax.jit, static_argnums=(0, 4, 5))
def decoded(decoder, weights, sampling, keys, new, rounds):
    """Prefill and loop for every batch of keys [calls, B]: tokens [calls, B, new] and statistics.

    All rounds until the limit, or a fixed number where the limit must not choose the rounds.
    """
    rows = keys.shape[1]
    stops = jnp.array([-1], jnp.int32)

    def one(keys):
        full = partial(jnp.full, (rows,), dtype=jnp.int32)
        prompts = jnp.full((rows, 1), FIRST, jnp.int32)
        capacity = rows_needed(decoder, 1 + new, 1)
        state, _ = loop.prefill(
            decoder, weights, sampling, stops, prompts, full(1), full(new), keys, capacity, 1
        )
        if rounds:
            state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, rounds)
        else:
            state = loop.run(decoder, weights, sampling, stops, state)
        return state.tokens[:, 1 : 1 + new], state.stats

    return jax.lax.map(one, keys)


def decode(loaded, drafter, params, rule, drafting, temperature, new=3, rounds=0, calls=CALLS):
    decoder = Decoder(loaded.config, drafter, rule)
    weights = Weights(loaded.params, params)
    sampling = make_sampling(
        temperature, 0, 1.0, batch=B, vocab_size=loaded.config.vocab_size, drafting=drafting
    )
    keys = row_keys(SEED, jnp.arange(calls * B)).reshape(calls, B)
    return jax.device_get(decoded(decoder, weights, sampling, keys, new, rounds))


def counts_of(tokens):
    return np.bincount(tokens.reshape(-1, 3) @ [16, 4, 1], minlength=64)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(
    ("verify", "K"),
    [
        pytest.param(verify, K, marks=() if {verify, K} <= FAST else pytest.mark.slow)
        for verify in RULES
        for K in (1, 3)
    ],
)
def test_three_tokens_have_the_law_of_the_target(markov, drafts, verify, K, temperature):
    tokens, stats = decode(markov, Table(K), drafts, *RULES[verify], temperature)
    value, freedom = chi_square(counts_of(tokens), text_law(P, FIRST, 3, temperature))
    assert value < critical(freedom)
    assert 0 < stats.accepted.sum() < stats.proposed.sum()


@dataclass(frozen=True)
class Control(Table):
    """A compile of its own for a loop that is patched."""


def accepts_everything(p, q, tokens, count, uniforms):
    return TOKEN(p, q, tokens, count, jnp.zeros_like(uniforms))


TOKEN = rules.token


@pytest.mark.parametrize(
    ("wrong", "K"),
    [
        ("accepts everything", 3),
        pytest.param("accepts everything", 1, marks=pytest.mark.slow),
        pytest.param("hands over another law", 3, marks=pytest.mark.slow),
        pytest.param("hands over another law", 1, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_token_rule_is_rejected(markov, drafts, monkeypatch, wrong, K):
    drafter = Boastful(K)
    if wrong == "accepts everything":
        drafter = Control(K)
        monkeypatch.setattr(rules, "token", accepts_everything)
    tokens, _ = decode(markov, drafter, drafts, *RULES["token"], 1.0)
    value, freedom = chi_square(counts_of(tokens), text_law(P, FIRST, 3, 1.0))
    assert value > 10 * critical(freedom)


def test_noise_that_comes_back_with_the_position_is_rejected(markov, drafts, monkeypatch):
    """What `check_rule` refuses, done anyway: the drafter's memory tells about the noise."""
    with pytest.raises(ValueError, match="needs fresh noise in every round"):
        decode(markov, Table(3), drafts, "token", "coupled", 1.0)
    monkeypatch.setattr(rules, "check_rule", lambda *_: None)
    tokens, _ = decode(markov, Table(3), drafts, "token", "coupled", 1.0)
    value, freedom = chi_square(counts_of(tokens), text_law(P, FIRST, 3, 1.0))
    assert value > 2 * critical(freedom)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verify", "rate"), [("token", 0.6), ("match", 13 / 22), ("match-independent", 0.38)]
)
def test_the_first_slot_is_accepted_as_often_as_the_rule_allows(tmp_path, verify, rate):
    p, q = np.tile([0.4, 0.4, 0.2], (3, 1)), np.log([0.8, 0.1, 0.1])
    params = {"q": jnp.broadcast_to(jnp.asarray(q, jnp.float32), (3, 4, 3))}
    # A fixed number of rounds: a limit would favour rounds that accept little.
    _, stats = decode(target(tmp_path, p), Table(3), params, *RULES[verify], 1.0, 64, 15, 1700)
    rounds = stats.rounds.sum()
    assert rounds == 1700 * B * 15
    got = 1 - stats.histogram[..., 0].sum() / rounds
    assert abs(got - rate) < 5 * np.sqrt(rate * (1 - rate) / rounds)
