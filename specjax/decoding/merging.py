"""Several draft blocks as one chain: what ReAnchor sends to verification.

The chain is built from left to right. The plain block is open from the start. A shifted block
opens once the chain holds, at the position of its anchor, the very token that it is anchored at:
then both stand behind the same text as far as anyone knows. A slot's law is the mean of the laws
of the open blocks that reach it. Gates look at earlier slots only, so that this mean is the law
from which the slot was drawn, as the token rule needs it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.sampling import argmax, law
from specjax.models.reuse import ReAnchor
from specjax.types import Array, Block, Proposal, Sampling


def merge(
    block: Block,
    logits: Array,
    reuse: ReAnchor,
    stale: Array,
    num_draft: int,
    sampling: Sampling,
    noise: Array | None,
) -> Proposal:
    """One chain of up to `num_draft` tokens.

    Args:
      block: N blocks; the anchors of the shifted ones are gates.
      logits: [B, N, D, V] float32 over the target's vocabulary; entry i of block n predicts
        position a' + shift + 1 + i.
      reuse: how far behind a' the blocks after the first are anchored. Past the end of the first
        block the chain goes on while the largest pooled probability exceeds its threshold.
      stale: [B] int32, rejected rows; block n exists where its shift is at most this.
      num_draft: K; every slot up to it must be reached by some block.
      sampling: how drafts are drawn.
      noise: Gumbel noise [B, K, V] by slot, where drafts are drawn.

    Returns:
      The chain. Where no gate opens it is that of the first block.
    """
    B, N, D, _ = logits.shape
    shifts = reuse.shifts
    greedy = sampling.drafting == "greedy"
    if greedy:
        laws = jax.nn.softmax(logits, axis=-1)
    else:
        laws = law(logits.reshape(B, N * D, -1), sampling).reshape(logits.shape)
    open_blocks = [jnp.ones((B,), bool)] + [jnp.zeros((B,), bool)] * len(shifts)
    going = jnp.ones((B,), bool)
    count = jnp.zeros((B,), jnp.int32)
    tokens, pooled_laws = [], []
    for j in range(1, num_draft + 1):  # the slot of position a' + j
        reach = [(n, s) for n, s in enumerate((0, *shifts)) if s < j <= s + D]
        weights = jnp.stack([open_blocks[n] for n, _ in reach], axis=1).astype(jnp.float32)
        several = jnp.stack([laws[:, n, j - s - 1] for n, s in reach], axis=1)  # [B, n, V]
        total = jnp.sum(weights, axis=1)
        pooled = jnp.einsum("bn,bnv->bv", weights, several) / jnp.maximum(total, 1.0)[:, None]
        if j > D:
            going &= (total > 0) & (jnp.max(pooled, axis=-1) > reuse.threshold)
        if greedy:
            # Where the first block is alone its logits decide: a softmax can make ties.
            alone = (total <= 1) & (j <= D)
            token = argmax(jnp.where(alone[:, None], logits[:, 0, min(j, D) - 1], pooled))
        else:
            assert noise is not None
            token = argmax(jnp.log(pooled) + noise[:, j - 1])
        tokens.append(token)
        pooled_laws.append(pooled)
        count += going.astype(jnp.int32)
        for n, s in enumerate(shifts, start=1):
            if s == j:
                open_blocks[n] = (token == block.tokens[:, n, 0]) & (s <= stale)
    # Greedy drafts are points; coupled ones are verified by equality, which needs no law.
    q = jnp.stack(pooled_laws, axis=1) if sampling.drafting == "independent" else None
    return Proposal(jnp.stack(tokens, axis=1), count, q)
