"""Block attention in plain XLA: the context in chunks, with an online softmax.

Only chunks that some row sees are computed, so time follows the used context and not its
capacity, and neither pass holds more scores than rows x chunk. The backward pass recomputes the
probabilities from the saved log-sum-exp, as in FlashAttention-2 (Dao, arXiv 2307.08691).

A decoding loop should write new rows to its cache *before* it attends (they lie outside the
ranges). A read followed by an independent write makes XLA copy the whole cache, because the chunk
loop holds it.

All query rows that share a key/value head form one axis M = N * T * P, with P = H // G: K and V
are never repeated, and XLA on CPU does not transpose K for a product with one free axis.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention.sizes import measured

CHUNK = 128  # context rows per step


def block_attention_xla(*args, scale, sizes=None):
    """Chunked block attention; returns `(out, lse)`. Shapes and meaning as in `block_attention`.

    `sizes` may hold `chunk`, the number of context rows per step, which is otherwise the measured
    one or the default; a context that fits in one is done in one dense pass. Dead context and tail
    rows must be finite.
    """
    found = measured("xla", args[0], args[1]) if sizes is None else sizes
    return differentiable(None, *args, scale=scale, chunk=found.get("chunk"))


def differentiable(
    kernel, q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask, *, scale, chunk=None,
    gradients=None,
):  # fmt: skip
    """`(out, lse)` by a forward kernel, or in chunks without one, and their gradients.

    `kernel` takes the arguments with the query axes grouped, as `_forward` below, and returns out
    [B, G, M, D] and lse [B, G, M]. `gradients` gives the context's part of d_q, and d_k and d_v,
    from (q, ctx_k, ctx_v, start, end, d_out, lse, shift); without it that is done in chunks too.
    """
    batch, blocks, rows, heads, dim = q.shape
    kv_heads = ctx_k.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(batch, blocks, rows, kv_heads, group, dim).transpose(0, 3, 1, 2, 4, 5)
    out, lse = _attention(
        (scale, CHUNK if chunk is None else chunk, kernel, gradients),
        grouped.reshape(batch, kv_heads, blocks * rows * group, dim),
        ctx_k,
        ctx_v,
        _per_query(ctx_start, q.shape, group),
        _per_query(ctx_end, q.shape, group),
        tail_k,
        tail_v,
        tail_mask,
    )
    out = out.reshape(grouped.shape).transpose(0, 2, 3, 1, 4, 5).reshape(q.shape)
    lse = lse.reshape(grouped.shape[:-1]).transpose(0, 2, 3, 1, 4).reshape(q.shape[:-1])
    return out, lse


def _per_query(bound, q_shape, group):
    """A range bound [B, N, T or 1] as [B, 1, M, 1], or as [B, 1, 1, 1] where one serves all."""
    batch, blocks, rows = q_shape[:3]
    if bound.shape[1:] != (1, 1):
        bound = jnp.broadcast_to(bound[..., None], (batch, blocks, rows, group))
    return bound.reshape(batch, 1, -1, 1)


def _dot(spec, a, b, dtype):
    """An einsum that accumulates and returns `dtype`; `a` is rounded to the type of `b`."""
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=dtype)


def _in_range(start, end, offset, size):
    """[B, 1, M or 1, C] bool: which of the `size` context rows from `offset` on a query sees."""
    slot = offset + jnp.arange(size, dtype=jnp.int32)[None, None, None, :]
    return (start <= slot) & (slot < end)


def chunk_bounds(start, end, capacity, chunk):
    """First and one past the last chunk that some row sees; rows with empty ranges do not count."""
    start, end = jnp.maximum(start, 0), jnp.minimum(end, capacity)
    empty = start >= end
    low = jnp.min(jnp.where(empty, capacity, start), initial=capacity)
    high = jnp.max(jnp.where(empty, 0, end), initial=0)
    return low // chunk, (high + chunk - 1) // chunk


def _for_each_chunk(start, end, capacity, chunk, body, state):
    """Fold `body(offset, size, visible, state)` over the context, by chunks where it is long.

    Chunks start at multiples of `chunk`, whatever the ranges are: a chunk that a row does not see
    leaves that row bit for bit as it was, so a row does not depend on its neighbours.
    """
    if capacity == 0:
        return state
    if capacity <= chunk:
        return body(0, capacity, _in_range(start, end, 0, capacity), state)

    def step(i, state):
        first = i * chunk
        # The last chunk is moved back to fit; rows that the chunk before it covered are hidden.
        offset = jnp.minimum(first, capacity - chunk)
        visible = _in_range(jnp.maximum(start, first), end, offset, chunk)
        return body(offset, chunk, visible, state)

    low, high = chunk_bounds(start, end, capacity, chunk)
    return jax.lax.fori_loop(low, high, step, state)


def _rows(ctx, offset, size):
    """Context rows offset..offset+size as [B, G, C, D]."""
    return jax.lax.dynamic_slice_in_dim(ctx, offset, size, axis=2)


def _by_block(x, blocks):
    """Split the query axis: [B, G, M, ...] -> [B, G, N, M / N, ...], as the tail needs it."""
    return x.reshape(*x.shape[:2], blocks, x.shape[2] // blocks, *x.shape[3:])


def _all_blocks(x):
    """Undo `_by_block`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _tail_visible(tail_mask, group):
    """[B or 1, 1, N or 1, T * P, R] bool."""
    return jnp.repeat(tail_mask, group, axis=2)[:, None]


def _fold(state, scores, visible, weigh):
    """One step of the online softmax; `weigh` multiplies probabilities with the values."""
    top, total, acc = state
    scores = jnp.where(visible, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1, initial=-jnp.inf))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen yet: avoid inf - inf
    probs = jnp.exp(scores - safe[..., None])  # exactly 0 where masked
    shrink = jnp.exp(top - safe)
    total = total * shrink + jnp.sum(probs, axis=-1)
    return new_top, total, acc * shrink[..., None] + weigh(probs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, *args):
    return _forward(static, *args)[0]


def _forward(static, q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask):
    """q [B, G, M, D], start and end [B, 1, M or 1, 1], the others as in `block_attention`."""
    scale, chunk, kernel, _ = static
    saved = q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask
    if kernel is not None:
        out, lse = kernel(*saved)
        return (out, lse), (*saved, out, lse)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    blocks = tail_k.shape[1]

    # The tail opens the softmax.
    by_block = _by_block(q, blocks)  # [B, G, N, T * P, D]
    nothing = jnp.zeros_like(by_block[..., 0], dtype)
    state = _fold(
        (nothing - jnp.inf, nothing, jnp.zeros_like(by_block, dtype)),
        _dot("bgnmd,bnrgd->bgnmr", by_block, tail_k, dtype) * scale,
        _tail_visible(tail_mask, by_block.shape[3] // tail_mask.shape[2]),
        lambda probs: _dot("bgnmr,bnrgd->bgnmd", probs, tail_v, dtype),
    )

    def body(offset, size, visible, state):
        keys, values = _rows(ctx_k, offset, size), _rows(ctx_v, offset, size)
        scores = _dot("bgmd,bgcd->bgmc", q, keys, dtype) * scale
        return _fold(
            state, scores, visible, lambda probs: _dot("bgmc,bgcd->bgmd", probs, values, dtype)
        )

    state = tuple(map(_all_blocks, state))
    top, total, acc = _for_each_chunk(start, end, ctx_k.shape[2], chunk, body, state)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = (acc / total[..., None]).astype(q.dtype)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    return (out, lse), (*saved, out, lse)


def _backward(static, saved, cotangents):
    scale, chunk, _, gradients = static
    q, ctx_k, ctx_v, start, end, tail_k, tail_v, tail_mask, out, lse = saved
    d_out, d_lse = cotangents
    dtype = lse.dtype
    # d score = prob * (d_out . value - shift)
    shift = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1) - d_lse

    def probs_and_d_scores(scores, d_probs, visible, lse, shift):
        probs = jnp.exp(jnp.where(visible, scores * scale - lse[..., None], -jnp.inf))
        d_scores = jnp.where(visible, probs * (d_probs - shift[..., None]) * scale, 0.0)
        return probs, d_scores

    d_q, d_tail_k, d_tail_v = _tail_gradients(
        probs_and_d_scores, q, tail_k, tail_v, tail_mask, d_out, lse, shift
    )

    if gradients is not None and ctx_k.shape[2]:
        more, d_k, d_v = gradients(q, ctx_k, ctx_v, start, end, d_out, lse, shift)
        return (d_q + more).astype(q.dtype), d_k, d_v, None, None, d_tail_k, d_tail_v, None

    def body(offset, size, visible, state):
        d_q, d_k, d_v = state
        keys, values = _rows(ctx_k, offset, size), _rows(ctx_v, offset, size)
        probs, d_scores = probs_and_d_scores(
            _dot("bgmd,bgcd->bgmc", q, keys, dtype),
            _dot("bgmd,bgcd->bgmc", d_out, values, dtype),
            visible,
            lse,
            shift,
        )

        def add(total, left, right):  # a context row is visible in one chunk only: sums are exact
            new = _dot("bgmc,bgmd->bgcd", left, right, dtype).astype(total.dtype)
            new = new + _rows(total, offset, size)
            return jax.lax.dynamic_update_slice_in_dim(total, new, offset, axis=2)

        d_q = d_q + _dot("bgmc,bgcd->bgmd", d_scores, keys, dtype)
        return d_q, add(d_k, d_scores, q), add(d_v, probs, d_out)

    state = (d_q, jnp.zeros_like(ctx_k), jnp.zeros_like(ctx_v))
    d_q, d_k, d_v = _for_each_chunk(start, end, ctx_k.shape[2], chunk, body, state)
    return d_q.astype(q.dtype), d_k, d_v, None, None, d_tail_k, d_tail_v, None


def _tail_gradients(probs_and_d_scores, q, tail_k, tail_v, tail_mask, d_out, lse, shift):
    """The tail's part of d_q, [B, G, M, D] not yet rounded, and d_tail_k, d_tail_v."""
    dtype = lse.dtype
    q, d_out, lse, shift = (_by_block(x, tail_k.shape[1]) for x in (q, d_out, lse, shift))
    probs, d_scores = probs_and_d_scores(
        _dot("bgnmd,bnrgd->bgnmr", q, tail_k, dtype),
        _dot("bgnmd,bnrgd->bgnmr", d_out, tail_v, dtype),
        _tail_visible(tail_mask, q.shape[3] // tail_mask.shape[2]),
        lse,
        shift,
    )
    d_q = _dot("bgnmr,bnrgd->bgnmd", d_scores, tail_k, dtype)
    d_tail_k = _dot("bgnmr,bgnmd->bnrgd", d_scores, q, dtype).astype(tail_k.dtype)
    d_tail_v = _dot("bgnmr,bgnmd->bnrgd", probs, d_out, dtype).astype(tail_v.dtype)
    return _all_blocks(d_q), d_tail_k, d_tail_v


_attention.defvjp(_forward, _backward)
