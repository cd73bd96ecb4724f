"""Exported drafters: both layouts, exact bytes, whole or not at all, the card (cases D10, E3)."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from specjax.models import drafter, drafter_hf, hub, storage, target
from specjax.training import export

WINDOW = {"sliding_window": 6, "use_sliding_window": True}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
RUN = {
    "tau": 2.6123,
    "tokens_per_s": 812.3,
    "plain_tokens_per_s": 500.1,
    "speedup": 1.624,
    "asked": {"temperature": 0.0},
    "settings": {"rule": "match", "num_draft": 5},
    "device": "cpu",
    "target": "some/target",
}
WALK = {"tau": 2.7, "acceptance_per_position": [0.71, 0.5], "answers": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.target_config("qwen3")
    directory = tmp_path_factory.mktemp("target") / "t"
    return hub.load_target(tiny.write(directory, config, tiny.target_tensors(config)))


def made(directory, model, **overrides):
    config = tiny.drafter_config(**overrides)
    return hub.load_drafter(tiny.write(directory, config, tiny.drafter_tensors(config)), model)


def raw(file):
    """Name -> (dtype, shape, bytes) of a safetensors file, by the format's specification alone."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


# ------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sample_from_anchor": True},
        {"layer_types": [SLIDING, FULL], **WINDOW},
        {"layer_types": [SLIDING, SLIDING], "is_causal": False, **WINDOW},
        {"rope_scaling": YARN, "specjax": {"template": "abc thinking=off"}},
        {"attention_bias": True, "num_target_layers": ...},
    ],
)
def test_an_export_loads_as_what_was_exported(layout, overrides, model, tmp_path):
    loaded = made(tmp_path / "in", model, **overrides)
    export.export(loaded, tmp_path / "out", layout=layout, target=model, dtype="float32")
    again = hub.load_drafter(tmp_path / "out", model)
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_layer_ids_are_counted_as_each_layout_counts(model, tmp_path):  # case E3
    loaded = made(tmp_path / "in", model)
    export.export(loaded, tmp_path / "z", dtype="float32")
    export.export(loaded, tmp_path / "s", layout="speculators", target=model)
    config = storage.read_json(tmp_path / "z" / "config.json")
    assert config["dflash_config"]["target_layer_ids"] == list(tiny.TAPS)
    config = storage.read_json(tmp_path / "s" / "config.json")
    assert config["aux_hidden_state_layer_ids"] == [tap + 1 for tap in tiny.TAPS]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": model.name,
        "architectures": ["Qwen3ForCausalLM"],
    }
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == tiny.BLOCK - 1


def test_a_reduced_vocabulary_goes_out_with_both_maps(model, tmp_path):
    kept = np.arange(1, 97, 3)
    inner = tiny.drafter_config(dflash_config=..., block_size=..., num_target_layers=...)
    config = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 96,
        "block_size": 8,
        "draft_vocab_size": 32,
        "transformer_layer_config": inner,
    }
    tensors = tiny.drafter_tensors(tiny.drafter_config()) | {
        "lm_head.weight": np.asarray(model.params["head"])[kept],
        "d2t": kept - np.arange(32),
    }
    storage.write_directory(tmp_path / "in", tensors, {"config.json": config})
    loaded = hub.load_drafter(tmp_path / "in", model)
    export.export(loaded, tmp_path / "out", layout="speculators", target=model, dtype="float32")
    written = storage.open_checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(np.flatnonzero(written.read("t2d")), kept)
    np.testing.assert_array_equal(written.read("d2t") + np.arange(32), kept)
    assert (written.tensors["d2t"].dtype, written.tensors["t2d"].dtype) == (np.int64, np.bool_)
    again = hub.load_drafter(tmp_path / "out", model)
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    with pytest.raises(ValueError, match="reduced vocabulary"):
        export.export(loaded, tmp_path / "z")


def test_a_drafter_of_some_tokens_goes_out_in_both_layouts(model, tmp_path):
    """z-lab's keeps the ids beside the checkpoint; in speculators' it has a head of its own."""
    loaded, ids = made(tmp_path / "in", model), jnp.arange(1, 97, 3)
    some = drafter.restrict(loaded.params, target.vocabulary(model.params), ids)
    some = hub.Drafter("d", tmp_path, loaded.config, some)
    for layout in ("z-lab", "speculators"):
        export.export(some, tmp_path / layout, layout=layout, target=model, dtype="float32")
        again = hub.load_drafter(tmp_path / layout, model)
        jax.tree.map(np.testing.assert_array_equal, again.params, some.params)
        assert "32 of 97 tokens" in (tmp_path / layout / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"is_causal": True}, r"causal = \[True, True\]"),
        ({"final_logit_softcapping": 20.0}, "logit_softcap = 20.0"),
        ({"output_multiplier": 0.5}, "output_multiplier = 0.5"),
        ({"input_embedding_scale": 7.0}, "embedding_scale = 7.0"),
        ({"specjax": {"verification_head": True}}, "verification_head = True"),
    ],
)
def test_what_the_speculators_layout_cannot_say_is_refused(overrides, message, model, tmp_path):
    config = drafter_hf.config_from_hf(tiny.drafter_config(**overrides))
    with pytest.raises(ValueError, match=message):
        drafter_hf.config_to_speculators(config, verifier="a/b", architectures=[])


# --------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposed_arrays_are_written_by_value(layout, dtype, model, tmp_path):  # case D10
    loaded = made(tmp_path / "in", model)

    def strided(leaf):  # the same values, with the memory of the transpose
        return np.array(np.asarray(leaf).T, order="C").T

    turned = hub.Drafter("d", tmp_path, loaded.config, jax.tree.map(strided, loaded.params))
    assert not turned.params["fc"].flags.c_contiguous
    export.export(turned, tmp_path / "out", layout=layout, target=model, dtype=dtype)
    written = raw(tmp_path / "out" / "model.safetensors")
    wanted = tiny.drafter_tensors(tiny.drafter_config())
    assert written.keys() == wanted.keys()
    for name, values in wanted.items():
        values = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        kind = {"float32": "F32", "bfloat16": "BF16"}[dtype]
        assert written[name] == (kind, list(values.shape), values.tobytes()), name
    assert storage.read_json(tmp_path / "out" / "config.json")["dtype"] == dtype


def test_an_export_is_whole_or_not_there(model, tmp_path, monkeypatch):
    loaded = made(tmp_path / "in", model)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            export.export(loaded, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    export.export(loaded, tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        export.export(loaded, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }


def test_an_earlier_export_is_replaced_by_a_complete_one_only(model, tmp_path, monkeypatch):
    loaded = made(tmp_path / "in", model)
    export.replace(loaded, tmp_path / "out", dtype="float32")
    half = jax.tree.map(lambda leaf: leaf / 2, loaded.params)
    halved = hub.Drafter("half", tmp_path, loaded.config, half)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "save_file", lambda *_a, **_k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export.replace(halved, tmp_path / "out", dtype="float32")
    again = hub.load_drafter(tmp_path / "out", model)
    np.testing.assert_array_equal(again.params["fc"], loaded.params["fc"])
    export.replace(halved, tmp_path / "out", dtype="float32")
    again = hub.load_drafter(tmp_path / "out", model)
    np.testing.assert_array_equal(again.params["fc"], half["fc"])
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    with pytest.raises(ValueError, match="is not an exported drafter"):
        export.replace(halved, model.directory)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        export.replace(halved, tmp_path / "notes")
    assert (tmp_path / "notes" / "a.txt").exists()


# ---------------------------------------------------------------------------------------- card
def test_the_card_tells_what_is_known(model, tmp_path):
    loaded = made(tmp_path / "in", model)
    card = {
        "base_model": "some/target",
        "license": "mit",
        "data": "Answers of the target: all of them.",
        "command": "specjax train --config a.json",
        "report": RUN | {"walk": WALK, "runs": [RUN]},
    }
    export.export(loaded, tmp_path / "out", card=card)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert json.loads(fields["license"]) == "mit"
    assert json.loads(fields["base_model"]) == "some/target"
    assert body.startswith("\n# in\n")
    assert str(tmp_path) not in text
    for part in (
        "for `some/target`",
        "46,432, bfloat16",
        "| 0.0 | match | - | 5 | 2.612 | 812.3 | 500.1 | 1.62 |",
        "**2.700** tokens a round",
        "0.710, 0.500",
        "    specjax train --config a.json",
        "Answers of the target: all of them.",
    ):
        assert part in body


def test_a_card_without_figures_claims_none(model, tmp_path):
    export.export(made(tmp_path / "in", model), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Figures" not in text
    assert "license" not in text


# ------------------------------------------------------------------------------------- refused
def test_what_cannot_be_meant_is_refused(model, tmp_path):
    loaded = made(tmp_path / "in", model)
    cases = [
        ({"layout": "eagle"}, "layout 'eagle'"),
        ({"card": {"licence": "mit"}}, "a model card has no licence"),
        ({"layout": "speculators"}, "pass target="),
        ({"layout": "speculators", "target": model, "verifier": "nowhere"}, "pass verifier="),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            export.export(loaded, tmp_path / "out", **arguments)
    config = tiny.target_config("qwen3", num_hidden_layers=5)
    directory = tiny.write(tmp_path / "other", config, tiny.target_tensors(config))
    with pytest.raises(ValueError, match="trained for a target of 4 layers"):
        export.export(loaded, tmp_path / "out", target=hub.load_target(directory))
    assert not (tmp_path / "out").exists()
