"""The drafter backbone against the published implementation, and cases E1, E2, E4, E6, D4."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax.models import cache as kv
from specjax.models import drafter, drafter_hf, hub
from specjax.models.layers import empty_cache
from specjax.types import Vocabulary

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "drafters.npz")
CASES = [key.removesuffix("/configs") for key in GOLDEN.files if key.endswith("/configs")]
EMBEDDING = jnp.asarray(tiny.tensor("model.embed_tokens.weight", (tiny.VOCAB, 48)))
VOCABULARY = Vocabulary(EMBEDDING, EMBEDDING)
forward = jax.jit(drafter.forward, static_argnums=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config = tiny.target_config("qwen3")
    return hub.load_target(
        tiny.write(tmp_path_factory.mktemp("target"), config, tiny.target_tensors(config))
    )


def load(directory, target, config, **kwargs):
    tiny.write(directory, config, tiny.drafter_tensors(config))
    return hub.load_drafter(directory, target, **kwargs)


def committed(loaded, features, capacity=32):
    """A context cache that holds the given features [B, M, F], poisoned behind them."""
    cache = empty_cache(loaded.config.layers, features.shape[0], capacity, jnp.float32)
    cache = cache.replace(k=tuple(k + 1e4 for k in cache.k), v=tuple(v - 1e4 for v in cache.v))
    return extend(loaded, cache, features)


def extend(loaded, cache, features):
    return _extend(loaded.config, loaded.params, cache, features)


@partial(jax.jit, static_argnums=0)
def _extend(config, params, cache, features):
    rows = features.shape[1]
    positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    fused = drafter.fuse(config, params, features)
    k, v = drafter.context_rows(config, params, fused, positions)
    return kv.append(cache, k, v, jnp.full(features.shape[:1], rows, jnp.int32))


def hidden(loaded, cache, block):
    return forward(loaded.config, loaded.params, VOCABULARY, block, cache)


def features_of(loaded, rows):
    width = len(loaded.config.taps) * 48
    total = int(GOLDEN["commits"].sum())
    return jnp.asarray(tiny.tensor("features", (2, total, width)))[:, :rows]


@pytest.mark.parametrize("case", CASES)
def test_three_rounds_equal_the_published_implementation(case, target, tmp_path):
    for number, config in enumerate(json.loads(str(GOLDEN[f"{case}/configs"]))):
        loaded = load(tmp_path / str(number), target, config)
        features = features_of(loaded, int(GOLDEN["commits"].sum()))
        cache = committed(loaded, features[:, :0])
        for anchors, new, want in zip(
            GOLDEN["anchors"], GOLDEN["commits"], GOLDEN[f"{case}/hidden"], strict=True
        ):
            start = int(cache.length[0])
            cache = extend(loaded, cache, features[:, start : start + int(new)])
            block = drafter.draft_block(loaded.config, jnp.asarray(anchors), cache.length)
            got = hidden(loaded, cache, block)[:, 0]
            np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def test_the_block_is_the_anchor_and_masks(target, tmp_path):  # case E1
    loaded = load(tmp_path / "d", target, tiny.drafter_config())
    block = drafter.draft_block(loaded.config, jnp.array([7, 9]), jnp.array([4, 6]))
    assert block.tokens[:, 0].tolist() == [[7] + [tiny.MASK] * 7, [9] + [tiny.MASK] * 7]
    assert block.positions[:, 0].tolist() == [list(range(4, 12)), list(range(6, 14))]
    assert block.context_end.tolist() == [[4], [6]]
    cache = committed(loaded, features_of(loaded, 4))
    one = hidden(loaded, cache, drafter.draft_block(loaded.config, jnp.array([7, 7]), cache.length))
    two = hidden(loaded, cache, drafter.draft_block(loaded.config, jnp.array([8, 7]), cache.length))
    assert (jnp.abs(one[0, 0, 1:] - two[0, 0, 1:]).max(axis=-1) > 1e-4).all()
    np.testing.assert_array_equal(one[1], two[1])


@pytest.mark.parametrize(
    ("overrides", "sees_later"),
    [({}, True), ({"is_causal": True}, False)],
)
def test_slots_see_later_slots_unless_causal(overrides, sees_later, target, tmp_path):  # case E6
    loaded = load(tmp_path / "d", target, tiny.drafter_config(**overrides))
    cache = committed(loaded, features_of(loaded, 4))
    block = drafter.draft_block(loaded.config, jnp.array([7, 9]), cache.length)
    delta = jnp.zeros((2, 1, 8, 48)).at[:, :, 5].set(1.0)
    change = jnp.abs(
        hidden(loaded, cache, block.replace(delta=delta)) - hidden(loaded, cache, block)
    )
    assert bool((change[:, 0, 1].max(axis=-1) > 1e-4).all()) == sees_later
    assert (change[:, 0, 6].max(axis=-1) > 1e-4).all()


def test_context_at_or_behind_the_anchor_is_invisible(target, tmp_path):
    loaded = load(tmp_path / "d", target, tiny.drafter_config())
    features = features_of(loaded, 9)
    cache = committed(loaded, features)
    other = committed(loaded, features.at[:, 6:].add(3.0))
    position = jnp.array([6, 6], jnp.int32)
    block = drafter.draft_block(loaded.config, jnp.array([7, 9]), position)
    np.testing.assert_array_equal(hidden(loaded, cache, block), hidden(loaded, other, block))
    seen = committed(loaded, features.at[:, 5].add(3.0))
    assert float(jnp.abs(hidden(loaded, cache, block) - hidden(loaded, seen, block)).max()) > 1e-4


@pytest.mark.parametrize(
    ("overrides", "dense"),
    [
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, False),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True},
            True,
        ),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, True),
        ({"layer_types": ["full_attention"] * 2, "use_sliding_window": True}, True),
        (
            {
                "num_hidden_layers": 1,
                "layer_types": ["sliding_attention"],
                "use_sliding_window": True,
            },
            False,
        ),
    ],
)
def test_a_sliding_drafter_forgets_what_is_behind_its_window(
    overrides, dense, target, tmp_path
):  # case D4
    loaded = load(tmp_path / "d", target, tiny.drafter_config(sliding_window=8, **overrides))
    width = len(loaded.config.taps) * 48
    features = jnp.asarray(tiny.tensor("long", (1, 24, width)))
    block = drafter.draft_block(loaded.config, jnp.array([7]), jnp.array([24], jnp.int32))
    one = hidden(loaded, committed(loaded, features), block)
    two = hidden(loaded, committed(loaded, features.at[:, 0].add(5.0)), block)
    assert bool((one == two).all()) != dense


def test_without_window_keys_the_bits_are_those_of_the_dense_drafter(target, tmp_path):  # case D4
    config = tiny.drafter_config()
    bare = {k: v for k, v in config.items() if "sliding" not in k and "window" not in k}
    one, two = load(tmp_path / "a", target, config), load(tmp_path / "b", target, bare)
    block = drafter.draft_block(one.config, jnp.array([7, 9]), jnp.array([5, 5], jnp.int32))
    features = features_of(one, 5)
    np.testing.assert_array_equal(
        hidden(one, committed(one, features), block), hidden(two, committed(two, features), block)
    )


@pytest.mark.parametrize(
    ("overrides", "layout", "expected"),
    [
        ({}, None, "fill"),
        ({}, "next", "next"),
        ({"sample_from_anchor": True}, None, "next"),
        ({"sample_from_anchor": True}, "fill", "fill"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, None, "next"),
        ({"markov_rank": 0}, None, "next"),
        ({"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False}, None, "fill"),
    ],
)
def test_argument_then_flag_then_architecture_decide_the_layout(
    overrides, layout, expected
):  # case E2
    config = drafter_hf.config_from_hf(tiny.drafter_config(**overrides), layout=layout)
    assert config.layout == expected
    assert config.num_drafts == {"fill": 7, "next": 8}[expected]
    written = drafter_hf.config_to_hf(config)
    assert written["sample_from_anchor"] == (expected == "next")
    assert drafter_hf.config_from_hf(written) == config


@pytest.mark.parametrize("layout", ["fill", "next"])
@pytest.mark.parametrize("made_for", ["fill", "next"])
def test_an_oracle_is_right_in_its_own_layout_only(layout, made_for):  # case E2
    """An oracle of the count language, its slots read as each layout reads them."""
    config = drafter_hf.config_from_hf(tiny.drafter_config(), layout=layout)
    anchor = 40
    shift = {"fill": 0, "next": 1}[made_for]
    slots = [anchor + j + shift for j in range(config.block_size)]
    drafts = slots[config.first_slot :]
    truth = [anchor + k for k in range(1, config.num_drafts + 1)]
    accepted = next(
        (k for k, pair in enumerate(zip(drafts, truth, strict=True)) if pair[0] != pair[1]),
        len(truth),
    )
    assert accepted == (config.num_drafts if layout == made_for else 0)


def test_num_draft_stays_within_the_trained_block():  # case E4
    config = drafter_hf.config_from_hf(tiny.drafter_config())
    assert config.check_num_draft(4) == 4
    assert config.check_num_draft(7) == 7
    for wrong in (0, 8, 12):
        with pytest.raises(ValueError, match=f"num_draft {wrong} is not between 1 and 7"):
            config.check_num_draft(wrong)


def test_scale_multiplier_and_cap_are_applied(target, tmp_path):
    config = tiny.drafter_config(
        input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=3.0
    )
    loaded = load(tmp_path / "d", target, config)
    plain = load(tmp_path / "p", target, tiny.drafter_config())
    features = features_of(plain, 5)
    block = drafter.draft_block(plain.config, jnp.array([7, 9]), jnp.array([5, 5], jnp.int32))
    scaled = Vocabulary(EMBEDDING * 2.0, EMBEDDING)
    want_hidden = forward(plain.config, plain.params, scaled, block, committed(plain, features))
    got_hidden = hidden(loaded, committed(loaded, features), block)
    np.testing.assert_allclose(got_hidden, want_hidden, atol=1e-6)
    base = drafter.unembed(plain.config, plain.params, VOCABULARY, want_hidden)
    got = drafter.unembed(loaded.config, loaded.params, VOCABULARY, got_hidden)
    np.testing.assert_allclose(got, 3.0 * np.tanh(np.asarray(base) * 0.5 / 3.0), atol=1e-5)
    assert float(jnp.abs(got).max()) <= 3.0
