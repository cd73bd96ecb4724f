"""Block attention in plain XLA: the context in chunks, with an online softmax.

Only chunks that some row sees are computed, so time follows the used context and not its
capacity, and neither pass holds more scores than rows x chunk. The backward pass recomputes the
probabilities from the saved log-sum-exp, as in FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from functools import partial

import jax
import jax.numpy as jnp

CHUNK = 256  # context rows per step


def block_attention_xla(
    q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask, *, scale, chunk=None
):
    """Chunked block attention; returns `(out, lse)`. Shapes and meaning as in `block_attention`.

    `chunk` is the number of context rows per step; a context that fits in one is done in one
    dense pass. Dead context and tail rows must be finite.
    """
    batch, blocks, rows, heads, dim = q.shape
    kv_heads = ctx_k.shape[1]
    # Group the query heads by the key/value head they share: K and V are never repeated.
    grouped = q.reshape(batch, blocks, rows, kv_heads, heads // kv_heads, dim)
    out, lse = _attention(
        (scale, CHUNK if chunk is None else chunk),
        grouped.transpose(0, 3, 1, 2, 4, 5),  # [B, G, N, T, P, D] with P = H // G
        ctx_k,
        ctx_v,
        ctx_start,
        ctx_end,
        tail_k,
        tail_v,
        tail_mask,
    )
    out = out.transpose(0, 2, 3, 1, 4, 5).reshape(q.shape)
    return out, lse.transpose(0, 2, 3, 1, 4).reshape(q.shape[:-1])


def _dot(spec, a, b, dtype):
    """An einsum that accumulates and returns `dtype`; `a` is rounded to the type of `b`."""
    return jnp.einsum(spec, a.astype(b.dtype), b, preferred_element_type=dtype)


def _in_range(start, end, offset, size):
    """[B, 1, N, T or 1, 1, C] bool: which of `size` context rows from `offset` a row sees."""
    slot = offset + jnp.arange(size, dtype=jnp.int32)[None, None, None, :]
    visible = (start[..., None] <= slot) & (slot < end[..., None])
    return visible[:, None, :, :, None, :]


def _chunk_bounds(start, end, capacity, chunk):
    """First and one past the last chunk that some row sees; rows with empty ranges do not count."""
    start, end = jnp.maximum(start, 0), jnp.minimum(end, capacity)
    start, end = jnp.broadcast_arrays(start, end)
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

    low, high = _chunk_bounds(start, end, capacity, chunk)
    return jax.lax.fori_loop(low, high, step, state)


def _rows(ctx, offset, size):
    """Context rows offset..offset+size as [B, G, C, D]."""
    return jax.lax.dynamic_slice_in_dim(ctx, offset, size, axis=2)


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


def _forward(static, q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask):
    scale, chunk = static
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    # The tail opens the softmax; derived from q so that the carry is typed alike under shard_map.
    nothing = jnp.zeros_like(q[..., 0], dtype)
    state = _fold(
        (nothing - jnp.inf, nothing, jnp.zeros_like(q, dtype)),
        _dot("bgntpd,bnrgd->bgntpr", q, tail_k, dtype) * scale,
        tail_mask[:, None, :, :, None, :],
        lambda probs: _dot("bgntpr,bnrgd->bgntpd", probs, tail_v, dtype),
    )

    def body(offset, size, visible, state):
        keys, values = _rows(ctx_k, offset, size), _rows(ctx_v, offset, size)
        scores = _dot("bgntpd,bgcd->bgntpc", q, keys, dtype) * scale
        return _fold(
            state, scores, visible, lambda probs: _dot("bgntpc,bgcd->bgntpd", probs, values, dtype)
        )

    top, total, acc = _for_each_chunk(ctx_start, ctx_end, ctx_k.shape[2], chunk, body, state)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = (acc / total[..., None]).astype(q.dtype)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    saved = (q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask, out, lse)
    return (out, lse), saved


def _backward(static, saved, cotangents):
    scale, chunk = static
    q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask, out, lse = saved
    d_out, d_lse = cotangents
    dtype = lse.dtype
    safe_lse = jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]
    # d score = prob * (d_out . value - d_out . out + d_lse), scaled
    shift = (jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1) - d_lse)[..., None]

    def probs_and_d_scores(scores, d_probs, visible):
        probs = jnp.exp(jnp.where(visible, scores * scale - safe_lse, -jnp.inf))
        return probs, jnp.where(visible, probs * (d_probs - shift) * scale, 0.0)

    probs, d_scores = probs_and_d_scores(
        _dot("bgntpd,bnrgd->bgntpr", q, tail_k, dtype),
        _dot("bgntpd,bnrgd->bgntpr", d_out, tail_v, dtype),
        tail_mask[:, None, :, :, None, :],
    )
    d_q = _dot("bgntpr,bnrgd->bgntpd", d_scores, tail_k, dtype)
    d_tail_k = _dot("bgntpr,bgntpd->bnrgd", d_scores, q, dtype).astype(tail_k.dtype)
    d_tail_v = _dot("bgntpr,bgntpd->bnrgd", probs, d_out, dtype).astype(tail_v.dtype)

    def body(offset, size, visible, state):
        d_q, d_k, d_v = state
        keys, values = _rows(ctx_k, offset, size), _rows(ctx_v, offset, size)
        probs, d_scores = probs_and_d_scores(
            _dot("bgntpd,bgcd->bgntpc", q, keys, dtype),
            _dot("bgntpd,bgcd->bgntpc", d_out, values, dtype),
            visible,
        )

        def add(total, spec, left, right):  # each row is visible in one chunk: sums are exact
            new = _dot(spec, left, right, dtype).astype(total.dtype)
            new = new + _rows(total, offset, size)
            return jax.lax.dynamic_update_slice_in_dim(total, new, offset, axis=2)

        d_q = d_q + _dot("bgntpc,bgcd->bgntpd", d_scores, keys, dtype)
        d_k = add(d_k, "bgntpc,bgntpd->bgcd", d_scores, q)
        d_v = add(d_v, "bgntpc,bgntpd->bgcd", probs, d_out)
        return d_q, d_k, d_v

    state = (d_q, jnp.zeros_like(ctx_k), jnp.zeros_like(ctx_v))
    d_q, d_k, d_v = _for_each_chunk(ctx_start, ctx_end, ctx_k.shape[2], chunk, body, state)
    return d_q.astype(q.dtype), d_k, d_v, None, None, d_tail_k, d_tail_v, None


_attention.defvjp(_forward, _backward)
