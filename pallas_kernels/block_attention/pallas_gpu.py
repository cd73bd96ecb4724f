"""Block attention as one Mosaic GPU kernel, for Hopper: its matrix products are `wgmma`.

A warpgroup computes 64 rows of a tile. The warpgroups of a tile walk over the same tiles of keys
and values, first the tile's tails, then the context tiles that some of its rows see: asynchronous
copies bring them into a ring in shared memory a few tiles ahead, and no other tile is touched. The
context range of a tile is split over programs, so that a small batch fills the chip
(flash-decoding); their parts are merged by log-sum-exp afterwards.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_attention import tiles, xla
from pallas_kernels.block_attention.sizes import measured

ROWS = 64  # query rows of a warpgroup: what `wgmma` takes
WORD = 16  # columns of the mask in one word; head dimensions are rounded up to it too
MAX_TAIL = 1024  # rows of a tail: its mask lies in shared memory
MATRIX, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)  # in registers


class Sizes(NamedTuple):
    """What may be tuned."""

    rows: int = 64  # of a tile of queries, at most
    keys: int = 64  # of a tile of keys; rounded up to what the head dimension asks for
    stages: int = 2  # tiles in the ring
    programs: int = 264  # that share the contexts: about two for each multiprocessor


SIZES = Sizes()


def supports(q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, *_) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {q.dtype}: the products of Hopper would round it"
    if tail_k.shape[2] > MAX_TAIL:
        return f"takes tails of up to {MAX_TAIL} rows, not {tail_k.shape[2]}"
    if q.shape[-1] > 256:
        return f"takes head dimensions of up to 256, not {q.shape[-1]}"
    device = jax.devices()[0]
    if device.platform == "gpu" and not device.compute_capability.startswith("9."):
        return f"takes GPUs of compute capability 9, not {device.compute_capability}"
    return None


def block_attention_pallas_gpu(*args, scale, sizes: Mapping[str, int] | None = None):
    """The kernel, with the backward pass of XLA; returns `(out, lse)`, see `block_attention`.

    `sizes` are values of `Sizes`; None takes the measured ones, or the defaults.
    """
    found = measured("pallas_gpu", args[0], args[1]) if sizes is None else sizes
    call = partial(_call, scale, SIZES._replace(**found))
    return xla.differentiable(partial(tiles.folded, call), *args, scale=scale)


class _Plan(NamedTuple):
    """What is static in the kernel."""

    scale: float
    keys: int
    stages: int
    capacity: int  # rows of the context
    tails: int  # tiles of keys in a tail
    parts: int  # tiles of rows that share a tail
    kv_heads: int


def _call(scale, sizes, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    batch, kv_heads, _, true_dim = q.shape
    capacity = ctx_k.shape[2]
    q, ctx_k, ctx_v, tail_k, tail_v = (
        tiles.fill(x, -1, WORD) for x in (q, ctx_k, ctx_v, tail_k, tail_v)
    )
    # Copies come in groups of 8 rows. The caches of a model have such a size, and are not copied.
    ctx_k, ctx_v = tiles.fill(ctx_k, 2, 8), tiles.fill(ctx_v, 2, 8)
    dim = q.shape[-1]
    swizzle = plgpu.find_swizzle(16 * dim)
    keys = tiles.round_up(sizes.keys, swizzle // 2)
    tiled, untile = tiles.cut(
        q, start, end, tail_k, tail_v, tail_mask, capacity=capacity, rows=sizes.rows, keys=keys,
        round_up=partial(tiles.round_up, to=ROWS), round_columns=partial(tiles.round_up, to=keys),
    )  # fmt: skip
    count, rows = tiled.q.shape[2:4]
    warpgroups = rows // ROWS
    splits = tiles.splits(batch * kv_heads * count, capacity, keys, sizes.programs)
    tails = tiled.tail_k.shape[3] // keys
    marks = _marks(tiled)
    operands = [tiled.low, tiled.high, tiled.q, marks]
    operands += [ctx_k, ctx_v] if capacity else []
    operands += [tiled.tail_k, tiled.tail_v] if tails else []
    outs = (batch, kv_heads, count, splits, rows)
    out_dtype = q.dtype if splits == 1 else jnp.dtype(jnp.float32)
    plan = _Plan(scale, keys, sizes.stages, capacity, tails, tiled.parts, kv_heads)
    out, lse = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((*outs, dim), out_dtype),
            jax.ShapeDtypeStruct(outs, jnp.float32),
        ),
        scratch_types=_scratch(plan, warpgroups, dim, swizzle, q.dtype, out_dtype, marks.shape[2]),
        grid=(count, splits, batch * kv_heads),
        grid_names=("tile", "split", "head"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="block_attention",
    )(*operands)
    return tuple(map(untile, tiles.merged(out[..., :true_dim], lse, q.dtype)))


def _marks(tiled):
    """What the rows of a tile see, [B, tiles, marks, rows] int32: start, end, bits of the mask."""
    mask = tiled.mask  # [B, masks, rows, columns]
    marks = [tiled.start, tiled.end]
    if mask.shape[3]:
        bits = mask.reshape(*mask.shape[:3], -1, WORD).astype(jnp.int32)
        bits = bits << jax.lax.broadcasted_iota(jnp.int32, bits.shape, 4)
        bits = jnp.sum(bits, axis=4, dtype=jnp.int32)
        marks.append(jnp.tile(bits, (1, tiled.q.shape[2] // mask.shape[1], 1, 1)))
    return jnp.concatenate(marks, axis=3).swapaxes(2, 3)


def _scratch(plan, warpgroups, dim, swizzle, dtype, out_dtype, marks):
    """Shared memory. What the products read has one order, in which `part` columns lie together."""
    part = swizzle // 2

    def matrix(*shape, dtype=dtype, swizzle=swizzle):
        tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    ring = matrix(plan.stages, plan.keys, dim)
    arrived = plgpu.Barrier(num_barriers=plan.stages)
    out_swizzle = plgpu.find_swizzle(8 * out_dtype.itemsize * part)
    return {
        "q": matrix(warpgroups, ROWS, dim),
        "k": ring,
        "v": ring,
        "probs": matrix(warpgroups, ROWS, plan.keys),
        "out_part": matrix(warpgroups, ROWS, part, dtype=out_dtype, swizzle=out_swizzle),
        "lse": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        "marks": plgpu.SMEM((warpgroups, marks, ROWS), jnp.int32),
        "rows_here": plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
        "k_here": arrived,
        "v_here": arrived,
        "used": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=plan.stages),
    }


def _kernel(
    low_of, high_of, q_of, marks_of, *refs, plan,
    q, k, v, probs, out_part, lse, marks, rows_here, k_here, v_here, used,
):  # fmt: skip
    """What a warpgroup does. `refs`: keys and values of context and tail where they exist, outs.

    Names with `_of` are the whole arrays, those of `_scratch` what the program has of them.
    """
    *sources, out_of, lse_of = refs
    context = sources[:2] if plan.capacity else []
    tail = sources[len(context) :]
    i, split, head = (jax.lax.axis_index(name) for name in ("tile", "split", "head"))
    warpgroup, splits = jax.lax.axis_index("warpgroup"), out_of.shape[3]
    b, g = jax.lax.div(head, plan.kv_heads), jax.lax.rem(head, plan.kv_heads)
    rows = pl.ds(warpgroup * ROWS, ROWS)
    low, high = low_of[b, i], high_of[b, i]
    each = jax.lax.div(jnp.maximum(high - low, 0) + splits - 1, splits)
    begin = low + split * each
    tails = jnp.where(split == 0, plan.tails, 0)  # the first split has the tail
    count = tails + jnp.maximum(jnp.minimum(begin + each, high) - begin, 0)
    q, probs, out_part, lse, marks, rows_here = (
        x.at[warpgroup] for x in (q, probs, out_part, lse, marks, rows_here)
    )

    def fetch(j):
        """Start to copy tile j of the program into the ring, if there is one."""
        slot = jax.lax.rem(j, plan.stages)

        def copy(keys, values, *at):
            plgpu.copy_gmem_to_smem(keys.at[at], k.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(values.at[at], v.at[slot], v_here.at[slot])

        if tail:
            of_tail = b, g, jax.lax.div(i, plan.parts), pl.ds(j * plan.keys, plan.keys)
            pl.when(j < tails)(partial(copy, *tail, *of_tail))
        if context:
            of_context = b, g, pl.ds((begin + j - tails) * plan.keys, plan.keys)
            pl.when((tails <= j) & (j < count))(partial(copy, *context, *of_context))

    def step(visible, j, state):
        slot = jax.lax.rem(j, plan.stages)
        state = _fold(
            state, visible(j), plan.scale, q, probs,
            *(x.at[slot] for x in (k, v, k_here, v_here)),
        )  # fmt: skip
        plgpu.barrier_arrive(used.at[slot])

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_wait(used.at[slot])  # by every warpgroup
            fetch(j + plan.stages)

        return state

    @pl.when(warpgroup == 0)
    def _():
        for j in range(plan.stages):
            fetch(jnp.int32(j))

    plgpu.copy_gmem_to_smem(q_of.at[b, g, i, rows], q, rows_here)
    plgpu.copy_gmem_to_smem(marks_of.at[b, i, :, rows], marks, rows_here)
    plgpu.barrier_wait(rows_here)
    dim, part = q.shape[1], out_part.shape[1]
    state = (
        plgpu.layout_cast(jnp.full(ROWS, -jnp.inf, jnp.float32), ROW),
        plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), ROW),
        (plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), MATRIX),) * (dim // part),
    )
    if tail:
        state = jax.lax.fori_loop(
            0, tails, partial(step, partial(_tail_visible, marks, plan)), state
        )
    if context:
        visible = partial(_context_visible, marks, plan, begin - tails)
        state = jax.lax.fori_loop(tails, count, partial(step, visible), state)
    top, total, acc = state
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    lse[...] = jnp.where(seen, top * math.log(2) + jnp.log(total), -jnp.inf)
    for n, x in enumerate(acc):
        out_part[...] = (x / _across(total, part)).astype(out_part.dtype)
        plgpu.commit_smem()
        at = out_of.at[b, g, i, split, rows, pl.ds(n * part, part)]
        plgpu.copy_smem_to_gmem(out_part, at)
        plgpu.wait_smem_to_gmem(0)  # before the next part, or the program's end
    plgpu.copy_smem_to_gmem(lse, lse_of.at[b, g, i, split, rows])
    plgpu.wait_smem_to_gmem(0)


def _fold(state, visible, scale, q, probs, k, v, k_here, v_here):
    """One step of the online softmax, in powers of two, over a tile of keys and values."""
    top, total, acc = state
    plgpu.barrier_wait(k_here)
    scores = _product(q, k.T) * (scale * math.log2(math.e))
    scores = jnp.where(visible, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet: avoid inf - inf
    weights = jnp.exp2(scores - _across(safe, scores.shape[1]))
    shrink = jnp.exp2(top - safe)
    total = total * shrink + jnp.sum(weights, axis=1)
    probs[...] = weights.astype(probs.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(v_here)
    part = acc[0].shape[1]
    acc = tuple(
        x * _across(shrink, part) + _product(probs, v.at[:, pl.ds(n * part, part)])
        for n, x in enumerate(acc)
    )
    return new_top, total, acc


def _product(a, b):
    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _across(x, columns):
    return jax.lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _mark(marks, n):
    return plgpu.layout_cast(marks[n], ROW)


def _columns(plan):
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, plan.keys), 1, layout=MATRIX)


def _context_visible(marks, plan, offset, j):
    slot = (offset + j) * plan.keys + _columns(plan)
    start, end = _mark(marks, 0), jnp.minimum(_mark(marks, 1), plan.capacity)
    return (_across(start, plan.keys) <= slot) & (slot < _across(end, plan.keys))


def _tail_visible(marks, plan, j):
    words = plan.keys // WORD
    bits = [_across(_mark(marks, 2 + j * words + n), plan.keys) for n in range(words)]
    word = bits[0]
    for n in range(1, words):
        word = jnp.where(_columns(plan) < n * WORD, word, bits[n])
    return ((word >> (_columns(plan) & (WORD - 1))) & 1) != 0
