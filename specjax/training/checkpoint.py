"""Checkpoints of a training run: saved whole or not at all, restored leaf by leaf or refused.

    directory/
      300/               a finished step: it appears by one rename, after everything is on disk
        manifest.json    meta, metric, path and kind of every leaf, size and digest of every file
        arrays/          the arrays, numbered, as orbax writes them
      310.unfinished/    a save or a removal that was cut off; the next save removes it

Orbax takes any directory with a number for a finished step and turns integer keys into text, so
the manifest is the mark of a finished step and holds the structure; orbax holds the bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from specjax.models.storage import differences

MANIFEST = "manifest.json"
ARRAYS = "arrays"
UNFINISHED = ".unfinished"
SCALARS = (bool, int, float, str)


class Checkpoints:
    """The checkpoints of one run: the last `keep` steps and the one with the highest metric.

    Every call is synchronous. With several processes every process makes the same calls on a
    shared directory; the first one writes what is not an array.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint has to be kept")
        self.directory = Path(directory).absolute()
        self.keep = keep

    def steps(self) -> list[int]:
        """The finished steps, ascending."""
        return sorted(int(entry.name) for entry in self._entries() if _finished(entry))

    def latest(self) -> int | None:
        """The last finished step, or None; warns of unfinished ones, which it steps over."""
        junk = sorted(entry.name for entry in self._entries() if not _finished(entry))
        if junk:
            warnings.warn(
                f"{self.directory}: stepping over unfinished checkpoints: {', '.join(junk)}",
                stacklevel=2,
            )
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The first kept step with the highest metric, or None if none has one."""
        metrics = {step: self._manifest(step)["metric"] for step in self.steps()}
        scored = {step: metric for step, metric in metrics.items() if metric is not None}
        return max(scored, key=scored.__getitem__, default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved with a step, as JSON gives it back (tuples are lists)."""
        return self._manifest(step)["meta"]

    def save(
        self, step: int, state: Any, meta: Mapping[str, Any], metric: float | None = None
    ) -> None:
        """Saves a state whole or not at all, then removes the checkpoints not to be kept.

        Args:
          step: past the latest finished step.
          state: pytree of jax arrays (sharded ones and typed keys too), numpy arrays and Python
            scalars. Its buffers may be donated as soon as this returns.
          meta: what must agree before the run may continue; JSON values only.
          metric: higher is better; a NaN is never the best.

        Raises:
          ValueError: a step that is not past the latest, a state without arrays.
          TypeError: a leaf or a value of `meta` that cannot be stored.
          OSError: the write failed (a full disk).

        Earlier checkpoints are as they were after any error.
        """
        step = operator.index(step)
        latest = max(self.steps(), default=-1)
        if step <= latest:
            raise ValueError(
                f"step {step} is not past the latest checkpoint {self.directory / str(latest)}: "
                "remove the later ones to continue from an earlier step"
            )
        leaves = _leaves(state)
        manifest = {
            "metric": None if metric is None or math.isnan(metric) else float(metric),
            "meta": json.loads(json.dumps(meta)),
            "leaves": {path: [_kind(path, leaf), _extra(leaf)] for path, leaf in leaves.items()},
        }
        arrays = {
            str(i): jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for i, leaf in enumerate(leaves.values())
            if _has_bytes(leaf)
        }
        if not arrays:
            raise ValueError("the state has no arrays: there is nothing to save")
        partial = self.directory / f"{step}{UNFINISHED}"
        try:
            if jax.process_index() == 0:
                self._clear(step)
                partial.mkdir(parents=True)
            with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
                checkpointer.save(partial / ARRAYS, args=ocp.args.PyTreeSave(arrays))
            if jax.process_index() == 0:
                _commit(partial, manifest, self.directory / str(step))
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not _is_io(error):
                raise
            raise OSError(
                f"{self.directory / str(step)} could not be written ({error}); the finished "
                f"checkpoints are untouched: {self.steps()}. Free space on that disk, or save "
                "elsewhere, and continue from the latest"
            ) from error
        if jax.process_index() == 0:
            self._prune()
        multihost_utils.sync_global_devices(f"checkpoint {step}")

    def restore(self, step: int, like: Any) -> Any:
        """Restores a state bit for bit, in the structure of `like`.

        Args:
          step: a finished step.
          like: the state expected: arrays or `jax.ShapeDtypeStruct`s, numpy arrays and Python
            scalars. A leaf comes back as the type of its leaf here, with its sharding; without
            one (or uncommitted) on the default device, uncommitted.

        Raises:
          FileNotFoundError: there is no such step, or it is unfinished.
          ValueError: a damaged file (named, with the steps that are whole), or leaves that are
            missing, unexpected or of another shape or dtype (all named).
        """
        manifest = self._manifest(step)
        if damage := self._damage(step):
            whole = [other for other in self.steps() if not self._damage(other)]
            raise ValueError(
                f"{damage}; whole checkpoints: {whole}. Remove {self.directory / str(step)} "
                "to continue from the latest of them"
            )
        saved, expected = manifest["leaves"], _leaves(like)
        now = {path: _kind(path, leaf) for path, leaf in expected.items()}
        if lines := differences({path: kind for path, (kind, _) in saved.items()}, now):
            raise ValueError(
                f"{self.directory / str(step)} holds another state; restore it with the config "
                "it was saved with:\n" + "\n".join(lines)
            )
        placed = {str(i): _placed(expected[path]) for i, path in enumerate(saved)}
        with ocp.Checkpointer(_handler()) as checkpointer:
            arrays = checkpointer.restore(
                self.directory / str(step) / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    restore_args={name: args for name, args in placed.items() if args}
                ),
            )
        found = {
            path: _rebuilt(expected[path], extra, arrays.get(str(i)))
            for i, (path, (_, extra)) in enumerate(saved.items())
        }
        leaves = [found[path] for path in expected]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _entries(self) -> list[Path]:
        """Everything in the directory that is, or may be taken for, a checkpoint."""
        pattern = rf"\d+|\d+{re.escape(UNFINISHED)}|.*\.orbax-checkpoint-tmp.*"
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        return [entry for entry in entries if re.fullmatch(pattern, entry.name) and entry.is_dir()]

    def _manifest(self, step: int) -> dict[str, Any]:
        file = self.directory / str(step) / MANIFEST
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{file} is missing: no finished checkpoint of step {step}, "
                f"the finished ones are {self.steps()}"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged ({error}): remove {file.parent} to continue from an earlier "
                f"step; the finished ones are {self.steps()}"
            ) from None

    def _damage(self, step: int) -> str | None:
        """What is wrong with the first file of a step that is not as it was written."""
        directory = self.directory / str(step)
        try:
            files = self._manifest(step)["files"]
        except ValueError as error:
            return str(error)
        for name, (size, digest) in files.items():
            file = directory / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != size:
                return f"{file} has {file.stat().st_size} bytes instead of {size}"
            if _digest(file) != digest:
                return f"{file} has changed since it was written"
        return None

    def _clear(self, step: int) -> None:
        """Removes what cut-off saves left, and an unfinished directory in the step's place."""
        for entry in self._entries():
            if not _finished(entry) and (not entry.name.isdecimal() or int(entry.name) == step):
                shutil.rmtree(entry)

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best()}:
            # Renamed first: a removal that is cut off must not leave a step that looks finished.
            trash = self.directory / f"{step}{UNFINISHED}"
            os.replace(self.directory / str(step), trash)
            shutil.rmtree(trash)


def check_meta(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises a ValueError with one line for each value that differs from the saved one."""
    if lines := differences(saved, now):
        raise ValueError(
            "the run was saved with other settings; restore them, or start another run:\n"
            + "\n".join(lines)
        )


def _leaves(tree: Any) -> dict[str, Any]:
    """Path -> leaf, in the order of the tree; the paths of 3 and of "3" differ."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _kind(path: str, leaf: Any) -> str:
    """`float32[3,4]`, `key<fry>[]` or `int`: what has to agree for a leaf to be restored."""
    if type(leaf) in SCALARS:
        return type(leaf).__name__
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    raise TypeError(
        f"{path} is a {type(leaf).__name__}: a leaf must be a jax or numpy array, or a Python "
        "bool, int, float or str"
    )


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _has_bytes(leaf: Any) -> bool:
    """Whether orbax holds it: scalars lie in the manifest, and orbax refuses empty arrays."""
    return type(leaf) not in SCALARS and math.prod(leaf.shape) > 0


def _extra(leaf: Any) -> Any:
    """What the bytes alone do not say: the value of a scalar, the algorithm of a key."""
    if type(leaf) in SCALARS:
        return leaf
    return str(jax.random.key_impl(leaf)) if _is_key(leaf) else None


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where an array has to lie; None on the host, and where JAX may place it freely."""
    free = isinstance(leaf, np.ndarray) or not getattr(leaf, "committed", True)
    return None if free else leaf.sharding


def _placed(leaf: Any) -> ocp.RestoreArgs | None:
    if not _has_bytes(leaf):
        return None
    if (sharding := _sharding(leaf)) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)  # the last axis of a key's data is whole


def _rebuilt(leaf: Any, extra: Any, array: Any) -> Any:
    if type(leaf) in SCALARS:
        return extra
    if _is_key(leaf):
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=extra)
    elif array is None:  # it is empty
        array = np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return array
    sharding = _sharding(leaf)
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def _is_io(error: BaseException) -> bool:
    """Whether a write failed: tensorstore, below orbax, makes it a ValueError with the code."""
    told = isinstance(error, ValueError) and re.search(r"os_error_code|OS error", str(error))
    return isinstance(error, OSError) or bool(told)


def _finished(entry: Path) -> bool:
    return entry.name.isdecimal() and (entry / MANIFEST).is_file()


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Trained float32 values compress by 7%, and that takes most of the time of a large save.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _commit(partial: Path, manifest: dict[str, Any], target: Path) -> None:
    """Writes the manifest, brings everything to the disk, and only then renames the directory."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest["files"] = {
        str(file.relative_to(partial)): (file.stat().st_size, _digest(file)) for file in files
    }
    (partial / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    os.replace(partial, target)
    _sync(target.parent)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a traceback for every thread that fails; the exception tells it once."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
