"""Checkpoints: whole or not at all, bit for bit, nothing guessed (cases H5, H6, H7)."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax.training import checkpoint
from specjax.training.checkpoint import Checkpoints, check_meta


def drafter_state(layers=12):
    """Parameters, optimizer state, key and counters, with a value of its own in every leaf."""
    params = {
        "layers": [{"w": jnp.full((3, 5), i, jnp.float32)} for i in range(layers)],
        "by_number": {i: jnp.full((2,), i, jnp.bfloat16) for i in range(layers)},
        "norm": jnp.asarray([1.0, -0.0, jnp.inf, jnp.nan, 3e-40], jnp.float32),
    }
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(3):
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32
            _, state = optimizer.update(grads, state, params)
    return {
        "params": params,
        "optimizer": state,
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "epoch": 2,
        "scale": 0.1,
        "done": False,
        "order": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "half": np.arange(4).astype(ml_dtypes.bfloat16),
        "empty": jnp.zeros((0, 4), jnp.bfloat16),
        "absent": None,
    }


def small(value):
    return {"w": jnp.full((64, 64), value, jnp.float32), "step": value}


def raw(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), raw(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray):
        return type(leaf), leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), leaf


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree_util.tree_leaves_with_path(wanted), strict=True)
    for other, (path, leaf) in pairs:
        assert raw(other) == raw(leaf), jax.tree_util.keystr(path)


def abstract(state):
    """The state as shapes: host arrays and scalars as they are."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state
    )


def arrays_file(directory, step):
    """The largest file of a checkpoint: it holds the values."""
    files = [path for path in (directory / str(step)).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


# Bit for bit


@pytest.mark.parametrize("shapes", [False, True])
def test_every_leaf_comes_back_bit_for_bit_in_its_place(tmp_path, shapes, caplog):  # H5, H6
    state = drafter_state()
    Checkpoints(tmp_path).save(5, state, {})
    restored = Checkpoints(tmp_path).restore(5, abstract(state) if shapes else state)
    assert not caplog.records
    assert_same(restored, state)
    assert [int(layer["w"][0, 0]) for layer in restored["params"]["layers"]] == list(range(12))
    assert list(restored["params"]["by_number"]) == list(range(12))
    assert int(restored["optimizer"][0].count) == 3


def test_a_restored_key_draws_the_same_numbers(tmp_path):
    state = drafter_state()
    Checkpoints(tmp_path).save(1, state, {})
    restored = Checkpoints(tmp_path).restore(1, state)
    for name, key in [("key", state["key"]), ("keys", state["keys"][2])]:
        found = restored[name] if name == "key" else restored[name][2]
        assert (jax.random.bits(found, (8,)) == jax.random.bits(key, (8,))).all()


def test_continuing_equals_an_undisturbed_run(tmp_path):  # case H5
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-1, 3, 10))

    @jax.jit
    def step(state):
        noise = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), (4,))
        loss, grads = jax.value_and_grad(lambda w: jnp.sum((w - noise) ** 2))(state["w"])
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = optimizer.update(grads, state["opt"], state["w"])
        new = {"w": optax.apply_updates(state["w"], updates), "opt": opt}
        return new | {"key": state["key"], "step": state["step"] + jnp.int32(1)}, loss

    def run(state, count):
        losses = []
        for _ in range(count):
            state, loss = step(state)
            losses.append(float(loss))
        return state, losses

    w = jnp.zeros((4,))
    start = {"w": w, "opt": optimizer.init(w), "key": jax.random.key(0), "step": jnp.int32(0)}
    whole, losses = run(start, 10)
    half, first = run(start, 5)
    Checkpoints(tmp_path).save(5, half, {})
    rest, second = run(Checkpoints(tmp_path).restore(5, abstract(start)), 5)
    assert first + second == losses
    assert_same(rest, whole)


def test_shardings_come_back_over_eight_devices(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(array, *names):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    w = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    state = {
        "split": place(w, "data", "model"),
        "half": place(w.astype(jnp.bfloat16), None, "model"),
        "everywhere": place(jnp.arange(3)),
        "keys": place(jax.random.split(jax.random.key(1), 8), "data"),
        "empty": place(jnp.zeros((0, 8)), None, "model"),
        "alone": jnp.ones(()),
    }
    Checkpoints(tmp_path).save(1, state, {})
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding if x.committed else None
        ),
        state,
    )
    for like in (state, shapes):
        restored = Checkpoints(tmp_path).restore(1, like)
        assert_same(restored, state)
        for name, leaf in state.items():
            assert restored[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
            assert restored[name].committed == leaf.committed, name
    other = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model"))
    )
    moved = Checkpoints(tmp_path).restore(1, state | {"split": other})  # another layout is fine
    assert moved["split"].sharding == other.sharding
    assert (np.asarray(moved["split"]) == np.asarray(w)).all()


# Another state


def replace(state, **values):
    return {name: leaf for name, leaf in (state | values).items() if leaf is not ...}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"w": ...}, r"\['w'\]: saved float32\[4,3\], now nothing"),
        ({"new": jnp.ones(2)}, r"\['new'\]: saved nothing, now float32\[2\]"),
        ({"w": jnp.ones((3, 4))}, r"\['w'\]: saved float32\[4,3\], now float32\[3,4\]"),
        ({"w": jnp.ones((5, 3))}, r"\['w'\]: saved float32\[4,3\], now float32\[5,3\]"),
        ({"b": jnp.ones(4)}, r"\['b'\]: saved bfloat16\[4\], now float32\[4\]"),
        ({"epoch": 3.0}, r"\['epoch'\]: saved int, now float"),
        ({"epoch": True}, r"\['epoch'\]: saved int, now bool"),
        ({"epoch": jnp.int32(3)}, r"\['epoch'\]: saved int, now int32\[\]"),
        ({"key": jax.random.key(0, impl="rbg")}, r"\['key'\]: saved key<fry>\[\], now key<rbg>"),
        ({"layers": {"3": jnp.ones(1)}}, r"\['layers'\]\[3\]: saved float32\[1\], now nothing"),
    ],
)
def test_another_leaf_is_an_error_that_names_it(tmp_path, values, line):  # case H6
    state = {
        "w": jnp.ones((4, 3)),
        "b": jnp.ones(4, jnp.bfloat16),
        "key": jax.random.key(0),
        "epoch": 3,
        "layers": {3: jnp.ones(1)},
    }
    Checkpoints(tmp_path).save(1, state, {})
    with pytest.raises(ValueError, match=line):
        Checkpoints(tmp_path).restore(1, replace(state, **values))


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    with pytest.raises(TypeError, match=r"\['x'\]\['f'\] is a float32"):
        checkpoints.save(1, {"x": {"f": np.float32(1)}}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, small(1), {"seed": jnp.ones(())})
    with pytest.raises(ValueError, match="no arrays"):
        checkpoints.save(1, {"x": 1}, {})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    assert not (tmp_path / "c").exists()
    assert checkpoints.latest() is None


# Unfinished and damaged checkpoints


def test_unfinished_directories_are_stepped_over(tmp_path):  # case H7
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    (tmp_path / "3").mkdir()
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "_METADATA").write_text("{}")
    (tmp_path / "2.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "2.unfinished").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    names = r"2\.orbax-checkpoint-tmp-1, 2\.unfinished, 3, 4$"
    with pytest.warns(UserWarning, match=names):
        assert checkpoints.latest() == 1
    with pytest.raises(FileNotFoundError, match=r"step 3, the finished ones are \[1\]"):
        checkpoints.restore(3, small(0))
    for step in (2, 3, 4):
        checkpoints.save(step, small(step), {})
        assert_same(checkpoints.restore(step, small(0)), small(step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.latest() == 4
    assert sorted(os.listdir(tmp_path)) == ["3", "4", "notes.txt"]


def test_a_damaged_file_is_named_and_an_older_step_still_works(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, small(step), {})
    file = arrays_file(tmp_path, 2)
    content = file.read_bytes()

    def refused(match):
        with pytest.raises(ValueError, match=match) as caught:
            checkpoints.restore(2, small(0))
        assert str(file) in str(caught.value)
        assert f"whole checkpoints: [1]. Remove {tmp_path / '2'} to" in str(caught.value)

    file.write_bytes(content[:-100])
    refused(f"has {len(content) - 100} bytes instead of {len(content)}")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("has changed since it was written")
    file.unlink()
    refused("is missing")
    assert checkpoints.latest() == 2  # it is not passed over in silence
    assert_same(checkpoints.restore(1, small(0)), small(1))


def test_every_truncated_file_of_a_checkpoint_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, drafter_state(2), {})
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"emove .* to continue from") as caught:
            checkpoints.restore(2, drafter_state(2))
        assert str(file) in str(caught.value)
        file.write_bytes(content)
    assert_same(checkpoints.restore(2, drafter_state(2)), drafter_state(2))


@pytest.fixture
def limited_file_size():
    """Writes past 100 kB of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def noise():
    return {"w": jax.random.normal(jax.random.key(0), (400, 400))}  # 640 kB


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, limited_file_size, caplog):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    with pytest.raises(OSError, match=r"2 could not be written .* untouched: \[1\]\. Free"):
        checkpoints.save(2, noise(), {})
    assert not caplog.records
    assert os.listdir(tmp_path) == ["1"]
    assert_same(checkpoints.restore(checkpoints.latest(), small(0)), small(1))


@pytest.mark.parametrize("stage", ["_digest", "_sync", "os.replace"])
def test_a_full_disk_at_any_later_stage_leaves_the_previous_one(tmp_path, monkeypatch, stage):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if stage == "os.replace":
            patch.setattr(os, "replace", full)
        else:
            patch.setattr(checkpoint, stage, full)
        with pytest.raises(OSError, match=r"No space left on device.*untouched"):
            checkpoints.save(2, small(2), {})
    assert os.listdir(tmp_path) == ["1"]
    checkpoints.save(2, small(2), {})
    assert os.listdir(tmp_path) == ["2"]


SAVER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from specjax.training.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=2)
like = {"w": jnp.zeros((256, 256)), "key": jax.random.key(0), "step": 0}
step = checkpoints.latest() or 0
if step:
    state = checkpoints.restore(step, like)
    assert state["step"] == step and (state["w"] == step).all(), state
print("ready", step, flush=True)
while True:
    step += 1
    state = {"w": jnp.full((256, 256), step, jnp.float32), "key": jax.random.key(step)}
    checkpoints.save(step, state | {"step": step}, {}, metric=-abs(step - 5.0))
    print("saved", step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_latest(tmp_path):
    """Ten kills at random moments: no finished step is lost, the next process goes on."""
    draw = random.Random(0)
    root = Path(__file__).parents[2]
    finished, cut = 0, 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SAVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root)},
            text=True,
        )
        assert process.stdout.readline().startswith(f"ready {'' if finished else 0}")
        time.sleep(draw.uniform(0.2, 1.0))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")
        process.wait()
        finished = max([finished, *(int(x.split()[1]) for x in lines if x.startswith("saved "))])
        cut += any(name.endswith(".unfinished") for name in os.listdir(tmp_path))
        checkpoints = Checkpoints(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            latest = checkpoints.latest() or 0
        assert finished <= latest <= finished + 1
        like = {"w": jnp.zeros((256, 256)), "key": jax.random.key(0), "step": 0}
        for step in checkpoints.steps():
            state = checkpoints.restore(step, like)
            assert state["step"] == step
            assert (state["w"] == step).all()
    assert cut > 3, "the kills missed the saves"
    assert finished > 8


# What is kept


def test_the_best_is_kept_beside_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.best() is None
    for step, metric in [(1, float("nan")), (2, 1.5), (3, 2.5), (4, None), (5, 2.5), (6, 2.0)]:
        checkpoints.save(step, small(step), {}, metric=metric)
    assert checkpoints.best() == 3
    assert checkpoints.steps() == [3, 5, 6]
    checkpoints.save(7, small(7), {}, metric=3.0)
    assert checkpoints.best() == 7
    assert checkpoints.steps() == [6, 7]


def test_a_removal_that_is_cut_off_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {})

    def killed(path, **_):
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, small(2), {})
    assert checkpoints.steps() == [2]
    checkpoints.save(3, small(3), {})
    assert os.listdir(tmp_path) == ["3"]


def test_a_step_that_is_not_past_the_latest_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, small(5), {})
    for step in (5, 4, -1):
        with pytest.raises(ValueError, match=f"step {step} is not past the latest .*5: remove"):
            checkpoints.save(step, small(step), {})
    assert_same(checkpoints.restore(5, small(0)), small(5))


# Meta


def test_meta_comes_back_and_a_change_is_shown_line_by_line(tmp_path):
    meta = {"config": {"lr": 1e-3, "taps": (1, 4)}, "target": "ab12", "old": 1}
    Checkpoints(tmp_path).save(1, small(1), meta)
    saved = Checkpoints(tmp_path).meta(1)
    assert saved == {"config": {"lr": 1e-3, "taps": [1, 4]}, "target": "ab12", "old": 1}
    check_meta(saved, meta)
    now = {"config": {"lr": 2e-3, "taps": (1, 5), "seed": 0}, "target": "ab12"}
    with pytest.raises(ValueError, match="other settings") as caught:
        check_meta(saved, now)
    assert str(caught.value).split("\n")[1:] == [
        "  config.lr: saved 0.001, now 0.002",
        "  config.taps: saved [1, 4], now [1, 5]",
        "  config.seed: saved nothing, now 0",
        "  old: saved 1, now nothing",
    ]


def test_a_damaged_manifest_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {"a": 1})
    file = tmp_path / "1" / checkpoint.MANIFEST
    assert json.loads(file.read_text())["meta"] == {"a": 1}
    file.write_text("{")
    for call in (checkpoints.meta, lambda step: checkpoints.restore(step, small(0))):
        with pytest.raises(ValueError, match="is damaged") as caught:
            call(1)
        assert str(file) in str(caught.value)


# Cost


def test_a_save_leaves_no_thread(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, small(0), {})
    before = set(threading.enumerate())
    checkpoints.save(1, small(1), {})
    checkpoints.restore(1, small(1))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive(), thread


def test_the_state_may_be_donated_after_a_save(tmp_path):
    state = small(1)
    Checkpoints(tmp_path).save(1, state, {})
    jax.jit(lambda w: w + 1, donate_argnums=0)(state["w"]).block_until_ready()
    assert_same(Checkpoints(tmp_path).restore(1, small(0)), small(1))
