"""Block attention as one Mosaic GPU kernel for NVIDIA GPUs from Hopper on.

A tile of rows belongs to one warpgroup for each 64 of them. They walk over the same tiles of keys
and values, first the tile's tails, then the context tiles that some of its rows see: asynchronous
copies bring a few tiles ahead into a ring in shared memory, and no other tile is touched. The
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

ROWS = 64  # query rows of a warpgroup: what its matrix product takes
COLUMNS = 16  # what head dimensions and tiles of keys are multiples of


class Sizes(NamedTuple):
    """What may be tuned: rows of a tile, tiles held ahead, programs that share a context."""

    rows: int = 64
    keys: int = 64
    stages: int = 2
    programs: int = 264  # about two for each multiprocessor of a large chip


SIZES = Sizes()


def supports(q, ctx_k, *_) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {q.dtype}, which its matrix units would round"
    if q.shape[-1] > 256:
        return f"takes head dimensions of up to 256, not {q.shape[-1]}"
    return None


def block_attention_pallas_gpu(*args, scale, sizes: Mapping[str, int] | None = None):
    """The kernel, with the backward pass of XLA; returns `(out, lse)`, see `block_attention`.

    `sizes` are values of `Sizes`; None takes the measured ones, or the defaults.
    """
    found = measured("pallas_gpu", args[0], args[1]) if sizes is None else sizes
    call = partial(_call, scale, SIZES._replace(**found))
    return xla.differentiable(partial(tiles.folded, call), *args, scale=scale)


def _round_up(n, to):
    return -(-n // to) * to


def _widen(x):
    """The head dimension filled up with zeros; those of most models need none."""
    more = _round_up(x.shape[-1], COLUMNS) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _call(scale, sizes, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    batch, kv_heads, _, true_dim = q.shape
    capacity = ctx_k.shape[2]
    q, ctx_k, ctx_v, tail_k, tail_v = map(_widen, (q, ctx_k, ctx_v, tail_k, tail_v))
    dim, keys = q.shape[-1], sizes.keys
    tiled, untile = tiles.cut(
        q, start, end, tail_k, tail_v, tail_mask,
        capacity=capacity, rows=sizes.rows, keys=keys,
        round_up=lambda n: _round_up(n, ROWS), round_columns=lambda n: _round_up(n, keys),
    )  # fmt: skip
    count, rows = tiled.q.shape[2:4]
    warpgroups = rows // ROWS
    splits = tiles.splits(batch * kv_heads * count, capacity, keys, sizes.programs)
    tails = tiled.tail_k.shape[3] // keys
    operands = [tiled.low, tiled.high, tiled.q, _marks(tiled)]
    operands += [ctx_k, ctx_v] if capacity else []
    operands += [tiled.tail_k, tiled.tail_v] if tails else []

    def shared(*shape, dtype=q.dtype):  # in the order in which the matrix units read it
        swizzle = plgpu.find_swizzle(8 * dtype.itemsize * shape[-1])
        tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    out_dtype = q.dtype if splits == 1 else jnp.dtype(jnp.float32)
    part = next(n for n in (64, 32, 16) if dim % n == 0)
    outs = (batch, kv_heads, count, splits, rows)
    out, lse = plgpu.kernel(
        partial(
            _kernel, scale=scale, keys=keys, stages=sizes.stages, capacity=capacity, tails=tails,
            parts=tiled.parts, kv_heads=kv_heads,
        ),  # fmt: skip
        out_type=(
            jax.ShapeDtypeStruct((*outs, dim), out_dtype),
            jax.ShapeDtypeStruct(outs, jnp.float32),
        ),
        scratch_types=(
            shared(warpgroups, ROWS, dim),
            shared(sizes.stages, keys, dim),
            shared(sizes.stages, keys, dim),
            shared(warpgroups, ROWS, keys),
            shared(warpgroups, ROWS, part, dtype=out_dtype),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            plgpu.SMEM((warpgroups, operands[3].shape[2], ROWS), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=sizes.stages),
            plgpu.Barrier(num_barriers=sizes.stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=sizes.stages),
        ),
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
    repeats = tiled.q.shape[2] // max(mask.shape[1], 1)
    bits = mask.reshape(*mask.shape[:3], -1, COLUMNS).astype(jnp.int32)
    bits = jnp.sum(bits << jnp.arange(COLUMNS, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
    bits = [jnp.tile(bits, (1, repeats, 1, 1))] if mask.shape[3] else []
    return jnp.concatenate([tiled.start, tiled.end, *bits], axis=3).swapaxes(2, 3)


def _kernel(low, high, q, marks, *refs, scale, keys, stages, capacity, tails, parts, kv_heads):
    context, refs = (refs[:2], refs[2:]) if capacity else ((), refs)
    tail, refs = (refs[:2], refs[2:]) if tails else ((), refs)
    out, lse, q_tile, k_tiles, v_tiles, p_tile, out_tile, lse_tile, marks_tile, *barriers = refs
    q_here, k_here, v_here, used = barriers
    i, split, head = (jax.lax.axis_index(name) for name in ("tile", "split", "head"))
    warpgroup, splits = jax.lax.axis_index("warpgroup"), out.shape[3]
    b, g = jax.lax.div(head, kv_heads), jax.lax.rem(head, kv_heads)
    rows = pl.ds(warpgroup * ROWS, ROWS)
    each = jax.lax.div(jnp.maximum(high[b, i] - low[b, i], 0) + splits - 1, splits)
    begin = low[b, i] + split * each
    tails = jnp.where(split == 0, tails, 0)  # of this program
    count = tails + jnp.maximum(jnp.minimum(begin + each, high[b, i]) - begin, 0)

    def fetch(j):
        """Start to copy tile j of the program into its place of the ring."""
        slot = jax.lax.rem(j, stages)

        def copy(k, v, *at):
            plgpu.copy_gmem_to_smem(k.at[at], k_tiles.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(v.at[at], v_tiles.at[slot], v_here.at[slot])

        if tail:

            @pl.when(j < tails)
            def _():
                copy(*tail, b, g, jax.lax.div(i, parts), pl.ds(j * keys, keys))

        if context:

            @pl.when((tails <= j) & (j < count))
            def _():
                copy(*context, b, g, pl.ds((begin + j - tails) * keys, keys))

    @pl.when(warpgroup == 0)
    def _():
        for j in range(stages):
            fetch(jnp.int32(j))

    plgpu.copy_gmem_to_smem(q.at[b, g, i, rows], q_tile.at[warpgroup], q_here.at[warpgroup])
    plgpu.copy_gmem_to_smem(
        marks.at[b, i, :, rows], marks_tile.at[warpgroup], q_here.at[warpgroup]
    )
    plgpu.barrier_wait(q_here.at[warpgroup])

    def mark(n):
        return plgpu.layout_cast(marks_tile[warpgroup, n], plgpu.Layout.WGMMA.reduce(1))

    def across(x, columns=keys):
        return jax.lax.broadcast_in_dim(x, (ROWS, columns), [0])

    def columns():
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 1, layout=plgpu.Layout.WGMMA)

    def product(a, b):
        def run(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    parts_of_dim = [pl.ds(n, out_tile.shape[2]) for n in range(0, out.shape[-1], out_tile.shape[2])]

    def fold(j, state, visible):
        """One step of the online softmax, in powers of two, over the tile in the ring."""
        top, total, acc = state
        slot = jax.lax.rem(j, stages)
        plgpu.barrier_wait(k_here.at[slot])
        scores = product(q_tile.at[warpgroup], k_tiles.at[slot].T) * (scale * math.log2(math.e))
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet: avoid inf - inf
        probs = jnp.exp2(scores - across(safe))
        shrink = jnp.exp2(top - safe)
        total = total * shrink + jnp.sum(probs, axis=1)
        p_tile[warpgroup] = probs.astype(p_tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_here.at[slot])
        acc = tuple(
            a * across(shrink, part.size) + product(p_tile.at[warpgroup], v_tiles.at[slot, :, part])
            for a, part in zip(acc, parts_of_dim, strict=True)
        )
        plgpu.barrier_arrive(used.at[slot])

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_wait(used.at[slot])
            fetch(j + stages)

        return new_top, total, acc

    def fold_tail(j, state):
        words = keys // COLUMNS
        bits = across(mark(2 + j * words))
        for n in range(1, words):
            bits = jnp.where(columns() < n * COLUMNS, bits, across(mark(2 + j * words + n)))
        return fold(j, state, (bits >> (columns() & (COLUMNS - 1))) & 1 != 0)

    def fold_context(j, state):
        slots = (begin + j - tails) * keys + columns()
        return fold(j, state, (across(begins) <= slots) & (slots < across(ends)))

    begins, ends = mark(0), jnp.minimum(mark(1), capacity)
    nothing = mark(0).astype(jnp.float32) * 0
    state = (
        nothing - jnp.inf,
        nothing,
        tuple(across(nothing, part.size) for part in parts_of_dim),
    )
    if tail:
        state = jax.lax.fori_loop(0, tails, fold_tail, state)
    if context:
        state = jax.lax.fori_loop(tails, count, fold_context, state)
    top, total, acc = state
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    lse_tile[warpgroup] = jnp.where(seen, top * math.log(2) + jnp.log(safe), -jnp.inf)
    for a, part in zip(acc, parts_of_dim, strict=True):
        out_tile[warpgroup] = (a / across(safe, part.size)).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[warpgroup], out.at[b, g, i, split, rows, part])
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(lse_tile.at[warpgroup], lse.at[b, g, i, split, rows])
    plgpu.wait_smem_to_gmem(0)
