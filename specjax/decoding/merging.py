"""Draft blocks and stale choices as one chain: what ReAnchor sends to verification.

The chain is built from left to right. The plain block is open from the start. A shifted block
opens once the chain holds, at the position of its anchor, the very token that it is anchored at:
then both stand behind the same token, whatever lies between. A slot's law is the mean of the laws
of the open blocks that reach it. As long as the chain repeats the rejected drafts behind the first
of them, which stood where the anchor is now, the verifier's choice there takes the slot if a law
that trusts it a little would rather have it. All of this looks at earlier slots only, so that the
law is the one from which the slot was drawn, as the token rule needs it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.decoding.sampling import argmax, law
from specjax.models.reuse import ReAnchor
from specjax.types import Array, Block, Proposal, Rejected, Sampling


def merge(
    block: Block,
    logits: Array,
    reuse: ReAnchor,
    rejected: Rejected,
    num_draft: int,
    sampling: Sampling,
    noise: Array | None,
) -> Proposal:
    """One chain of up to `num_draft` tokens.

    Args:
      block: N blocks; the anchors of the shifted ones are gates.
      logits: [B, N, D, V] float32 over the target's vocabulary; entry i of block n predicts
        position a' + shift + 1 + i. D is that of the blocks, or K where it is less.
      reuse: how far behind a' the blocks after the first are anchored. Past the end of the first
        block the chain goes on while the largest pooled probability exceeds its threshold.
      rejected: of the round before; block n exists where its shift is at most their count.
      num_draft: K; every slot up to it must be reached by some block.
      sampling: how drafts are drawn.
      noise: Gumbel noise [B, K, V] by slot, where drafts are drawn.

    Returns:
      The chain. Where nothing was rejected it is that of the first block.
    """
    B, _, D, V = logits.shape
    shifts = reuse.shifts
    greedy = sampling.drafting == "greedy"
    cold = sampling.temperature == 0  # [B]: pooled as laws, and then a point
    laws = _laws(logits, sampling, cold)
    open_blocks = [jnp.ones((B,), bool)] + [jnp.zeros((B,), bool)] * len(shifts)
    repeats, going = jnp.ones((2, B), bool)
    count = jnp.zeros((B,), jnp.int32)
    tokens, pooled_laws = [], []
    for j in range(1, num_draft + 1):  # the slot of position a' + j
        reach = [(n, s) for n, s in enumerate((0, *shifts)) if s < j <= s + D]
        weights = jnp.stack([open_blocks[n] for n, _ in reach], axis=1).astype(jnp.float32)
        several = jnp.stack([laws[:, n, j - s - 1] for n, s in reach], axis=1)  # [B, n, V]
        total = jnp.sum(weights, axis=1)
        pooled = jnp.einsum("bn,bnv->bv", weights, several) / jnp.maximum(total, 1.0)[:, None]
        alone = (total <= 1) & (j <= D)
        if reuse.trust and j <= rejected.argmax.shape[1]:
            trusted = repeats & (j <= rejected.count)
            share = jnp.where(trusted, reuse.trust * rejected.certainty[:, j - 1], 0.0)
            pooled, taken = _with_choice(pooled, rejected.argmax[:, j - 1], share)
            alone &= ~taken
        if j > D:
            going &= (total > 0) & (jnp.max(pooled, axis=-1) > reuse.threshold)
        # Where the first block is alone its logits decide: a softmax can make ties.
        token = argmax(jnp.where(alone[:, None], logits[:, 0, min(j, D) - 1], pooled))
        if not greedy:
            assert noise is not None
            pooled = jnp.where(cold[:, None], jax.nn.one_hot(token, V), pooled)
            token = argmax(jnp.log(pooled) + noise[:, j - 1])
        tokens.append(token)
        pooled_laws.append(pooled)
        count += going.astype(jnp.int32)
        for n, s in enumerate(shifts, start=1):
            if s == j:
                open_blocks[n] = (token == block.tokens[:, n, 0]) & (s <= rejected.count)
        if j < rejected.tokens.shape[1]:
            repeats &= token == rejected.tokens[:, j]
    # Greedy drafts are points; coupled ones are verified by equality, which needs no law.
    q = jnp.stack(pooled_laws, axis=1) if sampling.drafting == "independent" else None
    return Proposal(jnp.stack(tokens, axis=1), count, q)


def _laws(logits: Array, sampling: Sampling, cold: Array) -> Array:
    """The law of every slot of every block, of `cold` rows that of temperature 1."""
    if sampling.drafting == "greedy":
        return jax.nn.softmax(logits, axis=-1)
    warm = replace(sampling, temperature=jnp.where(cold, 1.0, sampling.temperature))
    return law(logits.reshape(len(logits), -1, logits.shape[-1]), warm).reshape(logits.shape)


def _with_choice(pooled: Array, choice: Array, share: Array) -> tuple[Array, Array]:
    """The law [B, V] of a slot that a choice [B] may take, and where it does.

    It takes the slot where (1 - share) pooled + share [choice] has its mode there, and pooled not.
    """
    highest = jnp.max(pooled, axis=-1)
    own = jnp.take_along_axis(pooled, choice[:, None], axis=-1)[:, 0]
    takes = (own < highest) & ((1 - share) * (highest - own) < share)
    return jnp.where(takes[:, None], jax.nn.one_hot(choice, pooled.shape[-1]), pooled), takes
