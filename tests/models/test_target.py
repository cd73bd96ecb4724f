"""The target network against transformers' logits, in every way of cutting a text into passes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax.models import cache as kv
from specjax.models import hub, params, target
from specjax.models.layers import empty_cache

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "targets.npz")
TOKENS = jnp.asarray(GOLDEN["tokens"])
CASES = [key.removesuffix("/configs") for key in GOLDEN.files if key.endswith("/configs")]
forward = jax.jit(target.forward, static_argnums=0, static_argnames="taps")
TOLERANCE = 1e-4  # two implementations sum in different orders; logits are of order 10


def load(config, directory):
    tiny.write(directory, config, tiny.target_tensors(config))
    return hub.load_target(directory)


def whole(loaded, tokens, taps=()):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(loaded.config, loaded.params, tokens[:, None], positions[:, None], taps=taps)


def logits(loaded, hidden):
    return target.unembed(target.vocabulary(loaded.params), hidden)


def cached(loaded, tokens, chunk):
    """Runs the text in chunks behind a cache, then returns all hidden states."""
    cache = empty_cache(loaded.config.layers, tokens.shape[0], 32, jnp.float32)
    # Dead rows may hold anything finite.
    cache = cache.replace(k=tuple(k + 1e4 for k in cache.k), v=tuple(v - 1e4 for v in cache.v))
    states = []
    for start in range(0, tokens.shape[1], chunk):
        piece = tokens[:, start : start + chunk]
        positions = cache.length[:, None] + jnp.arange(piece.shape[1], dtype=jnp.int32)[None]
        out = forward(
            loaded.config, loaded.params, piece[:, None], positions[:, None], context=cache
        )
        count = jnp.full(tokens.shape[:1], piece.shape[1], jnp.int32)
        cache = kv.commit(cache, out.k, out.v, count)
        states.append(out.hidden[:, 0])
    return jnp.concatenate(states, axis=1)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    for number, config in enumerate(json.loads(str(GOLDEN[f"{case}/configs"]))):
        loaded = load(config, tmp_path / str(number))
        got = logits(loaded, whole(loaded, TOKENS).hidden[:, 0])
        np.testing.assert_allclose(got, GOLDEN[f"{case}/logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "case", ["llama_gqa_tied", "mistral_sliding", "qwen2_sliding", "qwen3_mixed"]
)
@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_cached_passes_equal_transformers(case, chunk, tmp_path):
    loaded = load(json.loads(str(GOLDEN[f"{case}/configs"]))[0], tmp_path / "m")
    got = logits(loaded, cached(loaded, TOKENS, chunk))
    np.testing.assert_allclose(got, GOLDEN[f"{case}/logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [c for c in CASES if f"{c}/hidden" in GOLDEN.files])
def test_features_are_the_outputs_of_the_tapped_blocks(case, tmp_path):  # cases E3 and D12 taps
    loaded = load(json.loads(str(GOLDEN[f"{case}/configs"]))[0], tmp_path / "m")
    out = whole(loaded, TOKENS, taps=tiny.TAPS)
    np.testing.assert_allclose(out.features[:, 0], GOLDEN[f"{case}/hidden"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(out.hidden[:, 0], GOLDEN[f"{case}/last"], atol=1e-5, rtol=1e-5)


def test_features_follow_the_order_of_the_taps(tmp_path):
    config = tiny.target_config("qwen3")
    loaded = load(config, tmp_path / "m")
    E = config["hidden_size"]
    forwards = whole(loaded, TOKENS, taps=(0, 2)).features
    backwards = whole(loaded, TOKENS, taps=(2, 0)).features
    np.testing.assert_array_equal(forwards[..., :E], backwards[..., E:])
    np.testing.assert_array_equal(forwards[..., E:], backwards[..., :E])


@pytest.mark.parametrize("taps", [(3,), (-1,), (0, 0), (0, 9)])
def test_taps_that_mean_nothing_are_refused(taps, tmp_path):
    loaded = load(tiny.target_config("qwen3"), tmp_path / "m")
    with pytest.raises(ValueError, match=r"tap"):
        whole(loaded, TOKENS, taps=taps)


@pytest.mark.parametrize("case", ["llama_gqa_tied", "qwen3_sliding"])
def test_a_packed_pass_in_chunks_equals_each_document_alone(case, tmp_path):
    loaded = load(json.loads(str(GOLDEN[f"{case}/configs"]))[0], tmp_path / "m")
    lengths = [7, 10, 7]  # borders inside and at the edge of the chunks of 6
    text = TOKENS[:1]
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
    positions = np.arange(24, dtype=np.int32) - starts
    packed = forward(
        loaded.config,
        loaded.params,
        text.reshape(1, 4, 6),
        jnp.asarray(positions).reshape(1, 4, 6),
        context_start=jnp.asarray(starts).reshape(1, 4, 6),
        taps=(0, 2),
    )
    first = 0
    for length in lengths:
        alone = whole(loaded, text[:, first : first + length], taps=(0, 2))
        for got, want in ((packed.hidden, alone.hidden), (packed.features, alone.features)):
            got = got.reshape(1, 24, -1)[:, first : first + length]
            np.testing.assert_allclose(got, want[:, 0], atol=1e-5, rtol=1e-5)
        first += length


def test_verify_rows_equal_single_steps_at_any_capacity(tmp_path):  # case A4
    loaded = load(tiny.target_config("qwen3"), tmp_path / "m")
    want = logits(loaded, whole(loaded, TOKENS[:, :16]).hidden[:, 0])[:, 11:]
    for capacity in (16, 19, 64):
        cache = empty_cache(loaded.config.layers, 2, capacity, jnp.float32)
        for rows in (11, 5):
            piece = jax.lax.dynamic_slice_in_dim(TOKENS, int(cache.length[0]), rows, axis=1)
            positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
            out = forward(
                loaded.config, loaded.params, piece[:, None], positions[:, None], context=cache
            )
            cache = kv.commit(cache, out.k, out.v, jnp.full((2,), rows, jnp.int32))
        np.testing.assert_allclose(logits(loaded, out.hidden[:, 0]), want, atol=1e-5, rtol=1e-5)


def test_bfloat16_runs_and_keeps_logits_in_float32(tmp_path):
    config = tiny.target_config("qwen3")
    tiny.write(tmp_path / "m", config, tiny.target_tensors(config), dtype="bfloat16")
    loaded = hub.load_target(tmp_path / "m", dtype="bfloat16")
    got = logits(loaded, whole(loaded, TOKENS).hidden[:, 0])
    assert got.dtype == jnp.float32
    exact = logits(
        load(config, tmp_path / "f"), whole(load(config, tmp_path / "g"), TOKENS).hidden[:, 0]
    )
    # Four layers of bf16 rounding (2^-8 each) on logits of order 10: close, and not equal.
    assert 1e-3 < float(jnp.abs(got - exact).max()) < 1.5


def test_a_random_init_has_the_published_shapes_and_count(tmp_path):
    config = target.config_from_hf(tiny.target_config("qwen3"))
    table = target.table(config)
    made = params.init(table, jax.random.key(0))
    named = params.save(table, made)
    published = tiny.target_tensors(tiny.target_config("qwen3"))
    assert {name: array.shape for name, array in named.items()} == {
        name: array.shape for name, array in published.items()
    }
    assert params.count(table) == sum(array.size for array in published.values())
