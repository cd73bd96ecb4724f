"""What the kernels share: query rows cut into tiles, each with its tails and its context range."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import xla


class Tiles(NamedTuple):
    """The arguments of a kernel, of which tile i of batch row b and head g takes a slice.

    A tile holds several blocks, or one of `parts` equal parts of a block, filled up with rows and
    columns that see nothing. Its tails lie side by side under a block-diagonal mask.
    """

    q: jax.Array  # [B, G, tiles, rows, D]
    start: jax.Array  # [B, tiles, rows, 1] int32
    end: jax.Array  # [B, tiles, rows, 1] int32
    tail_k: jax.Array  # [B, G, tiles / parts, columns, D]
    tail_v: jax.Array  # [B, G, tiles / parts, columns, D]
    mask: (
        jax.Array
    )  # [B, 1 or parts or tiles, rows, columns] int8, for tile i at i modulo its length
    low: jax.Array  # [B, tiles] int32: the first context tile that some row sees
    high: jax.Array  # [B, tiles] int32: one past the last; not above low where no row sees any
    parts: int


def cut(
    q: jax.Array,  # [B, G, M, D]
    start: jax.Array,  # [B, 1, M, 1]
    end: jax.Array,  # [B, 1, M, 1]
    tail_k: jax.Array,  # [B, N, R, G, D]
    tail_v: jax.Array,  # [B, N, R, G, D]
    tail_mask: jax.Array,  # [B, N or 1, T, R]
    *,
    capacity: int,
    rows: int,
    keys: int,
    round_up: Callable[[int], int],
    round_columns: Callable[[int], int] | None = None,
) -> tuple[Tiles, Callable[[jax.Array], jax.Array]]:
    """Tiles of at most `rows` query rows, and what turns [B, G, tiles, rows, ...] back.

    Args:
      capacity: rows of the context.
      rows: query rows of a tile; blocks are put together while their tails stay below `keys`.
      keys: rows of a context tile.
      round_up: the smallest number of rows the kernel takes for so many.
      round_columns: the same of columns, tail rows; None for the same function.

    Returns:
      The tiles, and a function to [B, G, M, ...].
    """
    batch, kv_heads, queries = q.shape[:3]
    blocks, tail = tail_k.shape[1:3]
    block = queries // blocks  # rows of a block: its positions times the query heads of a group
    parts = -(-block // rows)
    together = 1 if parts > 1 else max(1, min(rows // block, keys // max(tail, 1), blocks))
    part = round_up(-(-block // parts)) if parts > 1 else block
    padded_blocks = -(-blocks // together) * together
    tiles = padded_blocks // together * parts
    filled = round_up(together * part)
    columns = (round_columns or round_up)(together * tail) if tail else 0

    def by_tile(x, axis):
        lead, rest = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*lead, blocks, block, *rest)
        x = _pad(_pad(x, axis + 1, parts * part), axis, padded_blocks)
        return _pad(x.reshape(*lead, tiles, together * part, *rest), axis + 1, filled)

    def untile(x):
        x = x[:, :, :, : together * part]
        x = x.reshape(batch, kv_heads, padded_blocks, parts * part, *x.shape[4:])
        return x[:, :, :blocks, :block].reshape(batch, kv_heads, queries, *x.shape[4:])

    def side_by_side(x):
        x = _pad(x, 1, padded_blocks).transpose(0, 3, 1, 2, 4)
        return _pad(x.reshape(batch, kv_heads, -1, together * tail, x.shape[-1]), 3, columns)

    def block_diagonal(mask):
        mask = _pad(jnp.repeat(mask, block // mask.shape[2], axis=2), 2, parts * part)
        if mask.shape[1] == 1:
            mask = jnp.broadcast_to(mask, (batch, together, *mask.shape[2:]))
        mask = _pad(mask, 1, -(-mask.shape[1] // together) * together)
        mask = mask.reshape(batch, -1, together, parts, part, tail).transpose(0, 1, 3, 2, 4, 5)
        own = jnp.eye(together, dtype=bool)[None, None, None, :, None, :, None]
        mask = mask[..., None, :] & own  # [B, tiles, parts, blocks, rows, blocks, R]
        mask = mask.reshape(batch, -1, together * part, together * tail)
        return _pad(_pad(mask, 2, filled), 3, columns).astype(jnp.int8)

    start, end = by_tile(start[:, 0], 1), by_tile(end[:, 0], 1)
    bounds = jax.vmap(jax.vmap(lambda s, e: xla.chunk_bounds(s, e, capacity, keys)))
    low, high = bounds(start, end)
    return Tiles(
        q=by_tile(q, 2),
        start=start,
        end=end,
        tail_k=side_by_side(tail_k) if tail else tail_k,
        tail_v=side_by_side(tail_v) if tail else tail_v,
        mask=block_diagonal(tail_mask) if tail else tail_mask,
        low=low,
        high=high,
        parts=parts,
    ), untile


def _pad(x, axis, size):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths) if size != x.shape[axis] else x


def round_up(n: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `n`."""
    return -(-n // to) * to


def fill(x: jax.Array, axis: int, to: int) -> jax.Array:
    """`x` filled up with zeros to a multiple of `to`."""
    axis %= x.ndim
    return _pad(x, axis, round_up(x.shape[axis], to))


def folded(kernel: Callable, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    """`kernel` on arguments that all have a batch axis: vmap lengthens it, a mesh divides it."""
    start, end = _for_each_row(q, start, end)
    tail_mask = jnp.broadcast_to(tail_mask, (q.shape[0], *tail_mask.shape[1:]))
    return _folded(
        kernel, (1, 1, 1, None, None, 3, 3, None), (1, 1),
        q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask,
    )  # fmt: skip


def folded_gradients(kernel: Callable, q, ctx_k, ctx_v, start, end, d_out, lse, shift):
    """The same for the gradients of the context, see `xla.differentiable`."""
    start, end = _for_each_row(q, start, end)
    return _folded(
        kernel, (1, 1, 1, None, None, 1, 1, 1), (1, 1, 1),
        q, ctx_k, ctx_v, start, end, d_out, lse, shift,
    )  # fmt: skip


def _for_each_row(q, *bounds):
    return (jnp.broadcast_to(x, (q.shape[0], 1, q.shape[2], 1)) for x in bounds)


def _folded(kernel, heads_in, heads_out, *arrays):
    """`heads_in` and `heads_out` name the axis of the key/value heads of every array, if any.

    vmap by itself would put a loop around a kernel whose scalars are mapped, and the compiler
    cannot divide a kernel over devices by itself.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return _over_mesh(kernel, heads_in, heads_out, *arrays)

    @call.def_vmap
    def _(size, mapped, *arrays):
        def fold(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = call(*map(fold, arrays, mapped))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True,) * len(out)

    return call(*arrays)


def _over_mesh(kernel, heads_in, heads_out, *arrays):
    """The kernel on each device's batch rows and heads, if the arrays live on a mesh."""
    mesh = jax.typeof(arrays[0]).sharding.mesh
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    }
    if not automatic:
        return tuple(kernel(*arrays))

    def split(axis, size):
        return axis if axis in automatic and size % mesh.shape[axis] == 0 else None

    batch = split("data", arrays[0].shape[0])
    heads = split("model", arrays[0].shape[1])

    def spec(axis):
        return P(batch) if axis is None else P(batch, *[None] * (axis - 1), heads)

    return jax.shard_map(
        lambda *arrays: tuple(kernel(*arrays)),
        mesh=mesh,
        in_specs=tuple(map(spec, heads_in)),
        out_specs=tuple(map(spec, heads_out)),
        axis_names=automatic,
        check_vma=False,
    )(*arrays)


def nth(low, high, n):
    """Tile low + n, or the last below `high` if there are not so many: no other is fetched."""
    return jnp.clip(low + n, 0, jnp.maximum(high - 1, 0))


def splits(programs: int, capacity: int, keys: int, wanted: int) -> int:
    """Into how many parts a context is cut so that `programs` become about `wanted`.

    No part is cut below four tiles of `keys` rows of a full context.
    """
    return min(-(-wanted // programs), max(-(-capacity // (4 * keys)), 1))


def merged(out: jax.Array, lse: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """The parts of a context [B, G, tiles, splits, rows, ...] as one softmax, `out` in `dtype`."""
    if out.shape[3] == 1:
        return out[:, :, :, 0], lse[:, :, :, 0]
    total = jax.nn.logsumexp(lse, axis=3, keepdims=True)
    weights = jnp.where(total == -jnp.inf, 0.0, jnp.exp(lse - total))  # not exp(inf - inf)
    return jnp.sum(out * weights[..., None], axis=3).astype(dtype), total[:, :, :, 0]
