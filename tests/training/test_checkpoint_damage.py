"""Checkpoints that were cut off, damaged, or met a full disk (case H7)."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from states import assert_same, drafter_state, small

from specjax.training import checkpoint
from specjax.training.checkpoint import Checkpoints


def arrays_file(directory, step):
    """The largest file of a checkpoint: it holds the values."""
    files = [path for path in (directory / str(step)).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


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


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["_digest", "_handler"])
def test_an_error_that_is_no_full_disk_stays_what_it_is(tmp_path, monkeypatch, stage, error):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    raised = error("a bug")

    def broken(*_):
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, stage, broken)
        with pytest.raises(error) as caught:
            checkpoints.save(2, small(2), {})
    assert caught.value is raised
    assert os.listdir(tmp_path) == ["1"]
    checkpoints.save(2, small(2), {})
    assert_same(checkpoints.restore(2, small(0)), small(2))


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
