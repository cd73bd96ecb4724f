"""Block attention as one Mosaic TPU kernel.

The rows of several short blocks (query heads of a group folded in) make one tile. A tile opens its
softmax with the tails of its blocks, side by side under a block-diagonal mask, then walks over the
context tiles that some of its rows see. Their numbers are prefetched as scalars: other tiles are
neither fetched nor computed, and blocks sorted by their anchors skip what none of them sees.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import tiles, xla
from pallas_kernels.block_attention.pallas_tpu_backward import context_gradients
from pallas_kernels.block_attention.sizes import measured

ROWS = 8  # what rows and columns are rounded up to: a register holds so many rows
MAX_TAIL = 2048  # rows of one tile's tails: their scores are held at once


class Sizes(NamedTuple):
    """What may be tuned: query rows and context rows of a tile."""

    rows: int = 256
    keys: int = 512


SIZES = Sizes()


def supports(q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, *_) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, not {q.dtype}"
    if tail_k.shape[2] > MAX_TAIL:
        return f"takes tails of up to {MAX_TAIL} rows, not {tail_k.shape[2]}"
    return None


def block_attention_pallas_tpu(*args, scale, sizes: Mapping[str, int] | None = None):
    """The kernel, and two more in its backward pass; returns `(out, lse)`, see `block_attention`.

    `sizes` are values of `Sizes`; None takes the measured ones, or the defaults.
    """
    found = measured("pallas_tpu", args[0], args[1]) if sizes is None else sizes
    call = partial(_call, scale, SIZES._replace(**found))
    gradients = partial(tiles.folded_gradients, partial(context_gradients, scale))
    return xla.differentiable(
        partial(tiles.folded, call), *args, scale=scale, gradients=gradients
    )  # fmt: skip


def _call(scale, sizes, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    dim, capacity = q.shape[-1], ctx_k.shape[2]
    if capacity < ROWS:  # too few for a block of their own
        more = [(0, 0), (0, 0), (0, ROWS - capacity), (0, 0)]
        ctx_k, ctx_v = jnp.pad(ctx_k, more), jnp.pad(ctx_v, more)
    keys = min(sizes.keys, ctx_k.shape[2])
    tiled, untile = tiles.cut(
        q, start, end, tail_k, tail_v, tail_mask,
        capacity=capacity, rows=sizes.rows, keys=keys, round_up=partial(tiles.round_up, to=ROWS),
    )  # fmt: skip
    batch, kv_heads, count, rows = tiled.q.shape[:4]
    most = jnp.maximum(jnp.max(tiled.high - tiled.low), 1)  # context tiles of a tile of rows

    def spec(shape, index):  # of one batch row, head and tile
        lead = len(index(0, 0, 0)) - len(shape)
        return pl.BlockSpec((*[None] * lead, *shape), lambda b, g, i, *_: index(b, g, i))

    def context_tile(b, g, i, j, low, high):
        return b, g, tiles.nth(low[b, i], high[b, i], j), 0

    q_spec = spec((rows, dim), lambda b, g, i: (b, g, i, 0, 0))
    context_spec = pl.BlockSpec((None, None, keys, dim), context_tile)
    bound_spec = spec((rows, 1), lambda b, g, i: (b, i, 0, 0))
    operands = [tiled.q, ctx_k, ctx_v, tiled.start, tiled.end]
    specs = [q_spec, context_spec, context_spec, bound_spec, bound_spec]
    has_tail = tail_k.shape[2] > 0
    if has_tail:
        # lax.div and lax.rem: // and % ask the compiler for a sign
        tail_spec = spec(
            tiled.tail_k.shape[3:], lambda b, g, i: (b, g, jax.lax.div(i, tiled.parts), 0, 0)
        )
        masks = tiled.mask.shape[1]
        mask_spec = spec(
            tiled.mask.shape[2:], lambda b, g, i: (b, jax.lax.rem(i, masks), 0, 0)
        )  # fmt: skip
        operands += [tiled.tail_k, tiled.tail_v, tiled.mask]
        specs += [tail_spec, tail_spec, mask_spec]
    out, lse = pl.pallas_call(
        partial(_kernel, scale=scale, keys=keys, capacity=capacity, has_tail=has_tail),
        out_shape=(
            jax.ShapeDtypeStruct(tiled.q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, count, 1, rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, count, most),
            in_specs=specs,
            out_specs=(q_spec, spec((1, rows), lambda b, g, i: (b, g, i, 0, 0))),
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name="block_attention",
    )(tiled.low, tiled.high, *operands)
    return untile(out), untile(lse[:, :, :, 0])


def _kernel(low, high, q, ctx_k, ctx_v, start, end, *refs, scale, keys, capacity, has_tail):
    *tail, out, lse, top, total, acc = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    exact = q.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def fold(k, v, visible):
        """One step of the online softmax over keys k [C, D], values v and visible [rows, C]."""
        scores = jax.lax.dot_general(
            q[...], k, (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet: avoid inf - inf
        probs = jnp.exp(scores - safe)
        shrink = jnp.exp(top[...] - safe)
        new = jnp.dot(
            probs.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        total[...] = total[...] * shrink + jnp.sum(probs, axis=1, keepdims=True)
        acc[...] = acc[...] * shrink + new
        top[...] = new_top

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)
        if has_tail:
            k, v, mask = tail
            fold(k[...], v[...], mask[...].astype(jnp.int32) != 0)

    @pl.when(j < high[b, i] - low[b, i])
    def _():
        first = (low[b, i] + j) * keys
        slot = first + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        v = ctx_v[...]
        if capacity % keys:  # the last tile reaches beyond the context: 0 * garbage may be NaN
            inside = first + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0) < capacity
            v = jnp.where(inside, v, jnp.zeros_like(v))
        fold(ctx_k[...], v, (start[...] <= slot) & (slot < jnp.minimum(end[...], capacity)))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        seen = total[...] > 0
        safe = jnp.where(seen, total[...], 1.0)
        out[...] = (acc[...] / safe).astype(out.dtype)
        column = jnp.where(seen, top[...] + jnp.log(safe), -jnp.inf)
        # A row, along the lanes: a column would be filled up to 128 of them in HBM.
        lse[...] = jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]
