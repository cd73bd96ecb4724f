"""The config of a run: JSON in and out, changes by name, errors that name what is wrong."""

import json
from pathlib import Path

import pytest

import specjax
from specjax.training.config import Shape, TrainConfig, drafter_config, from_json, read, to_json
from specjax.training.objectives import Objective

SHIPPED = sorted(Path("experiments/configs").glob("*.json"))
MINIMAL = {
    "name": "run",
    "target": "stories260k",
    "sources": [{"name": "stories", "limit": 4}],
    "drafter": {"layers": 1, "taps": [0, 2], "mask_token_id": 0},
}


def test_json_goes_in_and_out_unchanged():
    made = from_json(MINIMAL | {"objective": {"losses": {"ce": 0.1, "kl": 0.9}}})
    assert made.objective == Objective(losses=(("ce", 0.1), ("kl", 0.9)))
    assert from_json(to_json(made)) == made
    assert hash(from_json(to_json(made))) == hash(made)  # two equal ones share a compile
    assert to_json(made)["optimizer"]["learning_rate"] == made.optimizer.learning_rate


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configs_are_read(file):
    made = read(file)
    assert isinstance(made, TrainConfig)
    assert made.name == file.stem
    for source in made.sources:
        assert source.prompts is None or Path(source.prompts).exists()


def test_changes_by_dotted_name(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MINIMAL))
    made = read(file, ["optimizer.learning_rate=1", "sources.0.limit=7", "name=other", "steps=3"])
    assert (made.optimizer.learning_rate, made.sources[0].limit) == (1.0, 7)
    assert (made.name, made.steps) == ("other", 3)
    with pytest.raises(ValueError, match="write it as name=value"):
        read(file, ["steps"])
    with pytest.raises(ValueError, match="5 is not one of the entries 0 to 0"):
        read(file, ["sources.5.limit=1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "stepz is unknown; known are name, target"),
        ({"steps": "many"}, "steps = 'many' must be int"),
        ({"steps": True}, "steps = True must be int"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"features": "offline"}, "features = 'offline' is not one of online, cache"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name = 'sgd' is not one of adamw, muon"),
        ({"optimizer": {"lr": 1.0}}, r"optimizer\.lr is unknown"),
        ({"objective": {"losses": {"mse": 1.0}}}, "loss 'mse' is unknown"),
        ({"objective": 3}, "objective = 3 must be an object"),
        ({"drafter": None}, "either drafter .* or init_from"),
        ({"init_from": "somewhere"}, "either drafter .* or init_from"),
        ({"drafter": {"layers": 1, "taps": [0]}}, "drafter.mask_token_id is missing"),
        ({"drafter": {"layers": 1, "taps": 0, "mask_token_id": 0}}, "drafter.taps = 0 must be"),
        ({"rows": 6, "accumulate": 4}, "rows 6 must be a multiple of accumulate 4"),
        ({"sources": []}, "sources is empty"),
        ({"name": "a/b"}, "does not name a folder"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(MINIMAL | change)


def test_a_file_that_is_no_json_is_named(tmp_path):
    file = tmp_path / "broken.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not JSON"):
        read(file)


def test_the_drafter_takes_the_targets_sizes():
    target = specjax.load_target("stories260k")
    made = drafter_config(Shape(layers=2, taps=(0, 3), mask_token_id=0), target)
    assert made.layers.hidden_size == made.target_hidden_size == 64
    assert (made.layers.num_heads, made.layers.num_kv_heads, made.layers.head_dim) == (8, 4, 8)
    assert made.layers.rope == target.config.layers.rope
    assert (made.num_target_layers, made.block_size, made.template) == (5, 8, None)
    wide = Shape(layers=1, taps=(0,), mask_token_id=0, intermediate_size=256, num_heads=4)
    assert drafter_config(wide, target).layers.intermediate_size == 256


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(layers=1, taps=(0, 4), mask_token_id=0), "tap 4 is not one of the layers 0 to 3"),
        (Shape(layers=1, taps=(), mask_token_id=0), "drafter.taps is empty"),
        (Shape(layers=1, taps=(0,), mask_token_id=512), "mask_token_id 512 is not a token"),
        (Shape(layers=1, taps=(0,), mask_token_id=-1), "mask_token_id -1 is not a token"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        drafter_config(shape, specjax.load_target("stories260k"))
