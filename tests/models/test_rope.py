"""Rotary frequencies against formulas written out here (case D3)."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import rope

D = 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def plain(theta):
    return np.array([theta ** (-2 * j / D) for j in range(D // 2)])


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_gives_the_exact_powers(scaling):
    read = rope.from_hf({"rope_theta": 1e6, "rope_scaling": scaling}, default_theta=None)
    np.testing.assert_array_equal(read.frequencies(D), plain(1e6).astype(np.float32))
    assert read.attention_factor == 1.0


def test_linear_divides_every_frequency():
    scaling = {"type": "linear", "factor": 4}
    read = rope.from_hf({"rope_theta": 1e4, "rope_scaling": scaling}, default_theta=None)
    np.testing.assert_allclose(read.frequencies(D), plain(1e4) / 4, rtol=1e-6)


def test_yarn_blends_between_its_rotations():
    theta = 1e4
    read = rope.from_hf({"rope_theta": theta, "rope_scaling": YARN}, default_theta=None)
    low, high = (
        D * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    want = []
    for j, f in enumerate(plain(theta)):
        share = min(max((j - low) / (high - low), 0), 1)
        want.append(f * (1 - share) + f / 4 * share)
    np.testing.assert_allclose(read.frequencies(D), want, rtol=1e-6)
    assert read.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_takes_explicit_and_derived_attention_factors():
    both = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    read = rope.from_hf({"rope_theta": 1e4, "rope_scaling": both}, default_theta=None)
    assert read.attention_factor == pytest.approx(
        (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    )
    given = YARN | {"attention_factor": 1.25}
    read = rope.from_hf({"rope_theta": 1e4, "rope_scaling": given}, default_theta=None)
    assert read.attention_factor == 1.25
    cos, _ = rope.rotation(read, jnp.zeros((1,), jnp.int32), D)
    np.testing.assert_allclose(cos, 1.25)


def test_theta_is_found_flat_and_nested_and_the_root_wins():
    nested = {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}
    assert rope.from_hf(nested, default_theta=None).theta == 1e7
    assert rope.from_hf({**nested, "rope_theta": 5e5}, default_theta=None).theta == 5e5
    assert rope.from_hf({}, default_theta=1e4).theta == 1e4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "neither rope_theta nor rope_parameters.rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "foo", "factor": 2}}, "'foo'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}}, "needs a factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_theta": 1e4, "rope_parameters": {"full_attention": {}}}, "by layer type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        rope.from_hf(config, default_theta=None)


def test_rotation_depends_on_distance_only():
    read = rope.Rope(1e4)
    q, k = (jnp.asarray(np.random.RandomState(s).randn(1, 1, D), jnp.float32) for s in (0, 1))

    def score(q_position, k_position):
        cos, sin = rope.rotation(read, jnp.array([q_position, k_position], jnp.int32), D)
        turned = (rope.rotate(q, cos[:1], sin[:1]) * rope.rotate(k, cos[1:], sin[1:])).sum()
        return float(turned)

    assert score(7, 3) == pytest.approx(score(304, 300), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
