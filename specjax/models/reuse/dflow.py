"""DFlow: the state of a rejected row enters the slot that it predicts (arXiv 2609.06498).

The target's fused state at position p goes into the mask slot that predicts p + 1. A small network
reads the new anchor, the first rejected token and the state, and modulates: the two tokens tell it
how far the stale prefix is from the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.models.drafter import fuse
from specjax.models.layers import linear
from specjax.models.params import Param, Table, matrix
from specjax.models.reuse.slots import into_slots
from specjax.types import Array, Block, Params, Rejected, Vocabulary


@dataclass(frozen=True)
class DFlow:
    """Modulated input embeddings: mask + beta * LayerNorm(state) + gamma."""

    keeps: ClassVar[frozenset[str]] = frozenset({"features"})

    def table(self, config: Any) -> Table:
        """The network; its last projection is zero at first, which is plain DFlash."""
        E = config.layers.hidden_size

        def dense(name: str, outputs: int, inputs: int, init: str) -> Table:
            return {
                "weight": matrix(inputs, outputs, f"reuse.{name}.weight", init=init),
                "bias": Param((outputs,), (None,), "zeros", f"reuse.{name}.bias"),
            }

        return {
            "norm": {
                "weight": Param((E,), (None,), "ones", "reuse.norm.weight"),
                "bias": Param((E,), (None,), "zeros", "reuse.norm.bias"),
            },
            "inner": dense("inner", 2 * E, 3 * E, "normal"),
            "outer": dense("outer", 2 * E, 2 * E, "zeros"),
        }

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """Adds what the rejected rows know to the mask slots of a single block per batch row."""
        own = params["reuse"]
        state = fuse(config, params, rejected.features)  # [B, K, E]
        pair = jnp.concatenate([block.tokens[:, 0, :1], rejected.tokens[:, :1]], axis=1)
        words = vocabulary.embedding[pair] * config.embedding_scale
        words = jnp.broadcast_to(
            words.reshape(words.shape[0], 1, -1), (*state.shape[:2], 2 * state.shape[2])
        )
        joint = jnp.concatenate([words.astype(state.dtype), state], axis=-1)
        change = linear(jax.nn.silu(linear(joint, own["inner"])), own["outer"])
        beta, gamma = jnp.split(change, 2, axis=-1)
        values = beta * _layer_norm(state, own["norm"]) + gamma
        return replace(block, delta=into_slots(config, values, rejected.count))


def _layer_norm(x: Array, params: Params, eps: float = 1e-5) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return normed * params["weight"][None, None, :] + params["bias"][None, None, :]
