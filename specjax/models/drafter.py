"""The block-diffusion backbone (DFlash, arXiv 2602.06036): one pass drafts a whole block.

A block is the anchor token followed by mask tokens. Its rows attend to each other and to the
context: fused target features of committed rows, which every layer turns into keys and values by
its own projections. Context rows have no queries and never pass through a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from specjax.models import rope, target
from specjax.models.layers import LayerConfig, decoder_layer, keys_values, layer_table, rms_norm
from specjax.models.params import Param, Table, matrix
from specjax.models.visibility import Visibility, visibility
from specjax.types import Array, Block, KVCache, Params, Reuse, Vocabulary

# fill: slot j predicts the token at its own position; slot 0 is the anchor and predicts nothing.
# next: slot j predicts the token behind its position; the anchor's slot predicts too.
Layout = Literal["fill", "next"]


@dataclass(frozen=True)
class DrafterConfig:
    """Everything the forward pass of a drafter depends on.

    Attributes:
      layers: shapes and windows of its layers.
      causal: per layer, whether block rows see later rows of their block.
      taps: target layers whose outputs are fused, in concatenation order.
      mask_token_id: the token of an open slot, a row of the target's embedding.
      block_size: rows of a block, the anchor included.
      layout: which position a slot predicts; see `Layout`.
      target_hidden_size: width of one tapped state.
      vocab_size: rows of the target's embedding and head.
      draft_vocab_size: rows of the drafter's own reduced head, or None: the target's head.
      max_positions: positions the drafter was made for.
      num_target_layers: layers of the target it belongs to, or None where unrecorded.
      embedding_scale: multiplies token embeddings.
      output_multiplier: multiplies logits, before the cap.
      logit_softcap: c in c * tanh(logits / c), or None.
      template: fingerprint of the chat template and thinking flag it was trained with, or None.
      reuse: the method of reusing rejected states that it was trained with, or None.
      verification_head: whether it tells how sure it is of its slots; see `confidence`.
    """

    layers: LayerConfig
    causal: tuple[bool, ...]
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int
    layout: Layout
    target_hidden_size: int
    vocab_size: int
    max_positions: int
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    template: str | None = None
    reuse: Reuse | None = None
    verification_head: bool = False

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a draft token."""
        return 1 if self.layout == "fill" else 0

    @property
    def num_drafts(self) -> int:
        """Draft tokens of one block: its slots less the anchor's where that predicts nothing."""
        return self.block_size - self.first_slot

    def check_num_draft(self, num_draft: int) -> int:
        """Returns `num_draft`; a full block is always drafted and its first tokens verified.

        Raises:
          ValueError: not between 1 and what the trained block holds: a longer block would show
            every slot more masks than it was trained with, and collapses all of them.
        """
        if not 1 <= num_draft <= self.num_drafts:
            raise ValueError(
                f"num_draft {num_draft} is not between 1 and {self.num_drafts}, the drafts of the "
                f"trained block of {self.block_size} (layout {self.layout!r})"
            )
        return num_draft


def table(config: DrafterConfig) -> Table:
    """The parameter table under the published names; no embedding, no head but a reduced one."""
    E = config.layers.hidden_size
    F = len(config.taps) * config.target_hidden_size
    tensors: Table = {
        "fc": matrix(F, E, "fc.weight"),
        "hidden_norm": Param((E,), (None,), "ones", "hidden_norm.weight"),
        "layers": [
            layer_table(config.layers, f"layers.{i}.") for i in range(config.layers.num_layers)
        ],
        "norm": Param((E,), (None,), "ones", "norm.weight"),
    }
    if config.draft_vocab_size is not None:
        tensors["head"] = Param(
            (config.draft_vocab_size, E), (None, None), "normal", "lm_head.weight"
        )
    if config.reuse is not None:
        tensors["reuse"] = config.reuse.table(config)
    if config.verification_head:
        tensors["verification_head"] = {
            "weight": Param((E,), (None,), "zeros", "verification_head.weight"),
            "bias": Param((1,), (None,), "zeros", "verification_head.bias"),
        }
    return tensors


def draft_block(config: DrafterConfig, anchor: Array, position: Array) -> Block:
    """The block behind `anchor` [B] at `position` [B]: the anchor, then masks.

    Its context is every row strictly before the anchor, whose own feature does not exist yet.
    """
    slots = jnp.arange(config.block_size, dtype=jnp.int32)[None, None, :]
    tokens = jnp.where(slots == 0, anchor[:, None, None], config.mask_token_id)
    return Block(tokens, position[:, None, None] + slots, position[:, None])


def fuse(config: DrafterConfig, params: Params, features: Array) -> Array:
    """Target features [..., F] to context states [..., E]: project, then normalise."""
    fused = jnp.einsum("...f,fe->...e", features, params["fc"])
    return rms_norm(fused, params["hidden_norm"], config.layers.rms_norm_eps)


def context_rows(
    config: DrafterConfig, params: Params, fused: Array, positions: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Keys and values of context rows in every layer.

    Args:
      config: the drafter.
      params: its parameters.
      fused: [..., E] from `fuse`.
      positions: [...] int32.

    Returns:
      L keys and L values, each [..., G, D].
    """
    rotation = rope.rotation(config.layers.rope, positions, config.layers.head_dim)
    rows = [
        keys_values(config.layers, layer["attention"], fused, *rotation)
        for layer in params["layers"]
    ]
    return tuple(k for k, _ in rows), tuple(v for _, v in rows)


def forward(
    config: DrafterConfig, params: Params, vocabulary: Vocabulary, block: Block, context: KVCache
) -> Array:
    """One drafter pass over N blocks.

    Args:
      config: the drafter.
      params: its parameters.
      vocabulary: the target's embedding.
      block: tokens, positions and what each block sees.
      context: keys and values of context rows per layer; `block.context_end` bounds them.

    Returns:
      Hidden states [B, N, T, E] after the final norm.
    """
    x = vocabulary.embedding[block.tokens]
    if config.embedding_scale != 1.0:
        x = x * config.embedding_scale
    if block.delta is not None:
        x = x + block.delta
    seen = {kind: _seen(block, *kind) for kind in dict.fromkeys(_kinds(config))}
    rotation = rope.rotation(config.layers.rope, block.positions, config.layers.head_dim)
    carried = None if block.carried is None else _carried_rows(config, params, block)
    for i, (layer, kind) in enumerate(zip(params["layers"], _kinds(config), strict=True)):
        x, _ = decoder_layer(
            config.layers,
            layer,
            x,
            rotation,
            (context.k[i], context.v[i]),
            seen[kind],
            None if carried is None else (carried[0][i], carried[1][i]),
        )
    return rms_norm(x, params["norm"], config.layers.rms_norm_eps)


def unembed(config: DrafterConfig, params: Params, vocabulary: Vocabulary, hidden: Array) -> Array:
    """Logits float32 over the target's vocabulary, or over the drafter's own reduced one.

    Map ids of a reduced vocabulary with `target_ids`.
    """
    head = params.get("head", vocabulary.head)
    logits = target.unembed(replace(vocabulary, head=head), hidden) * config.output_multiplier
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits


def confidence(params: Params, hidden: Array) -> Array:
    """How likely verification is to accept a slot and all before it: logits [..., K] float32 of
    final hidden states [..., K, E] (the verification head of VAT, arXiv 2608.30135)."""
    head = params["verification_head"]
    logits = jnp.einsum("...e,e->...", hidden, head["weight"]) + head["bias"][0]
    return logits.astype(jnp.float32)


def restrict(params: Params, vocabulary: Vocabulary, ids: Array) -> Params:
    """The drafter proposing the tokens `ids` [n] only, through their rows of the target's head;
    `ids` ascend.

    Most of a small drafter's round is the product with a large vocabulary's head; tokens that its
    training text does not hold are hardly ever accepted.
    """
    return params | {"head": vocabulary.head[ids], "target_ids": ids}


def unrestricted(config: DrafterConfig, params: Params) -> Params:
    """The parameters of the drafter's own, as its table has them."""
    borrowed = {"target_ids"} if config.draft_vocab_size is not None else {"target_ids", "head"}
    return {name: value for name, value in params.items() if name not in borrowed}


def target_ids(params: Params, ids: Array) -> Array:
    """Ids of the drafter's vocabulary as ids of the target's."""
    return params["target_ids"][ids] if "target_ids" in params else ids


def target_logits(params: Params, vocabulary: Vocabulary, logits: Array) -> Array:
    """Logits over the drafter's vocabulary as logits [..., V] over the target's: what a reduced
    vocabulary lacks is impossible."""
    if "target_ids" not in params:
        return logits
    words = vocabulary.embedding.shape[0]
    nowhere = jnp.full((*logits.shape[:-1], words), -jnp.inf, logits.dtype)
    return nowhere.at[..., params["target_ids"]].set(logits)


def _kinds(config: DrafterConfig) -> list[tuple[int | None, bool]]:
    return list(zip(config.layers.windows, config.causal, strict=True))


def _seen(block: Block, window: int | None, causal: bool) -> Visibility:
    if block.carried is None:
        return visibility(
            block.positions,
            block.context_end,
            context_start=block.context_start,
            causal=causal,
            window=window,
        )
    carried = block.carried
    own = jnp.ones(block.positions.shape, bool)
    return visibility(
        block.positions,
        block.context_end,
        context_start=block.context_start,
        causal=causal,
        window=window,
        tail_positions=jnp.concatenate([carried.positions, block.positions], axis=2),
        tail_valid=jnp.concatenate([carried.valid, own], axis=2),
    )


def _carried_rows(
    config: DrafterConfig, params: Params, block: Block
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    assert block.carried is not None
    fused = fuse(config, params, block.carried.features)
    if block.carried.offset is not None:
        fused = fused + block.carried.offset[None, None, None, :]
    return context_rows(config, params, fused, block.carried.positions)
