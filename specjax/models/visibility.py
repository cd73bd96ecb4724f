"""Who sees what: from positions, windows and documents to context ranges and a tail mask.

Every pass of this library is a set of *blocks* of query rows. A row attends to a range of a long
*context* (committed rows) and to a few *tail* rows (its own block, carried rows). The attention
op knows ranges and a mask only; this file is the one place that decides them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visibility(NamedTuple):
    """What `block_attention` needs: context rows start <= s < end, and tail rows by mask."""

    ctx_start: jax.Array  # [B, N, T or 1] int32
    ctx_end: jax.Array  # [B, N, T or 1] int32
    tail_mask: jax.Array  # [B or 1, N or 1, T, R] bool


def visibility(
    positions: jax.Array,  # [B, N, T] int32
    context_end: jax.Array,  # [B, N] or [B, N, T] int32
    *,
    context_start: jax.Array | None = None,  # [B, N] or [B, N, T] int32
    causal: bool,
    window: int | None = None,
    tail_positions: jax.Array | None = None,  # [B, N, R] int32
    tail_start: jax.Array | None = None,  # [B, N] or [B, N, R] int32
    tail_valid: jax.Array | None = None,  # [B, N, R] bool
    tail_allowed: jax.Array | None = None,  # [B or 1, N or 1, T, R] bool
) -> Visibility:
    """Context ranges and tail mask of every query row.

    - `positions`: of each query row within its own document, as used for rotary embedding.
    - `context_end`: context rows at or past it are invisible (committed length, anchor row,
      start of the chunk). It alone bounds the context from above: `causal` is about tail rows.
    - `context_start`: the context row where the query row's document begins, 0 by default:
      context row s holds document position s - context_start. At or past `context_end` the
      document begins inside the block and the range is empty.
    - `window` W: a key is visible iff q_pos - k_pos < W, the row itself included; when not
      causal, also k_pos - q_pos < W.
    - `causal`: a tail row is visible iff k_pos <= q_pos.
    - `tail_positions`, `tail_start`: position of each tail row and the context row where its
      document begins. By default the tail is the block itself. Tail rows of another document
      are invisible. `tail_start` must be given where the tail is not the block itself and
      `context_start` differs by row.
    - `tail_valid`: rows that no query may see are false (padding, empty carried rows, stale rows
      at or past a block's own anchor).
    - `tail_allowed`: a relation and-ed in, such as `ancestors` of a tree.

    Ranges keep a row axis of 1 and the mask batch and block axes of 1 where nothing varies.
    Raises ValueError for shapes or a window that do not fit.
    """
    _check(positions, tail_positions, tail_valid, tail_allowed, window)
    end = _per_row("context_end", context_end, positions)
    start = None if context_start is None else _per_row("context_start", context_start, positions)
    own_block = tail_positions is None
    if own_block and tail_start is not None:
        raise ValueError("tail_start without tail_positions: the tail is the block itself")
    if tail_start is None:
        tail_start = context_start
        if not own_block and context_start is not None and context_start.ndim == 3:
            raise ValueError("context_start differs by row: give tail_start for the tail rows")

    tail = positions if own_block else tail_positions
    tail_mask = _tail_mask(positions, tail, causal, window)
    if start is not None:
        tail_mask &= start[:, :, :, None] == _per_row("tail_start", tail_start, tail)[:, :, None, :]
    if tail_valid is not None:
        tail_mask &= tail_valid[:, :, None, :]
    if tail_allowed is not None:
        tail_mask &= tail_allowed

    start = jnp.zeros_like(end) if start is None else start
    if window is not None:
        if not causal:
            # In this order nothing overflows, however large the window.
            end = jnp.minimum(end - start - positions, window) + start + positions
        start = start + jnp.maximum(positions - (window - 1), 0)
    return Visibility(start, end, tail_mask)


def _tail_mask(positions, tail, causal, window):
    if not causal and window is None:
        return jnp.ones((1, 1, positions.shape[2], tail.shape[2]), bool)
    ahead = tail[:, :, None, :] - positions[:, :, :, None]  # [B, N, T, R]: k_pos - q_pos
    mask = ahead <= 0 if causal else ahead < window
    return mask if window is None else mask & (-ahead < window)


def _per_row(name, x, rows):
    """Give [B, N] a row axis of 1; keep [B, N, rows]."""
    if x.shape == rows.shape:
        return x
    if x.shape == rows.shape[:2]:
        return x[:, :, None]
    raise ValueError(f"{name} must be {rows.shape[:2]} or {rows.shape}, got {x.shape}")


def _check(positions, tail_positions, tail_valid, tail_allowed, window):
    if positions.ndim != 3:
        raise ValueError(f"positions must be [B, N, T], got {positions.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1 (a row sees itself), got {window}")
    batch, blocks, rows = positions.shape
    tail = positions if tail_positions is None else tail_positions
    if tail.ndim != 3 or tail.shape[:2] != (batch, blocks):
        raise ValueError(f"tail_positions must be [{batch}, {blocks}, R], got {tail.shape}")
    if tail_valid is not None and tail_valid.shape != tail.shape:
        raise ValueError(f"tail_valid must be {tail.shape}, got {tail_valid.shape}")
    if tail_allowed is not None:
        shape = tail_allowed.shape
        fits = len(shape) == 4 and shape[2:] == (rows, tail.shape[2])
        if not (fits and shape[0] in (batch, 1) and shape[1] in (blocks, 1)):
            raise ValueError(
                f"tail_allowed must be [{batch} or 1, {blocks} or 1, {rows}, {tail.shape[2]}], "
                f"got {shape}"
            )


def ancestors(parents: jax.Array) -> jax.Array:
    """Which verify rows a row of a candidate tree may see: itself and its ancestors.

    parents [B, K] int32: node j's parent is a node in 0..j-1, or -1 for a child of the anchor.
    Returns [B, 1, K + 1, K + 1] bool, [.., query row, key row]; row 0 is the anchor and row j + 1
    is node j. Use it as `tail_allowed`.
    """
    count = parents.shape[1] + 1
    parent_row = jnp.pad(parents + 1, ((0, 0), (1, 0)), constant_values=0)  # the anchor's is itself
    row = jnp.arange(count, dtype=parents.dtype)
    reach = (parent_row[:, :, None] == row[None, None, :]) | jnp.eye(count, dtype=bool)[None]
    # Squaring the one-step relation doubles the distance it covers.
    for _ in range((count - 1).bit_length()):
        steps = reach.astype(jnp.float32)
        reach = jnp.einsum("bij,bjk->bik", steps, steps) > 0
    return reach[:, None]
