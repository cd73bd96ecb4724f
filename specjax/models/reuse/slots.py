"""Where states of rejected rows enter the slots of the next block."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.types import Array


def into_slots(config: Any, values: Array, count: Array) -> Array:
    """Deltas [B, 1, T, E] for the slots that predict positions a' + 1, a' + 2, ..., in order.

    Entry j - 1 of values [B, n, E] is for the slot that predicts position a' + j, the first `count`
    [B] of them are real, and the other slots get zero. The anchor's row is no mask and never gets
    anything: where it predicts too (layout "next"), the entry of a' + 1 has no place.
    """
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    real = (index < count[:, None]) & (index + config.first_slot > 0)
    values = jnp.where(real[..., None], values, 0)
    room = max(0, config.num_drafts - values.shape[1])
    values = jnp.pad(values, ((0, 0), (config.first_slot, room), (0, 0)))
    return values[:, None, : config.block_size]
