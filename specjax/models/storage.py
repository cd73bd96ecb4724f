"""Model directories on disk: JSON files plus safetensors, one file or sharded, read lazily.

Knows files and tensors, nothing about networks. A directory is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its file, shape and dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of an opened model directory. Nothing is read before `read`."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads `tensor[index]` of one tensor; only the bytes of that slice leave the disk."""
        with _opened(self.tensors[name].file) as file:
            return file.get_slice(name)[index or slice(None)]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing or malformed file is an error that names the path."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: not a complete model directory") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def write_file(path: str | Path, data: bytes) -> None:
    """Replaces a file at once: a kill or a full disk leaves the old one, or none."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_file(path, (json.dumps(content, indent=2) + "\n").encode("utf-8"))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs: its dotted name, what was saved and what is asked now.

    Values are compared and shown as JSON has them: a tuple is a list, and 1 is not 1.0.

    Raises:
      TypeError: a value that JSON cannot hold.
    """
    before, after = _flat(saved), _flat(now)
    return [
        f"  {name}: saved {before.get(name, 'nothing')}, now {after.get(name, 'nothing')}"
        for name in dict.fromkeys([*after, *before])
        if before.get(name) != after.get(name)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name -> JSON text of every value that is not an object itself."""
    if not isinstance(value, Mapping) or (prefix and not value):
        return {prefix: json.dumps(value)}
    flat: dict[str, str] = {}
    for name, part in value.items():
        flat |= _flat(part, f"{prefix}.{name}" if prefix else str(name))
    return flat


def open_checkpoint(directory: Path) -> Checkpoint:
    """Opens the safetensors of a model directory (one file, or shards named by an index).

    Raises:
      FileNotFoundError: no weights, or the index names a shard that is not there.
      ValueError: a truncated or malformed file, or an index that disagrees with its shards.
    """
    tensors: dict[str, TensorInfo] = {}
    index = directory / INDEX
    files = _shards(index) if index.exists() else [directory / WEIGHTS]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing)}: the download or copy is incomplete"
        )
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                view = opened.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{file}: tensor {name} has dtype {view.get_dtype()}; "
                        f"supported: {', '.join(DTYPES)}"
                    )
                dtype = DTYPES[view.get_dtype()]
                tensors[name] = TensorInfo(file, tuple(view.get_shape()), dtype)
    if index.exists():
        _check_index(index, tensors)
    return Checkpoint(directory, tensors)


def write_directory(
    directory: str | Path,
    tensors: Mapping[str, np.ndarray],
    files: Mapping[str, Mapping[str, Any] | str | bytes],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model directory whole or not at all.

    Everything goes to a temporary sibling that is renamed at the end, so that an interrupted
    write leaves nothing at `directory`.

    Args:
      directory: must not exist, or be an empty directory.
      tensors: name -> array of any strides; they are written in C order.
      files: file name -> JSON object, text or bytes.
      max_shard_bytes: tensors beyond it go to further shards with an index file.

    Raises:
      FileExistsError: `directory` is there and not empty.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: remove it or choose another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes private folders; a model directory is not
        _write_tensors(partial, tensors, max_shard_bytes)
        for name, content in files.items():
            if isinstance(content, Mapping):
                content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            data = content if isinstance(content, bytes) else content.encode("utf-8")
            (partial / name).write_bytes(data)
        os.replace(partial, directory)  # replaces an empty directory too
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(directory: Path, tensors: Mapping[str, np.ndarray], max_bytes: int) -> None:
    """Writes shard by shard, so that a lazy mapping of tensors is never in memory whole."""
    weight_map: dict[str, int] = {}
    shard: dict[str, np.ndarray] = {}
    number, size, total = 0, 0, 0

    def close() -> None:
        nonlocal shard, number, size
        number += 1
        weight_map.update(dict.fromkeys(shard, number))
        save_file(shard, directory / _shard(number), metadata={"format": "pt"})
        (directory / _shard(number)).chmod(0o644)  # save_file makes it private
        shard, size = {}, 0

    for name in sorted(tensors):
        # safetensors stores the raw memory of a strided array under its logical shape:
        # anything but C order would come back scrambled.
        array = np.ascontiguousarray(tensors[name])
        if shard and size + array.nbytes > max_bytes:
            close()
        shard[name] = array
        size += array.nbytes
        total += array.nbytes
    close()
    if number == 1:
        (directory / _shard(1)).rename(directory / WEIGHTS)
        return
    for i in range(1, number + 1):
        (directory / _shard(i)).rename(directory / _shard(i, number))
    content = {
        "metadata": {"total_size": total},
        "weight_map": {name: _shard(i, number) for name, i in weight_map.items()},
    }
    (directory / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shard(number: int, count: int = 0) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    return [index.parent / name for name in sorted(set(weight_map.values()))]


def _check_index(index: Path, tensors: Mapping[str, TensorInfo]) -> None:
    weight_map = read_json(index)["weight_map"]
    wrong = [
        name
        for name in sorted(set(weight_map) | set(tensors))
        if name not in tensors or weight_map.get(name) != tensors[name].file.name
    ]
    if wrong:
        raise ValueError(f"{index} and its shards disagree about {', '.join(wrong[:5])}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not safetensors: {error}") from error
    with opened as handle:
        yield handle
