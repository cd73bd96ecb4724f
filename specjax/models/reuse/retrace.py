"""ReTrace: a memory of the old draft and of the state that scored it (arXiv 2608.29748).

The slot that predicts position p remembers the drafter's own final state for p in the round
before, and the target's final state at p - 1, which scored that draft. The first rejected draft is
not remembered: the target has replaced it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.models.params import Table, matrix
from specjax.models.reuse.slots import into_slots
from specjax.types import Block, Params, Rejected, Vocabulary


@dataclass(frozen=True)
class ReTrace:
    """A gated residual on mask slots: e + (W_v r) * sigmoid(W_g [e; r]), r = m + W_c [m; u].

    In training W_c may grow from nothing to what it is (the paper's beta).
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"draft_hidden", "final_hidden"})
    grows: ClassVar[frozenset[str]] = frozenset({"fuse"})

    def table(self, config: Any) -> Table:
        """W_c, W_g and W_v; the last is zero at first, which is plain DFlash."""
        E = config.layers.hidden_size
        return {
            "fuse": matrix(2 * E, E, "reuse.fuse.weight"),
            "gate": matrix(2 * E, E, "reuse.gate.weight"),
            "value": matrix(E, E, "reuse.value.weight", init="zeros"),
        }

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """Adds the memory to the mask slots of a single block per batch row."""
        own = params["reuse"]
        memory = rejected.draft_hidden[:, 1:]  # of positions a' + 1 and on
        scored = rejected.final_hidden[:, : memory.shape[1]]  # at the position before
        joint = jnp.concatenate([memory, scored], axis=-1)
        fused = memory + jnp.einsum("bki,io->bko", joint, own["fuse"])
        mask = vocabulary.embedding[config.mask_token_id] * config.embedding_scale
        mask = jnp.broadcast_to(mask[None, None, :].astype(fused.dtype), fused.shape)
        gate = jnp.einsum("bki,io->bko", jnp.concatenate([mask, fused], -1), own["gate"])
        value = jnp.einsum("bki,io->bko", fused, own["value"])
        delta = into_slots(config, value * jax.nn.sigmoid(gate), rejected.count - 1)
        return replace(block, delta=delta)
