"""Attention problems as the passes of a model make them, for tuning and benchmarks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Problem(NamedTuple):
    """Shapes of `block_attention`, and how much of the context is used."""

    name: str
    batch: int
    blocks: int
    rows: int
    heads: int
    kv_heads: int
    capacity: int
    tail: int
    dim: int
    used: float  # of the capacity, by the row that sees the most
    training: bool  # anchors spread over the context, instead of ranges that end near `used`

    def arguments(self, dtype: Any, seed: int = 0) -> tuple[jax.Array, ...]:
        """Random arrays in the order of `block_attention`."""
        B, N, T, H, G, S, R, D = self[1:9]
        keys = iter(jax.random.split(jax.random.key(seed), 5))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

        rng, most = np.random.default_rng(seed), max(1, int(self.used * S))
        if self.training:
            end = np.sort(rng.integers(0, most + 1, (B, N, 1)), axis=1)
        else:
            end = np.broadcast_to(rng.integers(most - most // 8, most + 1, (B, 1, 1)), (B, N, 1))
        return (
            normal(B, N, T, H, D),
            normal(B, G, S, D),
            normal(B, G, S, D),
            jnp.zeros((B, N, 1), jnp.int32),
            jnp.asarray(end, jnp.int32),
            normal(B, N, R, G, D),
            normal(B, N, R, G, D),
            jnp.ones((1, 1, T, R), bool),
        )


PROBLEMS = (
    #       name                   B    N   T   H  G     S   R    D  used  training
    Problem("plain step 1k", 8, 1, 1, 32, 8, 1024, 1, 128, 1.0, False),
    Problem("verify 8 at 1k", 8, 1, 8, 32, 8, 1024, 8, 128, 1.0, False),
    Problem("verify 16 at 8k", 8, 1, 16, 32, 8, 8192, 16, 128, 1.0, False),
    Problem("verify 16 at 2k of 8k", 8, 1, 16, 32, 8, 8192, 16, 128, 0.25, False),
    Problem("verify 16 at 32k, batch 1", 1, 1, 16, 32, 8, 32768, 16, 128, 1.0, False),
    Problem("SmolLM2 verify 8 at 1k", 1, 1, 8, 9, 3, 1024, 8, 64, 1.0, False),
    Problem("SmolLM2 train 32 x 8", 4, 32, 8, 9, 3, 352, 8, 64, 1.0, True),
    Problem("train 256 x 16 at 4k", 2, 256, 16, 32, 8, 4096, 16, 128, 1.0, True),
)
