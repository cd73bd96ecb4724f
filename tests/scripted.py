"""Drafters whose quality is data, so that perfect, wrong and k-right ones share one compile."""

from dataclasses import dataclass

import jax.numpy as jnp

from specjax.decoding.drafting import Plain
from specjax.types import Proposal


@dataclass(frozen=True)
class Scripted(Plain):
    """Knows the text of every row: its first `right` drafts follow it, the next one never does.

    Parameters: `script` [B, S] int32 (the text by position), `right` [B] int32, `vocab` [].
    """

    num_draft: int = 7

    def propose(self, params, vocabulary, draft, tokens, length, rejected, key, sampling):
        slot = jnp.arange(self.num_draft, dtype=jnp.int32)[None]
        truth = jnp.take_along_axis(params["script"], length[:, None] + slot, axis=1, mode="clip")
        wrong = (truth + 1) % params["vocab"]
        tokens = jnp.where(slot < params["right"][:, None], truth, wrong)
        return Proposal(tokens, jnp.full_like(length, self.num_draft)), draft


def script(prompts, answers, right, vocab, rows=512):
    """Parameters of `Scripted` for prompts and the answers of plain decoding."""
    text = jnp.zeros((len(prompts), rows), jnp.int32)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        line = jnp.asarray([*prompt, *answer], jnp.int32)
        text = text.at[b, : len(line)].set(line)
    return {
        "script": text,
        "right": jnp.broadcast_to(jnp.asarray(right, jnp.int32), (len(prompts),)),
        "vocab": jnp.int32(vocab),
    }
