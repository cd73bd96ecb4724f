"""Block attention as one Triton-lowered kernel for NVIDIA GPUs from Ampere on.

JAX has announced the end of this lowering: nothing but the table of implementations knows this
file. The context range of a tile is split over programs, so that a small batch fills the chip
(flash-decoding); their parts are merged by log-sum-exp afterwards. A program loads only the
context tiles of its own part.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.block_attention import tiles, xla
from pallas_kernels.block_attention.sizes import measured

MAX_TAIL = 128  # rows of a tail: its keys and values stay in registers and shared memory


class Sizes(NamedTuple):
    """What may be tuned: rows of a tile, both powers of two, and programs that share a context."""

    rows: int = 64
    keys: int = 64
    programs: int = 264  # about two for each multiprocessor of a large chip
    warps: int = 4
    stages: int = 2


SIZES = Sizes()


def supports(q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, *_) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes float32, bfloat16 and float16, not {q.dtype}"
    if tail_k.shape[2] > MAX_TAIL:
        return f"takes tails of up to {MAX_TAIL} rows, not {tail_k.shape[2]}"
    if q.shape[-1] > 256:
        return f"takes head dimensions of up to 256, not {q.shape[-1]}"
    return None


def block_attention_pallas_triton(*args, scale, sizes: Mapping[str, int] | None = None):
    """The kernel, with the backward pass of XLA; returns `(out, lse)`, see `block_attention`.

    `sizes` are values of `Sizes`; None takes the measured ones, or the defaults.
    """
    found = measured("pallas_triton", args[0], args[1]) if sizes is None else sizes
    default = SIZES
    if args[0].dtype.itemsize * args[0].shape[-1] > 512:  # for the shared memory of an A100
        default = SIZES._replace(keys=SIZES.keys // 2)
    call = partial(_call, scale, default._replace(**found))
    return xla.differentiable(partial(tiles.folded, call), *args, scale=scale)


def _round_up(n):
    return max(16, pl.next_power_of_2(n))  # Triton's arrays; 16 is the least its products take


def _widen(x):
    """The head dimension filled up with zeros to a power of two; most models have one already."""
    more = _round_up(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _call(scale, sizes, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    batch, kv_heads, _, true_dim = q.shape
    capacity = ctx_k.shape[2]
    q, ctx_k, ctx_v, tail_k, tail_v = map(_widen, (q, ctx_k, ctx_v, tail_k, tail_v))
    dim = q.shape[-1]
    keys = sizes.keys
    if capacity < keys:  # shorter than a tile
        more = [(0, 0), (0, 0), (0, keys - capacity), (0, 0)]
        ctx_k, ctx_v = jnp.pad(ctx_k, more), jnp.pad(ctx_v, more)
    tiled, untile = tiles.cut(
        q, start, end, tail_k, tail_v, tail_mask,
        capacity=capacity, rows=sizes.rows, keys=keys, round_up=_round_up,
    )  # fmt: skip
    count, rows = tiled.q.shape[2:4]
    splits = tiles.splits(batch * kv_heads * count, capacity, keys, sizes.programs)

    def spec(shape, index):  # of one split, tile and pair of batch row and head
        def place(i, s, bg):
            return index(jax.lax.div(bg, kv_heads), jax.lax.rem(bg, kv_heads), i, s)

        return pl.BlockSpec((*[None] * (len(index(0, 0, 0, 0)) - len(shape)), *shape), place)

    q_spec = spec((rows, dim), lambda b, g, i, s: (b, g, i, 0, 0))
    context_spec = spec(ctx_k.shape[2:], lambda b, g, i, s: (b, g, 0, 0))
    scalar_spec = spec((), lambda b, g, i, s: (b, i))
    bound_spec = spec((rows,), lambda b, g, i, s: (b, i, 0))
    operands = [
        tiled.low, tiled.high, tiled.q, ctx_k, ctx_v, tiled.start[..., 0], tiled.end[..., 0]
    ]  # fmt: skip
    specs = [scalar_spec, scalar_spec, q_spec, context_spec, context_spec, bound_spec, bound_spec]
    if tail_k.shape[2]:
        masks = tiled.mask.shape[1]
        tail_spec = spec(
            tiled.tail_k.shape[3:], lambda b, g, i, s: (b, g, jax.lax.div(i, tiled.parts), 0, 0)
        )
        mask_spec = spec(
            tiled.mask.shape[2:], lambda b, g, i, s: (b, jax.lax.rem(i, masks), 0, 0)
        )  # fmt: skip
        operands += [tiled.tail_k, tiled.tail_v, tiled.mask]
        specs += [tail_spec, tail_spec, mask_spec]
    outs = (batch, kv_heads, count, splits, rows)
    out, lse = pl.pallas_call(
        partial(_kernel, scale=scale, keys=keys, size=ctx_k.shape[2], capacity=capacity),
        out_shape=(
            jax.ShapeDtypeStruct((*outs, dim), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(outs, jnp.float32),
        ),
        grid=(count, splits, batch * kv_heads),
        in_specs=specs,
        out_specs=(
            spec((rows, dim), lambda b, g, i, s: (b, g, i, s, 0, 0)),
            spec((rows,), lambda b, g, i, s: (b, g, i, s, 0)),
        ),
        compiler_params=triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        name="block_attention",
    )(*operands)
    return tuple(map(untile, tiles.merged(out[..., :true_dim], lse, q.dtype)))


def _kernel(low, high, q, ctx_k, ctx_v, start, end, *refs, scale, keys, size, capacity):
    """The context has `capacity` rows in arrays of `size` >= `keys` rows."""
    *tail, out, lse = refs
    split, splits = pl.program_id(1), pl.num_programs(1)
    q, start, end = q[...], start[...], jnp.minimum(end[...], capacity)
    exact = {"allow_tf32": False} if q.dtype == jnp.float32 else {}

    def fold(state, k, v, visible):
        """One step of the online softmax over keys k [C, D], values v and visible [rows, C]."""
        top, total, acc = state
        scores = triton.dot(q, k, trans_b=True, **exact) * scale
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet: avoid inf - inf
        probs = jnp.exp(scores - safe[:, None])
        shrink = jnp.exp(top - safe)
        new = triton.dot(probs.astype(v.dtype), v, **exact)
        return new_top, total * shrink + jnp.sum(probs, axis=1), acc * shrink[:, None] + new

    def context(i, state):
        first = i * keys
        # The last tile is moved back to fit; rows before `first` are another tile's.
        offset = jnp.minimum(first, size - keys)
        slot = offset + jnp.arange(keys, dtype=jnp.int32)
        k, v = ctx_k[pl.ds(offset, keys), :], ctx_v[pl.ds(offset, keys), :]
        if size % keys:
            v = jnp.where((slot >= first)[:, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN
        seen = (slot[None] >= jnp.maximum(start, first)[:, None]) & (slot[None] < end[:, None])
        return fold(state, k, v, seen)

    state = (
        jnp.full(q.shape[:1], -jnp.inf, jnp.float32),
        jnp.zeros(q.shape[:1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if tail:
        k, v, mask = tail
        state = fold(state, k[...], v[...], (mask[...] != 0) & (split == 0))
    each = pl.cdiv(jnp.maximum(high[...] - low[...], 0), splits)
    begin = low[...] + split * each
    state = jax.lax.fori_loop(begin, jnp.minimum(begin + each, high[...]), context, state)
    top, total, acc = state
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out[...] = (acc / safe[:, None]).astype(out.dtype)
    lse[...] = jnp.where(seen, top + jnp.log(safe), -jnp.inf)
