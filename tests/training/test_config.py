"""The config of a run: JSON in and out, changes by name, errors that name what is wrong."""

import json
import math
from pathlib import Path

import pytest

import specjax
from specjax.training.config import (
    HeldOut,
    Optimizer,
    Shape,
    Source,
    TrainConfig,
    from_json,
    read,
    to_json,
)
from specjax.training.network import drafter_config
from specjax.training.objectives import Objective

SHIPPED = sorted(Path("experiments/configs").glob("*.json"))
MINIMAL = {
    "name": "run",
    "target": "stories260k",
    "sources": [{"name": "stories", "limit": 4}],
    "drafter": {"layers": 1, "taps": [0, 2], "mask_token_id": 0},
}


HELD = {"prompts": "prompts.jsonl"}
REUSE = {"reuse": {"method": "dflow"}, "branches": {}}


def changed(changes):
    """MINIMAL with values by dotted name."""
    raw = json.loads(json.dumps(MINIMAL)) | {"heldout": dict(HELD)}
    for path, value in changes.items():
        *parents, last = path.split(".")
        where = raw
        for key in parents:
            where = where[int(key)] if isinstance(where, list) else where.setdefault(key, {})
        where[last] = value
    return raw


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
        ({"block_size": 4}, "block_size goes with init_from"),
        ({"drafter": {"layers": 1, "taps": [0]}}, "drafter.mask_token_id is missing"),
        ({"drafter": {"layers": 1, "taps": 0, "mask_token_id": 0}}, "drafter.taps = 0 must be"),
        ({"rows": 6, "accumulate": 4}, "rows 6 must be a multiple of accumulate 4"),
        ({"sources": []}, "sources is empty"),
        ({"name": "a/b"}, "does not name a folder"),
        (
            {"objective": {"losses": [["ce", 1.0, 2.0]]}},
            r"objective\.losses\.0 = .* 2 entries, not 3",
        ),
        ({"objective": {"losses": [3]}}, r"objective\.losses\.0 = 3 must be a list"),
        ({"objective": {"losses": {"ce": "1"}}}, r"objective\.losses\.ce = '1' must be float"),
        ({"objective": {"losses": {"ce": -1}}}, r"objective\.losses\.ce must be positive"),
        ({"objective": {"gamma": -1.0}}, r"objective\.gamma must be positive"),
        ({"sources": {"stories": {}}}, "sources = .* must be a list"),
        ({"heldout": HELD | {"drafts": {"1": 2}}}, r"heldout\.drafts = .* must be a list"),
        (
            {"sources": [{"name": "a", "limit": 1}] * 2},
            r"sources\.1\.name 'a' is also .* sources\.0",
        ),
        ({"sources": [{"name": "a"}]}, r"sources\.0\.limit .* must say how many texts"),
        ({"anchors": 16, "row_length": 16}, "anchors must be at most 15, not 16"),
        (
            {"steps": 10, "optimizer": {"warmup": 0.96}},
            r"optimizer\.warmup 0\.96 leaves none of 10",
        ),
        ({"heldout": HELD | {"drafts": [7, 8]}}, r"heldout\.drafts must be at most 7, .* not 8"),
        ({"reuse": {"method": "dflow"}}, "reuse and branches go together"),
        ({"branches": {}}, "reuse and branches go together"),
        (REUSE | {"features": "cache"}, "features must be online"),
        (REUSE | {"branches": {"anchors": 512}}, r"branches\.anchors must be at most 511, not 512"),
        (REUSE | {"branches": {"ramp": 50}}, r"branches\.ramp 50: nothing of dflow grows"),
        (REUSE | {"branches": {"rounds": 0}}, "rounds must be at least 1, not 0"),
        (REUSE | {"branches": {"before": -1}}, "before must be at least 0, not -1"),
        (REUSE | {"reuse": {"method": "reanchor"}}, "'reanchor' needs no training"),
        (REUSE | {"reuse": {"method": "dflow", "site": "pre_fc"}}, "dflow has no setting 'site'"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(MINIMAL | change)


NUMBERS = {
    "optimizer.learning_rate": [-1e-3, 0, math.inf, math.nan],
    "optimizer.clip": [-1.0, 0.0, math.inf, math.nan],
    "optimizer.warmup": [-0.1, 1.0, math.nan],
    "optimizer.weight_decay": [-0.1, math.inf, math.nan],
    "optimizer.b1": [-0.1, 1.0, math.nan],
    "optimizer.b2": [-0.1, 1.0, math.nan],
    "sources.0.weight": [-1.0, 0.0, math.inf, math.nan],
    "sources.0.limit": [0, -1],
    "sources.0.max_new_tokens": [0],
    "sources.0.batch_size": [0],
    "sources.0.temperature": [-1.0, math.inf, math.nan],
    "sources.0.top_k": [-1],
    "sources.0.top_p": [0.0, 1.1, math.nan],
    "sources.0.seed": [-1, 2**32],
    "sources.0.name": ["", "a/b", "..", ".hidden"],
    "drafter.layers": [0],
    "drafter.block_size": [1, 0],
    "drafter.num_heads": [0],
    "drafter.num_kv_heads": [0, -1],
    "drafter.head_dim": [0, 7],
    "drafter.intermediate_size": [0],
    "heldout.limit": [0],
    "heldout.max_new_tokens": [0],
    "heldout.batch_size": [0],
    "heldout.walked": [0],
    "heldout.decoded": [0],
    "heldout.every": [-1],
    "heldout.temperatures": [[], [0.0, -1.0]],
    "heldout.drafts": [[0], [3, -1]],
    "cache_gb": [0.0, -1.0, math.inf, math.nan],
    "seed": [-1, 2**32],
    "keep": [0],
    "checkpoint_every": [0],
    "objective.alpha": [math.nan],
    "objective.gamma": [math.inf],
    "objective.losses.ce": [math.nan],
    "objective.finish.bv": [0.0, math.inf],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in NUMBERS.items() for value in values]
)
def test_a_value_that_no_run_can_have_is_refused_by_its_name(path, value):
    with pytest.raises(ValueError, match=rf"^{path}\b"):
        from_json(changed({path: value}))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Optimizer, "optimizer.learning_rate"),
        (Optimizer, "optimizer.b2"),
        (lambda **value: Source(name="a", limit=1, **value), "sources.0.weight"),
        (lambda **value: HeldOut(prompts="a", **value), "heldout.temperatures"),
        (lambda **value: Shape(taps=(0,), mask_token_id=0, **value), "drafter.layers"),
    ],
)
def test_dataclasses_refuse_them_without_json_too(kind, path):
    name = path.split(".")[-1]
    for value in NUMBERS[path]:
        with pytest.raises(ValueError, match=f"^{name} "):
            kind(**{name: tuple(value) if isinstance(value, list) else value})


def test_the_limits_themselves_are_good():
    made = from_json(
        changed(
            {
                "optimizer.warmup": 0.0,
                "optimizer.b1": 0.0,
                "sources.0.top_p": 1.0,
                "drafter.block_size": 2,
                "heldout.every": 0,
                "heldout.drafts": [1],
                "anchors": 15,
                "row_length": 16,
                "seed": 2**32 - 1,
            }
        )
    )
    assert made.drafter.num_drafts == 1
    assert Shape(1, (0,), 0, block_size=1, layout="next").num_drafts == 1
    with pytest.raises(ValueError, match=r"block_size 0 leaves no slot .*'next'"):
        Shape(1, (0,), 0, block_size=0, layout="next")
    with pytest.raises(ValueError, match="num_heads 6 must be a multiple of num_kv_heads 4"):
        Shape(1, (0,), 0, num_heads=6, num_kv_heads=4)
    assert from_json(MINIMAL | {"steps": 1}).steps == 1  # one step of warm-up is all there is


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MINIMAL))
    with pytest.raises(ValueError, match=r"^optimizer\.clip must be a finite number"):
        read(file, [f"optimizer.clip={text}"])
    file.write_text(json.dumps(MINIMAL)[:-1] + f', "cache_gb": {text}}}')
    with pytest.raises(ValueError, match=r"^cache_gb must be a finite number"):
        read(file)


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
        (
            Shape(layers=1, taps=(0, 4), mask_token_id=0),
            "drafter.taps: tap 4 is not one of the layers 0 to 3",
        ),
        (Shape(layers=1, taps=(), mask_token_id=0), "drafter.taps is empty"),
        (Shape(layers=1, taps=(0,), mask_token_id=512), "mask_token_id 512 is not a token"),
        (Shape(layers=1, taps=(0,), mask_token_id=-1), "mask_token_id -1 is not a token"),
        (Shape(1, (0,), 0, num_kv_heads=3), "drafter: 8 heads over 3 key/value heads"),
        (Shape(1, (0,), 0, num_heads=6), "drafter: 6 heads over 4 key/value heads"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        drafter_config(shape, specjax.load_target("stories260k"))
