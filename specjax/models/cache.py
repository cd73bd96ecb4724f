"""The key/value cache: rows are written behind the committed ones, and committed by a length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Array, KVCache


def init(
    layers: int, kv_heads: int, head_dim: int, batch: int, capacity: int, dtype: Any
) -> KVCache:
    """An empty cache. Every leaf is an allocation of its own, so that all can be donated."""

    def arrays() -> tuple[Array, ...]:
        return tuple(jnp.zeros((batch, kv_heads, capacity, head_dim), dtype) for _ in range(layers))

    return KVCache(k=arrays(), v=arrays(), length=jnp.zeros((batch,), jnp.int32))


def write(rows: Array, new: Array, start: Array) -> Array:
    """Writes new [B, T, G, D] into rows [B, G, S, D] of one layer, from start [B] on.

    The caller keeps `start + T <= S` for every batch row, finished ones too: an update that does
    not fit is moved back by JAX and would overwrite committed rows. Write before attending: a read
    that is followed by an independent write makes XLA copy the cache.
    """
    new = new.transpose(0, 2, 1, 3)

    # One update per batch row: XLA keeps these in place, a scatter over rows it does not.
    def put(b: Any, rows: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=0)
        zero = jnp.int32(0)
        return jax.lax.dynamic_update_slice(rows, own, (jnp.int32(b), zero, start[b], zero))

    def in_turn(rows: Array) -> Array:
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(rows.shape[0]), put, rows)

    def one_by_one(rows: Array) -> Array:
        for b in range(rows.shape[0]):
            rows = put(b, rows)
        return rows

    if rows.shape[0] == 1:
        return put(0, rows)
    # In a loop, since the compile time of a large batch would be that of its updates. The TPU's
    # compiler copies the cache for a loop, or fails (libtpu 0.0.42).
    return jax.lax.platform_dependent(rows, tpu=one_by_one, default=in_turn)


def append(cache: KVCache, k: tuple[Array, ...], v: tuple[Array, ...], count: Array) -> KVCache:
    """Writes rows L x [B, T, G, D] and commits the first `count` [B] of them."""

    def written(old: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(write(a, b, cache.length) for a, b in zip(old, new, strict=True))

    return KVCache(written(cache.k, k), written(cache.v, v), cache.length + count)


def commit(cache: KVCache, k: tuple[Array, ...], v: tuple[Array, ...], count: Array) -> KVCache:
    """Takes arrays L x [B, G, S, D] that hold new rows already, and commits `count` [B] of them."""
    return replace(cache, k=k, v=v, length=cache.length + count)
