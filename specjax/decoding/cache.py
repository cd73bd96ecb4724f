"""The key/value cache: rows are written at the committed length, committed by moving it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.layers import LayerConfig
from specjax.types import Array, KVCache


def init(config: LayerConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """An empty cache. Every leaf is an allocation of its own, so that all can be donated."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)

    def arrays() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVCache(k=arrays(), v=arrays(), length=jnp.zeros((batch,), jnp.int32))


def write(cache: KVCache, k: tuple[Array, ...], v: tuple[Array, ...]) -> KVCache:
    """Writes rows L x [B, 1, T, G, D] behind the committed ones; they stay dead until committed.

    The caller keeps `length + T <= capacity` for every row, finished ones too: an update that does
    not fit is moved back by JAX and would overwrite committed rows.
    """
    return replace(
        cache,
        k=tuple(_write(old, rows, cache.length) for old, rows in zip(cache.k, k, strict=True)),
        v=tuple(_write(old, rows, cache.length) for old, rows in zip(cache.v, v, strict=True)),
    )


def commit(cache: KVCache, count: Array) -> KVCache:
    """Commits the first `count` [B] of the rows written last."""
    return replace(cache, length=cache.length + count)


def _write(old: Array, rows: Array, start: Array) -> Array:
    """One update per batch row: XLA keeps these in place, a scatter over rows it does not."""
    rows = rows[:, 0].transpose(0, 2, 1, 3)  # [B, G, T, D]
    for b in range(old.shape[0]):
        old = jax.lax.dynamic_update_slice(old, rows[b : b + 1], (b, 0, start[b], 0))
    return old
