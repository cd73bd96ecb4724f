"""The drafter that a config asks for: its network for a target, with a method of reuse in it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import jax

from specjax.models import drafter as backbone
from specjax.models.drafter import DrafterConfig
from specjax.models.drafter_hf import check_config
from specjax.models.hub import Target
from specjax.models.layers import LayerConfig
from specjax.models.params import init
from specjax.models.target import check_taps
from specjax.models.text import template_fingerprint
from specjax.training.config import Shape, TrainConfig
from specjax.types import Params


def drafter_config(shape: Shape, target: Target) -> DrafterConfig:
    """The network that `shape` describes, for this target.

    Raises:
      ValueError: taps or a mask token that the target does not have, or sizes that do not fit
        together with its own.
    """
    model, own = target.config.layers, dataclasses.asdict(shape)
    try:
        check_taps(shape.taps, model.num_layers)
    except ValueError as error:
        raise ValueError(f"drafter.taps: {error}") from None
    if not shape.taps:
        raise ValueError("drafter.taps is empty: a drafter reads at least one target layer")
    if not 0 <= shape.mask_token_id < target.config.vocab_size:
        raise ValueError(
            f"drafter.mask_token_id {shape.mask_token_id} is not a token of {target.name} "
            f"(0 to {target.config.vocab_size - 1})"
        )
    sizes = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    layers = LayerConfig(
        hidden_size=model.hidden_size,
        rms_norm_eps=model.rms_norm_eps,
        rope=model.rope,
        windows=(None,) * shape.layers,
        qk_norm=True,
        **{name: getattr(model, name) if own[name] is None else own[name] for name in sizes},
    )
    chats = target.has_tokenizer and target.tokenizer.chat_template
    made = DrafterConfig(
        layers=layers,
        causal=(False,) * shape.layers,
        taps=shape.taps,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        layout=shape.layout,
        target_hidden_size=model.hidden_size,
        vocab_size=target.config.vocab_size,
        max_positions=target.config.max_positions,
        num_target_layers=model.num_layers,
        template=template_fingerprint(target.tokenizer) if chats else None,
    )
    try:
        check_config(made)
    except ValueError as error:
        raise ValueError(f"drafter: {error}") from None
    return made


def extended(
    config: TrainConfig, network: DrafterConfig, start: Params | None
) -> tuple[DrafterConfig, Params | None]:
    """The network with what else is trained, a method of reuse and a verification head; fresh
    weights where `start` has none of it."""
    if config.reuse is not None:
        method = config.reuse.made
        if network.reuse not in (None, method):
            raise ValueError(f"init_from was trained with {network.reuse}, not with {method}")
        if start is not None and network.reuse is None:
            start = start | {"reuse": init(method.table(network), jax.random.key(config.seed))}
        network = replace(network, reuse=method)
    if config.objective.verification:
        network = replace(network, verification_head=True)
        if start is not None and "verification_head" not in start:
            head = backbone.table(network)["verification_head"]
            start = start | {"verification_head": init(head, jax.random.key(config.seed))}
    return network, start
