"""One table per network: it drives random init, sharding, loading, saving and counting.

A table is a nested dict (and lists, for layers) of `Param`; parameters are the same nesting of
arrays. Matrices of layers are held as [in, out] and published as [out, in]: a few rows times [in,
out] is 1.5 times as fast on one CPU and about equal on another (experiments/LOG.md). Embedding and
head stay [V, E].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.storage import Checkpoint
from specjax.types import Params

Table = dict[str, Any]

# Logical axis -> mesh axis. Axes that are not named here are replicated.
RULES: Mapping[str, str] = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


@dataclass(frozen=True)
class Param:
    """Declares one tensor.

    Attributes:
      shape: as held.
      axes: a logical axis per dimension, or None.
      init: "normal" (std 0.02), "ones" or "zeros".
      hf: the tensor's name in a published checkpoint.
      units: how many indivisible units a dimension holds (heads, not their channels); a
        dimension that is not listed is divisible down to single rows.
      transposed: the checkpoint holds the transpose.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    hf: str
    units: Mapping[str, int] | None = None
    transposed: bool = False

    @property
    def published_shape(self) -> tuple[int, ...]:
        """Its shape in a checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape

    def spec(self, mesh: Mesh) -> PartitionSpec:
        """The partition on `mesh`: a logical axis is split where its units divide."""
        parts: list[str | None] = []
        for size, axis in zip(self.shape, self.axes, strict=True):
            mesh_axis = RULES.get(axis or "")
            units = (self.units or {}).get(axis or "", size)
            splits = mesh_axis in mesh.shape and units % mesh.shape[mesh_axis] == 0
            parts.append(mesh_axis if splits and mesh_axis not in parts else None)
        return PartitionSpec(*parts)


def matrix(
    into: int,
    out: int,
    hf: str,
    *,
    axes: tuple[str | None, str | None] = (None, None),
    init: str = "normal",
    units: Mapping[str, int] | None = None,
) -> Param:
    """The matrix of a linear map: held [in, out], published [out, in]; `axes` as held."""
    return Param((into, out), axes, init, hf, units, transposed=True)


def is_param(value: Any) -> bool:
    """True for a leaf of a table."""
    return isinstance(value, Param)


def leaves(table: Table) -> list[Param]:
    """Every declared tensor, in tree order."""
    return jax.tree.leaves(table, is_leaf=is_param)


def count(table: Table) -> int:
    """Number of parameters."""
    return sum(math.prod(param.shape) for param in leaves(table))


def abstract(table: Table, dtype: Any = jnp.float32) -> Params:
    """Shapes and dtypes only: what `jax.eval_shape` takes in place of parameters."""
    return _map(lambda param: jax.ShapeDtypeStruct(param.shape, dtype), table)


def init(table: Table, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters; each tensor's values depend on `key` and its place in the table."""
    params = leaves(table)
    keys = iter(jax.random.split(key, len(params)))
    makers: dict[str, Callable[..., jax.Array]] = {
        "normal": lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.float32),
        "ones": lambda key, shape: jnp.ones(shape, jnp.float32),
        "zeros": lambda key, shape: jnp.zeros(shape, jnp.float32),
    }
    return _map(lambda param: makers[param.init](next(keys), param.shape).astype(dtype), table)


def load(
    table: Table,
    checkpoint: Checkpoint,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    ignore: Callable[[str], bool] = lambda name: False,
    check_finite: bool = False,
) -> Params:
    """Reads the tensors of `table` from `checkpoint`, which must hold exactly these.

    Args:
      table: what the network needs.
      checkpoint: an opened directory.
      dtype: dtype of the returned arrays.
      mesh: places every tensor by its logical axes; each shard reads its own slice only.
      ignore: names of further tensors that carry no parameter.
      check_finite: refuse NaN and infinities.

    Raises:
      ValueError: missing, unexpected, wrongly shaped or (on request) non-finite tensors.
    """
    check_manifest(table, checkpoint, ignore)
    if mesh is not None:
        # Networks name no shardings of their own: XLA carries the parameters' through.
        mesh = Mesh(mesh.devices, mesh.axis_names)  # automatic axes, whatever the caller's are

    def read(param: Param) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            stored = checkpoint.read(param.hf, (index or ())[:: -1 if param.transposed else 1])
            values = (stored.T if param.transposed else stored).astype(dtype)
            if check_finite and not np.isfinite(values.astype(np.float32)).all():
                raise ValueError(f"{checkpoint.directory}: {param.hf} holds NaN or infinite values")
            return values

        if mesh is None:
            return jnp.asarray(piece(()))
        return jax.make_array_from_callback(
            param.shape, NamedSharding(mesh, param.spec(mesh)), piece
        )

    return _map(read, table)


def check_manifest(
    table: Table, checkpoint: Checkpoint, ignore: Callable[[str], bool] = lambda name: False
) -> None:
    """Raises ValueError unless `checkpoint` holds exactly the tensors of `table`."""
    expected = {param.hf: param.published_shape for param in leaves(table)}
    found = {name: info.shape for name, info in checkpoint.tensors.items()}
    complaints = [
        f"missing {name} {list(expected[name])}" for name in expected if name not in found
    ]
    complaints += [
        f"unexpected {name} {list(found[name])}"
        for name in found
        if name not in expected and not ignore(name)
    ]
    complaints += [
        f"{name} has shape {list(found[name])}, the config asks for {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if complaints:
        shown = "\n  ".join(complaints[:20]) + ("\n  ..." if len(complaints) > 20 else "")
        raise ValueError(
            f"{checkpoint.directory}: the tensors do not fit the config:\n  {shown}\n"
            "Check that config.json belongs to these weights."
        )


def save(table: Table, params: Params, dtype: Any | None = None) -> dict[str, np.ndarray]:
    """The tensors of `params` under their published names, ready for `write_directory`."""
    named: dict[str, np.ndarray] = {}

    def put(param: Param, value: jax.Array) -> None:
        if value.shape != param.shape:
            raise ValueError(f"{param.hf} has shape {value.shape}, the table says {param.shape}")
        held = np.asarray(value, dtype=dtype)
        named[param.hf] = held.T if param.transposed else held

    jax.tree.map(put, table, params, is_leaf=is_param)
    return named


def _map(function: Callable[[Param], Any], table: Table) -> Any:
    return jax.tree.map(function, table, is_leaf=is_param)
