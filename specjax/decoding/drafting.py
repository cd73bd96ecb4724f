"""Drafters as the loop sees them: the block-diffusion backbone, prompt lookup, and none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.decoding.merging import merge
from specjax.decoding.sampling import argmax, choose, law, position_noise
from specjax.models import cache
from specjax.models import drafter as backbone
from specjax.models.drafter import DrafterConfig
from specjax.models.layers import empty_cache
from specjax.models.reuse import ReAnchor
from specjax.types import Array, KVCache, Params, Proposal, Rejected, Reuse, Sampling, Vocabulary


@dataclass(frozen=True)
class Plain:
    """No drafter: every round is one token of the target. The baseline of every speed-up."""

    num_draft = 0
    taps: ClassVar[tuple[int, ...]] = ()
    keeps: ClassVar[frozenset[str]] = frozenset()
    hands_law: ClassVar[bool] = False

    def init(self, batch: int, capacity: int, dtype: Any) -> Any:
        """No state."""
        return ()

    def extend(
        self, params: Params, draft: Any, features: Array, positions: Array, count: Array
    ) -> Any:
        """Reads nothing."""
        return draft

    def propose(
        self,
        params: Params,
        vocabulary: Vocabulary,
        draft: Any,
        tokens: Array,
        length: Array,
        rejected: Rejected,
        key: Array,
        sampling: Sampling,
    ) -> tuple[Proposal, Any]:
        """Proposes nothing."""
        empty = jnp.zeros((tokens.shape[0], 0), jnp.int32)
        return Proposal(empty, jnp.zeros_like(length)), draft


@dataclass(frozen=True)
class NGram(Plain):
    """Prompt lookup: proposes what followed the last tokens the time before.

    Attributes:
      num_draft: most tokens of a proposal.
      longest: length of the longest suffix that is looked up; shorter ones follow.
    """

    num_draft: int = 7
    longest: int = 3

    def __post_init__(self) -> None:
        if self.num_draft < 1 or self.longest < 1:
            raise ValueError(f"{self}: both numbers must be at least 1")

    def propose(
        self,
        params: Params,
        vocabulary: Vocabulary,
        draft: Any,
        tokens: Array,
        length: Array,
        rejected: Rejected,
        key: Array,
        sampling: Sampling,
    ) -> tuple[Proposal, Any]:
        """The continuation of the latest earlier occurrence of the longest known suffix."""
        row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        last = length[:, None] - 1
        same = row < last
        found = jnp.full_like(length, -1)
        for n in range(self.longest):  # `same`: the n + 1 tokens up to here equal the suffix
            suffix = jnp.take_along_axis(tokens, jnp.maximum(last - n, 0), axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (n, 0)), constant_values=-1)[:, : tokens.shape[1]]
            same = same & (shifted == suffix) & (last >= n)
            latest = jnp.max(jnp.where(same, row, -1), axis=1)
            found = jnp.where(latest >= 0, latest, found)
        following = found[:, None] + 1 + jnp.arange(self.num_draft, dtype=jnp.int32)[None]
        proposed = jnp.take_along_axis(tokens, following, axis=1, mode="clip")
        count = jnp.where(found >= 0, jnp.minimum(self.num_draft, length - 1 - found), 0)
        return Proposal(proposed, count), draft


@dataclass(frozen=True)
class DFlash:
    """The block-diffusion backbone, every slot decided by itself.

    Attributes:
      config: the network.
      num_draft: drafts sent to verification; the block itself always has its trained size.
      reuse: what it does with the rows that the round before rejected, or None.
      stop_below: proposes nothing from the first slot on that its verification head gives a lower
        probability; 0 proposes all. The head sees states and no drawn token, so that every rule
        stays exact.
    """

    config: DrafterConfig
    num_draft: int
    reuse: Reuse | None = None
    stop_below: float = 0.0
    hands_law: ClassVar[bool] = True  # of the drafts that it draws: `verify="auto"` asks for it

    def __post_init__(self) -> None:
        if isinstance(self.reuse, ReAnchor):
            self.reuse.check_num_draft(self.config, self.num_draft)
        else:
            self.config.check_num_draft(self.num_draft)
        if not 0 <= self.stop_below < 1:
            raise ValueError(f"stop_below must be at least 0 and below 1, not {self.stop_below}")
        able = self.config.verification_head and not isinstance(self.reuse, ReAnchor)
        if self.stop_below and not able:
            raise ValueError(
                "stop_below needs a drafter with a verification head (trained with "
                "objective.verification), and drafts of one block: not reuse='reanchor'"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers it reads."""
        return self.config.taps

    @property
    def keeps(self) -> frozenset[str]:
        """The rejected states that it reads."""
        return frozenset() if self.reuse is None else self.reuse.keeps

    def init(self, batch: int, capacity: int, dtype: Any) -> KVCache:
        """An empty context."""
        return empty_cache(self.config.layers, batch, capacity, dtype)

    def extend(
        self, params: Params, draft: KVCache, features: Array, positions: Array, count: Array
    ) -> KVCache:
        """Fuses committed rows and keeps their keys and values; rows past `count` stay dead."""
        fused = backbone.fuse(self.config, params, features)
        k, v = backbone.context_rows(self.config, params, fused, positions)
        return cache.append(draft, k, v, count)

    def propose(
        self,
        params: Params,
        vocabulary: Vocabulary,
        draft: KVCache,
        tokens: Array,
        length: Array,
        rejected: Rejected,
        key: Array,
        sampling: Sampling,
    ) -> tuple[Proposal, KVCache]:
        """One pass over the block behind the anchor; its first `num_draft` predictions."""
        config, position = self.config, length - 1
        anchor = jnp.take_along_axis(tokens, position[:, None], axis=1)[:, 0]
        block = backbone.draft_block(config, anchor, position)
        reuse = self.reuse
        if isinstance(reuse, ReAnchor):  # a block whose anchor ends the chain adds nothing to it
            reuse = replace(reuse, shifts=tuple(s for s in reuse.shifts if s < self.num_draft))
        if reuse is not None:
            block = reuse.inject(config, params, vocabulary, rejected, block)
        hidden = backbone.forward(config, params, vocabulary, block, draft)
        hidden = hidden[:, :, config.first_slot :][:, :, : self.num_draft]  # [B, N, D, E]
        if isinstance(reuse, ReAnchor):
            logits = backbone.unembed(config, params, vocabulary, hidden)
            logits = backbone.target_logits(params, vocabulary, logits)
            noise = self._noise(sampling, key, position, logits.shape[-1])
            return merge(block, logits, reuse, rejected, self.num_draft, sampling, noise), draft
        hidden = hidden[:, 0]
        logits = backbone.unembed(config, params, vocabulary, hidden)  # [B, K, V]
        count = jnp.full_like(length, self.num_draft)
        if self.stop_below:
            sure = jax.nn.sigmoid(backbone.confidence(params, hidden)) >= self.stop_below
            count = jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=1), axis=1)
        kept = hidden if "draft_hidden" in self.keeps else None
        if sampling.drafting == "greedy":
            ids = backbone.target_ids(params, argmax(logits))
            return Proposal(ids, count, hidden=kept), draft
        logits = backbone.target_logits(params, vocabulary, logits)
        noise = self._noise(sampling, key, position, logits.shape[-1])
        drawn = choose(logits, sampling, noise)
        # Coupled drafts are verified by equality, which needs no law.
        q = None if sampling.drafting == "coupled" else law(logits, sampling)
        return Proposal(drawn, count, q, hidden=kept), draft

    def _noise(self, sampling: Sampling, key: Array, position: Array, vocab: int) -> Array | None:
        """Gumbel noise [B, K, V]: the target's own by position, or of the round's draft stream."""
        if sampling.drafting == "greedy":
            return None
        if sampling.drafting == "coupled":
            rows = position[:, None] + 1 + jnp.arange(self.num_draft + 1, dtype=jnp.int32)[None]
            return position_noise(key, rows, vocab)[:, : self.num_draft]  # as the verifier's call
        draw = jax.vmap(lambda k: jax.random.gumbel(k, (self.num_draft, vocab), jnp.float32))
        return draw(key)
