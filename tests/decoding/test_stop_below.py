"""Drafts cut short by the verification head: exact under every rule, since it sees no draw."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import RULES as EXACT
from exact import law_error, path_rows, random_table

import specjax
from specjax.models import drafter_hf
from specjax.models import target as networks
from specjax.training import export

PROMPTS = ["Once upon a time", "The dog", "One day, Lily"]


@pytest.fixture(scope="module")
def target():
    return specjax.load_target("stories260k", dtype="float32")


@pytest.fixture(scope="module")
def drafter(target):
    """The packaged drafter with a head: some direction of its states, sure now and then."""
    loaded = specjax.load_drafter("stories260k-dflash", target)
    weight = jax.random.normal(jax.random.key(0), (target.config.layers.hidden_size,))
    head = {"weight": weight, "bias": jnp.full((1,), 2.0)}
    return replace(
        loaded,
        config=replace(loaded.config, verification_head=True),
        params=loaded.params | {"verification_head": head},
    )


@pytest.mark.parametrize(("rule", "mass_of"), EXACT)
def test_a_length_that_is_chosen_before_the_draw_keeps_the_law(rule, mass_of):
    rng = np.random.default_rng(3)
    p, q = random_table(rng, 3), random_table(rng, 3)
    for cut in (0, 1, 2):
        *rows, weights = path_rows(p, q, 3, 3)
        rows[3] = np.full_like(rows[3], cut)
        mass = mass_of(rule, *rows)
        assert law_error(p, 3, 3, mass, weights, rows[2]) < 1e-6


def decode(target, drafter=None, **settings):
    return specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=60, **settings)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_text_stays_that_of_plain_decoding(target, drafter, temperature):
    plain = decode(target, temperature=temperature)
    got = decode(target, drafter, temperature=temperature, verify="match", stop_below=0.6)
    assert got.tokens == plain.tokens
    drafted = [n for one in got.stats for n in one.drafted]
    assert len(set(drafted)) > 4  # from none to all
    assert {0, 7} <= set(drafted)
    assert max(n for one in got.stats for n in one.accepted) > 3


def test_the_length_does_not_depend_on_what_is_drawn(target, drafter):
    """The same state under several keys: other drafts, the same number of them."""
    seen = []
    for seed in range(4):
        decoder, weights, sampling, _, state = specjax.started(
            target, "The dog", drafter=drafter, temperature=1.0, verify="block", stop_below=0.6
        )
        network, key = decoder.drafter, jax.random.split(jax.random.key(seed), 1)
        proposal, _ = network.propose(
            weights.drafter,
            networks.vocabulary(weights.target),
            state.draft,
            state.tokens,
            state.length,
            state.rejected,
            key,
            sampling,
        )
        seen.append((proposal.tokens[0].tolist(), int(proposal.count[0])))
    assert len({tuple(tokens) for tokens, _ in seen}) > 1
    assert len({count for _, count in seen}) == 1


def test_the_head_is_written_and_read(target, drafter, tmp_path):
    again = drafter_hf.config_from_hf(drafter_hf.config_to_hf(drafter.config))
    assert again.verification_head
    export.replace(drafter, tmp_path / "d", target=target, card={"report": {}, "config": {}})
    read = specjax.load_drafter(tmp_path / "d", target)
    assert read.config == drafter.config
    for one, two in zip(jax.tree.leaves(read.params), jax.tree.leaves(drafter.params), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-2, atol=1e-2)  # bfloat16


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop_below": 1.0}, "at least 0 and below 1, not 1.0"),
        ({"stop_below": 0.5, "reuse": "reanchor"}, "not reuse='reanchor'"),
    ],
)
def test_what_cannot_be_cut_is_refused(target, drafter, asked, message):
    with pytest.raises(ValueError, match=message):
        decode(target, drafter, **asked)
    bare = specjax.load_drafter("stories260k-dflash", target)
    for other in (bare, specjax.NGram(), None):
        with pytest.raises(ValueError, match="needs a drafter with a verification head"):
            decode(target, other, stop_below=0.5)
