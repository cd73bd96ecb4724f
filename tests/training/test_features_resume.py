"""The cache of a target's states, interrupted: it ends with the same bytes (case H10)."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import tiny
from small_caches import SOURCES, build, contents, load

from specjax.training import features
from specjax.training.features import FeatureCache


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(features, "ROW_LENGTH", 48)


def interrupt(target, directory, monkeypatch, passes, error=KeyboardInterrupt):
    """A build that ends at the pass after so many."""
    real, left = features._states, [passes]

    def states(*arguments):
        if not left[0]:
            raise error
        left[0] -= 1
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(features, "_states", states)
        with pytest.raises(error):
            build(target, directory)


def counted(monkeypatch):
    """The passes of the target that run from now on."""
    real, runs = features._states, []

    def states(*arguments):
        runs.append(np.asarray(arguments[2].source))
        return real(*arguments)

    monkeypatch.setattr(features, "_states", states)
    return runs


@pytest.fixture
def whole(tmp_path):
    """A target and the files of an undisturbed cache of it."""
    target = load(tmp_path / "t")
    build(target, tmp_path / "whole")
    return target, contents(tmp_path / "whole")


@pytest.mark.parametrize(("passes", "torn"), [(0, 0), (2, 0), (2, 1), (3, 777), (4, 30 * 192)])
def test_a_half_written_cache_is_continued_exactly(passes, torn, whole, tmp_path, monkeypatch):
    """Case H10: killed within a write too, and behind whole documents of an unfinished batch."""
    target, want = whole
    interrupt(target, tmp_path / "c", monkeypatch, passes)
    half = tmp_path / "c" / "features.bin"
    assert half.stat().st_size < len(want["features.bin"])
    more = want["features.bin"][half.stat().st_size :][:torn]
    for name in ("features.bin", "final_hidden.bin"):
        with (tmp_path / "c" / name).open("ab") as file:
            file.write(more)
    runs = counted(monkeypatch)
    cache = build(target, tmp_path / "c")
    undisturbed = FeatureCache.build(
        target, tiny.TAPS, SOURCES, tmp_path / "whole", final_hidden=True, progress=False
    )
    np.testing.assert_array_equal(cache.features, undisturbed.features)
    np.testing.assert_array_equal(cache.final_hidden, undisturbed.final_hidden)
    assert contents(tmp_path / "c") == want
    redone = runs[:]
    runs.clear()
    build(target, tmp_path / "again")
    assert len(redone) == len(runs) - passes
    for one, other in zip(redone, runs[passes:], strict=True):
        np.testing.assert_array_equal(one, other)  # the same batches, not others
    runs.clear()
    build(target, tmp_path / "c")  # a complete one is only opened
    assert not runs


def test_a_kill_before_the_manifest_repeats_no_pass(whole, tmp_path, monkeypatch):
    """The files are on the disk before the manifest says so."""
    target, want = whole
    order = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def killed(source, destination):
        order.append(Path(destination).name)
        if Path(destination).name == "manifest.json":
            raise KeyboardInterrupt
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            build(target, tmp_path / "c")
    assert order[-3:] == ["features.bin", "final_hidden.bin", "manifest.json"]
    runs = counted(monkeypatch)
    build(target, tmp_path / "c")
    assert not runs
    assert contents(tmp_path / "c") == want


def test_other_batches_do_not_continue_a_cache(whole, tmp_path, monkeypatch):
    """They would round otherwise; a complete cache opens whatever they were."""
    target, _ = whole
    interrupt(target, tmp_path / "c", monkeypatch, 2)
    with pytest.raises(ValueError, match=r"batches\.rows: saved 2, now 3"):
        build(target, tmp_path / "c", rows=3)
    with pytest.raises(ValueError, match=r"batches\.chunk: saved 16, now 8"):
        build(target, tmp_path / "c", chunk=8)
    build(target, tmp_path / "whole", rows=3, chunk=8)


@pytest.mark.parametrize("name", ["features.bin", "final_hidden.bin"])
def test_a_full_disk_is_named_and_what_was_written_goes_on(name, whole, tmp_path, monkeypatch):
    target, want = whole
    append, calls = features._append, []

    class Full:
        """A file on a disk with room for 1000 bytes more."""

        def __init__(self, file):
            self._file, self.name, self._room = file, file.name, 1000

        def write(self, data):
            if not self._room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self._file.write(data[: self._room])
            self._room -= written
            return written

    def short(file, data, total):
        calls.append(file)
        last = Path(file.name).name == name and len(calls) > 4
        append(Full(file) if last else file, data, total)

    with monkeypatch.context() as patch:
        patch.setattr(features, "_append", short)
        with pytest.raises(OSError, match="No space left on device") as error:
            build(target, tmp_path / "c")
    assert error.value.errno == errno.ENOSPC
    size = (tmp_path / "c" / name).stat().st_size
    assert f"{tmp_path / 'c' / name} could not be written" in str(error.value)
    assert f"{size} of its {len(want[name])} bytes are there" in str(error.value)
    runs = counted(monkeypatch)
    build(target, tmp_path / "c")
    assert contents(tmp_path / "c") == want
    done = len(runs)
    runs.clear()
    build(target, tmp_path / "again")
    assert done == len(runs) - 2  # two batches were whole in both files


def test_a_write_that_ends_in_the_middle_of_a_row(whole, tmp_path):
    """The system itself refuses: a short write, then an error."""
    target, want = whole
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_001, hard))
    try:
        with pytest.raises(OSError, match=r"features.bin could not be written .*: 30001 of its"):
            build(target, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    build(target, tmp_path / "c")
    assert contents(tmp_path / "c") == want


def test_a_half_written_cache_of_another_target_is_refused(tmp_path, monkeypatch):
    target = load(tmp_path / "t")
    monkeypatch.setattr(features, "_fill", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(target, tmp_path / "c")
    with pytest.raises(ValueError, match="fingerprint: "):
        build(load(tmp_path / "o", seed=1), tmp_path / "c")
