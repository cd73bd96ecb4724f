"""The clean pass and the cache of its states, against decoding's own."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from small_caches import SOURCES, TOKENS, build, contents, documents, load, text

from specjax.models import cache as kv
from specjax.models import hub
from specjax.models import target as networks
from specjax.models.layers import empty_cache
from specjax.training import features
from specjax.training.features import clean_pass
from specjax.training.packing import Batch

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "targets.npz")
WINDOWS = {  # none, all layers, every other layer
    "full": ("llama", {}),
    "sliding": ("mistral", {"sliding_window": 6}),
    "mixed": (
        "qwen3",
        {
            "sliding_window": 6,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}
step = jax.jit(networks.forward, static_argnums=0, static_argnames="taps")
passed = jax.jit(clean_pass, static_argnums=0, static_argnames=("taps", "chunk"))


def packed(rows, size):
    """A batch of rows of texts, one behind the other; padding holds what nobody may read."""
    batch = {name: np.zeros((len(rows), size), np.int32) for name in ("tokens", "positions")}
    batch |= {"start": np.full((len(rows), size), 3, np.int32)}
    batch |= {"document": np.full((len(rows), size), -1, np.int32)}
    batch["tokens"] += 11
    number = 0
    for b, texts in enumerate(rows):
        at = 0
        for one in texts:
            here = slice(at, at + len(one))
            batch["tokens"][b, here] = one
            batch["positions"][b, here] = np.arange(len(one))
            batch["start"][b, here], batch["document"][b, here] = at, number
            at, number = at + len(one), number + 1
    return Batch(
        **batch, supervised=batch["document"] >= 0, source=np.zeros((len(rows), size), np.int32)
    )


def decoded(target, tokens, taps):
    """Features and hidden states of one text, run token by token behind a cache."""
    cache = empty_cache(target.config.layers, 1, 64, jnp.float32)
    states = []
    for token in tokens:
        at = cache.length[:, None, None]
        one = jnp.full((1, 1, 1), int(token), jnp.int32)
        out = step(target.config, target.params, one, at, context=cache, taps=taps)
        cache = kv.commit(cache, out.k, out.v, jnp.ones((1,), jnp.int32))
        states.append((np.asarray(out.features[0, 0, 0]), np.asarray(out.hidden[0, 0, 0])))
    return [np.stack(each) for each in zip(*states, strict=True)]


ROWS = [[text(13, 0), text(1, 1), text(17, 2)], [text(33, 3)], [text(7, 4), text(16, 5)]]


# ------------------------------------------------------------------------------- the clean pass
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 8, 10, 36, 512])
def test_the_clean_pass_gives_the_states_of_decoding(windows, chunk, tmp_path):
    family, overrides = WINDOWS[windows]
    target = load(tmp_path, family, **overrides)
    assert (target.config.layers.windows[1] is not None) == (windows != "full")
    batch = packed(ROWS, 36)
    got = passed(target.config, target.params, batch, taps=tiny.TAPS, chunk=chunk)[:2]
    number = 0
    for texts in ROWS:
        for one in texts:
            where = batch.document == number
            for have, want in zip(got, decoded(target, one, tiny.TAPS), strict=True):
                np.testing.assert_allclose(np.asarray(have)[where], want, atol=1e-5, rtol=1e-5)
            number += 1
    for have in got:
        np.testing.assert_array_equal(np.asarray(have)[batch.document < 0], 0)


def test_taps_are_the_outputs_of_these_layers(tmp_path):  # case E3
    """transformers' hidden_states[tap + 1], written by a script that shares no code."""
    cases = [name for name in GOLDEN.files if name.endswith("/hidden")]
    assert cases
    for case in (name.removesuffix("/hidden") for name in cases):
        config = json.loads(str(GOLDEN[f"{case}/configs"]))[0]
        directory = tiny.write(tmp_path / case, config, tiny.target_tensors(config))
        target = hub.load_target(directory, dtype="float32")
        rows = [[row] for row in GOLDEN["tokens"]]
        batch = packed(rows, GOLDEN["tokens"].shape[1])
        got = passed(target.config, target.params, batch, taps=tiny.TAPS, chunk=7).features
        np.testing.assert_allclose(got, GOLDEN[f"{case}/hidden"], atol=1e-5, rtol=1e-5)


def test_nothing_is_differentiated(tmp_path):
    target = load(tmp_path)
    batch = packed(ROWS, 36)

    def total(params):
        states, hidden, _ = clean_pass(target.config, params, batch, tiny.TAPS)
        return jnp.sum(states) + jnp.sum(hidden)

    gradient = jax.tree.leaves(jax.grad(total)(target.params))
    assert all(not np.any(g) for g in gradient)


def test_memory_is_bounded_by_the_chunk(tmp_path):
    """Four times the rows take about four times the memory, not sixteen times."""
    target = load(tmp_path)

    def needed(size):
        batch = packed([[text(size, 0)]] * 2, size)
        lowered = passed.lower(target.config, target.params, batch, taps=tiny.TAPS, chunk=64)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert needed(4096) < 5 * needed(1024)


def test_a_tap_that_is_no_layer_is_refused(tmp_path):
    target = load(tmp_path)
    with pytest.raises(ValueError, match="tap 3 is not one of the layers 0 to 2"):
        clean_pass(target.config, target.params, packed(ROWS, 36), (0, 3))
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        clean_pass(target.config, target.params, packed(ROWS, 36), (0,), chunk=0)


# ------------------------------------------------------------------------------------ the cache
@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(features, "ROW_LENGTH", 48)


def test_cached_states_are_those_of_decoding_in_bfloat16(tmp_path):
    target = load(tmp_path / "t", "mistral", sliding_window=6)
    cache = build(target, tmp_path / "c")
    texts = [one.document(i)[0] for one in SOURCES for i in range(len(one))]
    want = [np.concatenate(each) for each in zip(*[decoded(target, t, tiny.TAPS) for t in texts])]  # noqa: B905
    source = np.asarray([[0, 5, TOKENS - 1], [-1, 57, 300]], np.int32)
    for have, all_rows in zip(cache.rows(source), want, strict=True):
        assert have.dtype == np.float32
        near = all_rows[np.maximum(source, 0)] * (source >= 0)[..., None]
        np.testing.assert_allclose(have, near, atol=1e-5, rtol=2**-8)
    assert cache.rows(source, ml_dtypes.bfloat16)[0].dtype == ml_dtypes.bfloat16
    everything = np.arange(TOKENS)[None]
    np.testing.assert_allclose(cache.rows(everything)[0][0], want[0], atol=1e-5, rtol=2**-8)
    without = build(target, tmp_path / "d", final_hidden=False)
    assert without.rows(source)[1] is None
    np.testing.assert_array_equal(without.rows(source)[0], cache.rows(source)[0])


def test_bytes_are_told_and_refused_before_anything_is_written(tmp_path, capsys):  # case H10
    target = load(tmp_path / "t")
    width = (len(tiny.TAPS) + 1) * 48
    needed = TOKENS * width * 2
    with pytest.raises(ValueError, match=f"{width * 2} bytes, {needed} bytes in all, above"):
        build(target, tmp_path / "c", limit_bytes=needed - 1)
    assert not (tmp_path / "c").exists()
    build(target, tmp_path / "c", limit_bytes=needed, progress=True)
    said = capsys.readouterr()
    assert f"{TOKENS} tokens of {width * 2} bytes, {needed} bytes in all" in said.err
    assert not said.out
    files = [file for file in (tmp_path / "c").iterdir() if file.suffix == ".bin"]
    assert sum(file.stat().st_size for file in files) == needed


def test_what_the_disk_cannot_hold_is_refused(tmp_path, monkeypatch):  # case H10
    target = load(tmp_path / "t")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="has 1000 bytes left"):
        build(target, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_another_target_other_taps_or_tokens_are_refused(tmp_path):
    target = load(tmp_path / "t")
    build(target, tmp_path / "c")
    before = contents(tmp_path / "c")
    with pytest.raises(ValueError, match=r"taps: saved \[0, 2\], now \[0, 1\]"):
        build(target, tmp_path / "c", taps=(0, 1))
    with pytest.raises(ValueError, match=r"taps: saved \[0, 2\], now \[2, 0\]"):
        build(target, tmp_path / "c", taps=(2, 0))
    with pytest.raises(ValueError, match="fingerprint: "):
        build(load(tmp_path / "o", seed=1), tmp_path / "c")
    with pytest.raises(ValueError, match="final_hidden_size: saved 48, now 0"):
        build(target, tmp_path / "c", final_hidden=False)
    changed = [SOURCES[0], documents(text(40, 50), text(3, 52))]
    with pytest.raises(ValueError, match="tokens_sha256: ") as error:
        build(target, tmp_path / "c", sources=changed)
    assert "fingerprint" not in str(error.value)
    split = [SOURCES[0], documents(text(40, 50)[:20], np.append(text(40, 50)[20:], text(3, 51)))]
    with pytest.raises(ValueError, match="tokens_sha256: "):  # the same tokens, cut elsewhere
        build(target, tmp_path / "c", sources=split)
    assert contents(tmp_path / "c") == before


def test_a_file_cut_short_is_refused(tmp_path):
    target = load(tmp_path / "t")
    build(target, tmp_path / "c")
    file = tmp_path / "c" / "final_hidden.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"final_hidden.bin has \d+ bytes, its manifest says \d+"):
        build(target, tmp_path / "c")
    file.unlink()
    with pytest.raises(ValueError, match=r"final_hidden.bin has 0 bytes"):
        build(target, tmp_path / "c")


def test_files_without_a_manifest_are_not_built_on(tmp_path):
    target = load(tmp_path / "t")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "features.bin").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="without a manifest"):
        build(target, tmp_path / "c")
