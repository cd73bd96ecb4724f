"""The definition of block attention: dense, slow, memory-hungry and easy to check by eye."""

import jax
import jax.numpy as jnp


def block_attention_reference(
    q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask, *, scale
):
    """One softmax over all context and tail rows that a query may see; returns `(out, lse)`.

    Shapes and meaning as in `block_attention`. Everything is computed in float32, or in float64
    if `q` is float64. It materialises all scores, [B, N, T, H, S + R].
    """
    batch, blocks, rows, heads, _ = q.shape
    kv_heads, capacity = ctx_k.shape[1:3]
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32

    # One key/value head per query head, context repeated for every block: [B, N, S + R, H, D].
    def all_rows(ctx, tail):
        ctx = jnp.broadcast_to(
            ctx.transpose(0, 2, 1, 3)[:, None], (batch, blocks, capacity, kv_heads, ctx.shape[-1])
        )
        both = jnp.concatenate([ctx, tail], axis=2).astype(dtype)
        return jnp.repeat(both, heads // kv_heads, axis=3)

    keys, values = all_rows(ctx_k, tail_k), all_rows(ctx_v, tail_v)

    slot = jnp.arange(capacity, dtype=jnp.int32)[None, None, None, :]
    in_range = (ctx_start[..., None] <= slot) & (slot < ctx_end[..., None])  # [B, N, T or 1, S]
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(in_range, (batch, blocks, rows, capacity)),
            jnp.broadcast_to(tail_mask, (batch, blocks, rows, tail_mask.shape[-1])),
        ],
        axis=-1,
    )[:, :, :, None, :]  # [B, N, T, 1, S + R]

    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bnthd,bnshd->bnths", q.astype(dtype), keys, precision=highest) * scale
    scores = jnp.where(visible, scores, 0.0)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30, where=visible)
    top = jax.lax.stop_gradient(top)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1)  # [B, N, T, H]
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = jnp.einsum("bnths,bnshd->bnthd", weights, values, precision=highest) / total[..., None]
    lse = jnp.where(seen, jnp.log(total) + jnp.where(seen, top[..., 0], 0.0), -jnp.inf)
    return out.astype(q.dtype), lse
