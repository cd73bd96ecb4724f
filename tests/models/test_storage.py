"""Model directories: whole or not at all, exact manifests, no scrambled arrays (D6, D9, D10)."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from specjax.models import hub, storage

CONFIG = tiny.target_config("qwen3")
TENSORS = tiny.target_tensors(CONFIG)


def parse(file):
    """An independent reader of the safetensors format: name -> (dtype, shape, raw bytes)."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def test_transposed_arrays_are_written_in_their_logical_order(tmp_path):  # case D10
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = kernel.astype(ml_dtypes.bfloat16)
    storage.write_directory(
        tmp_path / "m", {"f32": kernel.T, "bf16": half.T, "view": kernel[:, ::2]}, {}
    )
    raw = parse(tmp_path / "m" / storage.WEIGHTS)
    assert raw["f32"] == ("F32", [3, 2], np.ascontiguousarray(kernel.T).tobytes())
    assert raw["bf16"] == ("BF16", [3, 2], np.ascontiguousarray(half.T).tobytes())
    assert raw["view"] == ("F32", [2, 2], np.ascontiguousarray(kernel[:, ::2]).tobytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_published_directories_load_and_are_written_back(dtype, shards, tmp_path):
    tiny.write(tmp_path / "in", CONFIG, TENSORS, shards=shards, dtype=dtype)
    loaded = hub.load_target(tmp_path / "in", dtype=dtype)
    hub.save_target(tmp_path / "out", loaded)
    raw = parse(tmp_path / "out" / storage.WEIGHTS)
    assert set(raw) == set(TENSORS)
    for name, array in TENSORS.items():
        expected = array.astype(dtype)
        kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        assert raw[name] == (kind, list(array.shape), expected.tobytes())
    assert storage.read_json(tmp_path / "out" / "config.json")["torch_dtype"] == dtype


def test_large_checkpoints_are_written_in_shards_with_an_index(tmp_path):
    storage.write_directory(
        tmp_path / "m", TENSORS, {"config.json": CONFIG}, max_shard_bytes=40_000
    )
    index = json.loads((tmp_path / "m" / storage.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
    assert all((tmp_path / "m" / f).stat().st_mode & 0o044 == 0o044 for f in files)
    opened = storage.open_checkpoint(tmp_path / "m")
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(opened.read(name), array)
    assert hub.load_target(tmp_path / "m").config.vocab_size == tiny.VOCAB


def test_a_failed_write_leaves_nothing(tmp_path):
    class Unwritable(dict):
        def __getitem__(self, name):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.write_directory(tmp_path / "m", Unwritable(x=1), {"config.json": {}})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        storage.write_directory(tmp_path / "full", {}, {})
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["precious"]


def test_a_missing_shard_is_named(tmp_path):  # case D9
    tiny.write(tmp_path, CONFIG, TENSORS, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        hub.load_target(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file_is_named(shards, tmp_path):  # case D9
    tiny.write(tmp_path, CONFIG, TENSORS, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=f"{file.name} is truncated"):
        hub.load_target(tmp_path)


def test_an_empty_directory_and_a_stale_index_are_errors(tmp_path):  # case D9
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        hub.load_target(tmp_path)
    tiny.write(tmp_path, CONFIG, TENSORS, shards=2)
    index = tmp_path / storage.INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="disagree about"):
        hub.load_target(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=np.zeros(3, np.float32)), r"unexpected extra \[3\]"),
        (lambda t: t.pop("model.norm.weight"), r"missing model.norm.weight \[48\]"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(47, np.float32)}),
            r"model.norm.weight has shape \[47\], the config asks for \[48\]",
        ),
    ],
)
def test_the_manifest_is_exact(change, message, tmp_path):  # case D6
    tensors = dict(TENSORS)
    change(tensors)
    tiny.write(tmp_path, CONFIG, tensors)
    with pytest.raises(ValueError, match=message):
        hub.load_target(tmp_path)


def test_nan_weights_are_refused_on_request(tmp_path):
    tensors = dict(TENSORS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = np.nan
    tiny.write(tmp_path, CONFIG, tensors)
    hub.load_target(tmp_path)
    with pytest.raises(ValueError, match=r"model.norm.weight holds NaN"):
        hub.load_target(tmp_path, check_finite=True)


def test_every_shard_of_a_mesh_reads_its_own_slice(tmp_path, monkeypatch):
    config = CONFIG | {"vocab_size": 96, "tie_word_embeddings": True}
    tensors = tiny.target_tensors(config)
    tiny.write(tmp_path, config, tensors)
    largest = {}
    read = storage.Checkpoint.read

    def counted(self, name, index=()):
        values = read(self, name, index)
        largest[name] = max(largest.get(name, 0), values.size)
        return values

    monkeypatch.setattr(storage.Checkpoint, "read", counted)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    loaded = hub.load_target(tmp_path, mesh=mesh)
    split = "model.layers.0.self_attn.q_proj.weight"
    assert largest[split] == tensors[split].size // 2
    assert largest["model.embed_tokens.weight"] == tensors["model.embed_tokens.weight"].size // 2
    assert largest["model.norm.weight"] == tensors["model.norm.weight"].size
    weight = loaded.params["layers"][0]["attention"]["q"]["weight"]
    assert weight.sharding.spec == jax.sharding.PartitionSpec(None, "model")
    np.testing.assert_array_equal(weight, tensors[split].T)


def test_heads_that_do_not_divide_are_replicated(tmp_path):
    config = tiny.target_config("qwen3", num_key_value_heads=1)
    tiny.write(tmp_path, config, tiny.target_tensors(config))
    mesh = jax.make_mesh((1, 4), ("data", "model"))
    attention = hub.load_target(tmp_path, mesh=mesh).params["layers"][0]["attention"]
    assert attention["q"]["weight"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    # One key/value head of 16 channels: its rows would divide by 4, the head does not.
    assert attention["k"]["weight"].sharding.spec == jax.sharding.PartitionSpec(None, None)


def test_a_mesh_gives_the_logits_of_one_device(tmp_path):
    from specjax.models import target

    tiny.write(tmp_path, CONFIG, TENSORS)
    tokens = jnp.arange(1, 17, dtype=jnp.int32).reshape(2, 1, 8)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None, None], tokens.shape)
    forward = jax.jit(target.forward, static_argnums=0)
    one = hub.load_target(tmp_path)
    many = hub.load_target(tmp_path, mesh=jax.make_mesh((2, 2), ("data", "model")))
    np.testing.assert_allclose(
        forward(one.config, one.params, tokens, positions).hidden,
        forward(many.config, many.params, tokens, positions).hidden,
        atol=1e-5,
        rtol=1e-5,
    )


def test_differences_are_shown_line_by_line():
    saved = {"lr": 1e-3, "taps": [1, 4], "of": {"a": 1, "b": {}}, "name": "x", "old": None}
    assert storage.differences(saved, saved | {"taps": (1, 4)}) == []
    now = {"lr": 2e-3, "taps": (1, 5), "of": {"a": 1.0, "b": {"c": True}}, "name": "y", "seed": 0}
    assert storage.differences(saved, now) == [
        "  lr: saved 0.001, now 0.002",
        "  taps: saved [1, 4], now [1, 5]",
        "  of.a: saved 1, now 1.0",
        "  of.b.c: saved nothing, now true",
        '  name: saved "x", now "y"',
        "  seed: saved nothing, now 0",
        "  of.b: saved {}, now nothing",
        "  old: saved null, now nothing",
    ]
    assert storage.differences({}, {}) == []
    with pytest.raises(TypeError, match="not JSON serializable"):
        storage.differences({}, {"a": jnp.ones(())})
