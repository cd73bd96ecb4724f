"""Training blocks: where they start, what they read, what they must say.

A block starts at an anchor of a recorded answer and sees exactly what a round of decoding sees
there: the target's states strictly before the anchor, of the anchor's own document, and itself.
All blocks of a batch are one packed pass of the drafter, N = A.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import drafter
from specjax.models.drafter import DrafterConfig
from specjax.models.layers import as_context
from specjax.training.packing import Batch
from specjax.types import Array, Block, KVCache, Params, Vocabulary


class Anchors(NamedTuple):
    """Rows where blocks start, ascending; those that are not valid come first and stand at 0."""

    at: Array  # [B, A] int32, row of the batch
    valid: Array  # [B, A] bool


class Labels(NamedTuple):
    """The recorded tokens that the slots of every block have to predict."""

    tokens: Array  # [B, A, K] int32
    mask: Array  # [B, A, K] bool: the first so many slots of a block
    at: Array  # [B, A, K] int32, row of the label; the target predicts it at the row before


def draw_anchors(key: Array, batch: Batch, count: int) -> Anchors:
    """Draws anchors uniformly, without replacement, among rows that have something to predict.

    An anchor is a supervised row whose next row is a supervised one of the same document, so that
    every valid block has at least one label. A batch row with too few of them gets blocks that are
    not valid.

    Args:
      key: a PRNG key; every row of the batch draws its own.
      batch: packed documents.
      count: A, anchors per row.

    Raises:
      ValueError: `count` is not between 1 and the length of a row.
    """
    rows = batch.tokens.shape[1]
    if not 1 <= count <= rows:
        raise ValueError(f"{count} anchors do not fit into a row of {rows} tokens: lower anchors")
    follows = (
        batch.supervised[:, :-1]
        & batch.supervised[:, 1:]
        & (batch.document[:, :-1] == batch.document[:, 1:])
    )
    draw = jax.random.uniform(key, batch.tokens.shape)  # in [0, 1): what cannot be drawn is below
    draw = jnp.where(jnp.pad(follows, ((0, 0), (0, 1))), draw, -1.0)
    highest, at = jax.lax.top_k(draw, count)
    at = jnp.sort(jnp.where(highest >= 0, at, -1), axis=1)
    return Anchors(jnp.maximum(at, 0), at >= 0)


def block_inputs(config: DrafterConfig, batch: Batch, anchors: Anchors) -> Block:
    """The blocks of a packed pass: what `drafter.draft_block` gives a round, for every anchor.

    Positions are those within the document, and the visible context begins at its first row.
    """
    shape = (*anchors.at.shape, config.block_size)
    block = drafter.draft_block(
        config,
        pick(batch.tokens, anchors.at).reshape(-1),
        pick(batch.positions, anchors.at).reshape(-1),
    )
    return Block(
        tokens=block.tokens.reshape(shape),
        positions=block.positions.reshape(shape),
        context_end=anchors.at,
        context_start=pick(batch.start, anchors.at),
    )


def block_labels(config: DrafterConfig, batch: Batch, anchors: Anchors) -> Labels:
    """The K tokens behind every anchor, in both layouts.

    They end with the document, with its answer and with the row; blocks that are not valid have
    none. `at` of what is masked lies anywhere in the row.
    """
    last = batch.tokens.shape[1] - 1
    steps = jnp.arange(1, config.num_drafts + 1, dtype=jnp.int32)[None, None, :]
    at = anchors.at[:, :, None] + steps
    inside = at <= last
    at = jnp.minimum(at, last)
    same = pick(batch.document, at) == pick(batch.document, anchors.at)[:, :, None]
    good = inside & same & pick(batch.supervised, at) & anchors.valid[:, :, None]
    return Labels(pick(batch.tokens, at), jnp.cumsum(~good, axis=2) == 0, at)


def context(config: DrafterConfig, params: Params, features: Array, positions: Array) -> KVCache:
    """Keys and values of all rows of a batch, as the context of its blocks.

    Args:
      config: the drafter.
      params: its parameters.
      features: [B, S, F], cast to the dtype of the parameters.
      positions: [B, S] int32, within the document.
    """
    fused = drafter.fuse(config, params, features.astype(params["fc"].dtype))
    k, v = drafter.context_rows(config, params, fused, positions)  # L x [B, S, G, D]
    rows = jnp.full(positions.shape[:1], positions.shape[1], jnp.int32)
    return KVCache(
        tuple(as_context(x[:, None]) for x in k), tuple(as_context(x[:, None]) for x in v), rows
    )


def hidden(
    config: DrafterConfig,
    params: Params,
    vocabulary: Vocabulary,
    batch: Batch,
    features: Array,
    anchors: Anchors,
) -> Array:
    """One packed drafter pass: final hidden states [B, A, K, E] of the slots that predict.

    Slot k of a block stands for the token k + 1 behind its anchor, as in a round of decoding.
    The target is frozen: no gradient goes into `features` or `vocabulary`.

    Args:
      config: the drafter.
      params: its parameters.
      vocabulary: the target's embedding, in the dtype of the parameters.
      batch: packed documents.
      features: [B, S, F] of the target.
      anchors: where the blocks start.
    """
    vocabulary, features = jax.lax.stop_gradient((vocabulary, features))
    rows = context(config, params, features, batch.positions)
    blocks = block_inputs(config, batch, anchors)
    return drafter.forward(config, params, vocabulary, blocks, rows)[:, :, config.first_slot :]


def target_rows(final_hidden: Array, labels: Labels) -> Array:
    """The target's states [B, S, E] that predict each label, [B, A, K, E]: of the row before it."""
    return pick(final_hidden, labels.at - 1)


def pick(values: Array, rows: Array) -> Array:
    """values [B, S, ...] at rows [B, ...] of the same batch row."""
    return jax.vmap(lambda of_row, index: of_row[index])(jnp.asarray(values), rows)
