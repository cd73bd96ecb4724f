"""The context's part of the gradient of block attention, as two Mosaic TPU kernels.

Both recompute the probabilities of a tile of keys by a tile of rows from the saved log-sum-exp
(FlashAttention-2; Dao, arXiv 2307.08691), transposed, so that what belongs to a row lies along the
lanes. One walks over the context tiles that a tile of rows sees and gives d_q; the other walks over
the tiles of rows that may see a context tile and gives d_k and d_v.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import tiles, xla

LANES = 128  # what tiles of rows are multiples of


class Sizes(NamedTuple):
    """Rows of a tile of queries and of a tile of the context."""

    rows: int = 256
    keys: int = 512


SIZES = Sizes()


def context_gradients(scale, q, ctx_k, ctx_v, start, end, d_out, lse, shift):
    """d_q [B, G, M, D] float32, d_k and d_v [B, G, S, D] in the dtype of the context.

    Args:
      scale: of the scores.
      q, d_out: [B, G, M, D].
      ctx_k, ctx_v: [B, G, S, D], S > 0.
      start, end: [B, 1, M, 1] int32.
      lse, shift: [B, G, M] float32; d_score = prob * (d_out . value - shift).
    """
    queries, capacity = q.shape[2], ctx_k.shape[2]
    rows = min(SIZES.rows, tiles.round_up(queries, LANES))
    keys = min(SIZES.keys, tiles.round_up(capacity, 8))
    if capacity < keys:
        ctx_k, ctx_v = tiles.fill(ctx_k, 2, keys), tiles.fill(ctx_v, 2, keys)
    q, d_out = tiles.fill(q, 2, rows), tiles.fill(d_out, 2, rows)
    # Rows that are filled up have the range from 0 to 0, and see nothing.
    start, end = (tiles.fill(x.swapaxes(2, 3), 3, rows) for x in (start, end))
    lse, shift = (tiles.fill(x[:, :, None], 3, rows) for x in (lse, shift))
    bounds = jax.vmap(jax.vmap(lambda s, e: xla.chunk_bounds(s, e, capacity, keys)))
    low, high = bounds(*(x.reshape(x.shape[0], -1, rows) for x in (start, end)))
    low, high = low.astype(jnp.int32), jnp.maximum(low, high).astype(jnp.int32)
    args = low, high, q, d_out, start, end, lse, shift, ctx_k, ctx_v
    static = {"scale": scale, "capacity": capacity}
    d_q = _row_gradients(args, rows, keys, static)
    d_k, d_v = _key_gradients(args, rows, keys, static)
    return d_q[:, :, :queries], d_k[:, :, :capacity], d_v[:, :, :capacity]


def _specs(rows, keys, dim, row_tile, key_tile):
    """Of the arrays in `args` behind the two prefetched; tiles as functions of the grid's place."""

    def of(shape, place):
        return pl.BlockSpec((None, None, *shape), place)

    by_row = of((rows, dim), lambda b, g, *at: (b, g, row_tile(b, *at), 0))
    bound = of((1, rows), lambda b, g, *at: (b, 0, 0, row_tile(b, *at)))
    of_row = of((1, rows), lambda b, g, *at: (b, g, 0, row_tile(b, *at)))
    by_key = of((keys, dim), lambda b, g, *at: (b, g, key_tile(b, *at), 0))
    return [by_row, by_row, bound, bound, of_row, of_row, by_key, by_key]


def _call(kernel, scalars, arrays, grid, in_specs, outs, out_spec, scratch, name):
    return pl.pallas_call(
        kernel,
        out_shape=outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=[out_spec] * len(outs),
            scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)] * len(outs),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name=name,
    )(*scalars, *arrays)


def _row_gradients(args, rows, keys, static):
    low, high, *arrays = args
    batch, kv_heads, queries, dim = arrays[0].shape

    def key_tile(b, i, n, low, high):
        return tiles.nth(low[b, i], high[b, i], n)

    specs = _specs(rows, keys, dim, lambda b, i, *_: i, key_tile)
    grid = batch, kv_heads, queries // rows, jnp.maximum(jnp.max(high - low), 1)
    outs = [jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)]
    kernel = partial(_row_kernel, **static)
    (d_q,) = _call(
        kernel, (low, high), arrays, grid, specs, outs, specs[0], (rows, dim), "d_rows"
    )  # fmt: skip
    return d_q


def _row_kernel(low, high, q, d_out, start, end, lse, shift, k, v, d_q, acc, *, scale, capacity):
    b, i, n = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first = (low[b, i] + n) * k.shape[0]

    @pl.when(n == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(n < high[b, i] - low[b, i])
    def _():
        _, d_scores = _tile(q, d_out, start, end, lse, shift, k, v, first, scale, capacity)
        keys = k[...]
        if capacity % k.shape[0]:  # the last tile reaches beyond the context: 0 * NaN is NaN
            inside = first + jax.lax.broadcasted_iota(jnp.int32, (k.shape[0], 1), 0) < capacity
            keys = jnp.where(inside, keys, jnp.zeros_like(keys))
        acc[...] += _dot(d_scores.astype(keys.dtype), keys, 0, 0)

    @pl.when(n == pl.num_programs(3) - 1)
    def _():
        d_q[...] = acc[...]


def _key_gradients(args, rows, keys, static):
    low, high, *arrays = args
    batch, kv_heads, queries, dim = arrays[0].shape
    capacity = arrays[-1].shape[2]
    count = -(-capacity // keys)
    # Of each context tile, the first and one past the last tile of rows that sees it.
    tile = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    sees = (low[:, None] <= tile) & (tile < high[:, None])  # [B, count, tiles of rows]
    place = jnp.arange(queries // rows, dtype=jnp.int32)[None, None]
    first = jnp.min(jnp.where(sees, place, queries // rows), axis=2)
    last = jnp.max(jnp.where(sees, place + 1, 0), axis=2)

    def row_tile(b, j, n, low, high, first, last):
        return tiles.nth(first[b, j], last[b, j], n)

    specs = _specs(rows, keys, dim, row_tile, lambda b, j, *_: j)
    grid = batch, kv_heads, count, jnp.maximum(jnp.max(last - first), 1)
    outs = [jax.ShapeDtypeStruct(arrays[-1].shape, arrays[-1].dtype)] * 2
    kernel = partial(_key_kernel, **static)
    scalars = low, high, first, last
    return _call(kernel, scalars, arrays, grid, specs, outs, specs[-1], (keys, dim), "d_keys")


def _key_kernel(
    low, high, first, last, q, d_out, start, end, lse, shift, k, v, d_k, d_v, acc_k, acc_v,
    *, scale, capacity,
):  # fmt: skip
    b, j, n = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i = first[b, j] + n

    @pl.when(n == 0)
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(i < last[b, j])
    def _():
        @pl.when((low[b, i] <= j) & (j < high[b, i]))
        def _():
            offset = j * k.shape[0]
            probs, d_scores = _tile(
                q, d_out, start, end, lse, shift, k, v, offset, scale, capacity
            )  # fmt: skip
            acc_k[...] += _dot(d_scores.astype(q.dtype), q[...], 1, 0)
            acc_v[...] += _dot(probs.astype(d_out.dtype), d_out[...], 1, 0)

    @pl.when(n == pl.num_programs(3) - 1)
    def _():
        d_k[...] = acc_k[...].astype(d_k.dtype)
        d_v[...] = acc_v[...].astype(d_v.dtype)


def _tile(q, d_out, start, end, lse, shift, k, v, first, scale, capacity):
    """Probabilities and gradients of the scores, [keys, rows]; keys from row `first` on."""
    slot = first + jax.lax.broadcasted_iota(jnp.int32, (k.shape[0], 1), 0)
    visible = (start[...] <= slot) & (slot < jnp.minimum(end[...], capacity))
    scores = _dot(k[...], q[...], 1, 1) * scale - lse[...]
    probs = jnp.exp(jnp.where(visible, scores, -jnp.inf))
    d_probs = _dot(v[...], d_out[...], 1, 1)
    return probs, jnp.where(visible, probs * (d_probs - shift[...]) * scale, 0.0)


def _dot(a, b, axis_a, axis_b):
    """The product over one axis of each, in float32."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
    )  # fmt: skip
