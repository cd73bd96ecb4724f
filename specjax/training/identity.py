"""Which target is this: one short name for a configuration and its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import params as tables
from specjax.models import target as networks
from specjax.models.hub import Target


def fingerprint(target: Target) -> str:
    """16 hex digits that name a target: its configuration and every weight.

    Weights count as bfloat16, so that a checkpoint has one name in every dtype it is loaded in;
    a change that rounds away there is not seen. The same on every device, mesh and process.
    """
    table = networks.table(target.config)
    sums: dict[str, list[int]] = {}

    def add(param: tables.Param, value: jax.Array) -> None:
        # One after the other: programs over several devices of a CPU that are in flight together
        # take each other's threads, wait for 40 s, and end the process.
        sums[param.hf] = np.asarray(_digest(value, param.transposed)).tolist()

    jax.tree.map(add, table, target.params, is_leaf=tables.is_param)
    said = {"config": _said(target.config), "tensors": dict(sorted(sums.items()))}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def check_answers(target: Target, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError for answers that another target gave; hand-made ones do not say."""
    if "fingerprint" in manifest and manifest["fingerprint"] != (own := fingerprint(target)):
        raise ValueError(
            f"the answers are those of the target {manifest['fingerprint']}, not of {target.name} "
            f"({own}): measure them with theirs, or let this one answer the prompts"
        )


@partial(jax.jit, static_argnums=1)
def _digest(x: jax.Array, transposed: bool) -> jax.Array:
    """[2] uint32: sums modulo 2**32 of the bits as published, each times an odd number of its own.

    Integer sums do not depend on their order, hence neither on device nor sharding; an odd factor
    lets no single changed value vanish.
    """
    x = x.T if transposed else x
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = index * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> jnp.uint32(13))
    other = mixed * jnp.uint32(0xC2B2AE35) ^ (mixed >> jnp.uint32(16))
    one = jnp.uint32(1)
    return jnp.stack([jnp.sum(bits * (factor | one)) for factor in (mixed, other)])


def _said(value: Any) -> Any:
    """A config as JSON values. Fields at their default are left out, so that a field that is
    added later does not rename the targets of before."""
    if not is_dataclass(value):
        return list(value) if isinstance(value, tuple) else value
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: _said(own) for field, own in pairs if own != field.default}
