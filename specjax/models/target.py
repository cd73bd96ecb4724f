"""The dense decoder family (Llama, Mistral, Qwen2, Qwen3, SmolLM2): one table, one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct

from specjax.models import rope
from specjax.models.layers import LayerConfig, decoder_layer, layer_table, rms_norm
from specjax.models.params import Param, Table
from specjax.models.visibility import visibility
from specjax.types import Array, KVCache, Params, Vocabulary

# Published defaults of a family for keys that its config.json may omit.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class TargetConfig:
    """Everything the forward pass of a target depends on."""

    family: str
    layers: LayerConfig
    vocab_size: int
    max_positions: int
    tied: bool


@struct.dataclass
class Output:
    """What a pass over N blocks of T rows returns."""

    hidden: Array  # [B, N, T, E] after the final norm
    features: Array  # [B, N, T, F]: tapped residual streams, concatenated in tap order
    k: tuple[Array, ...]  # L x [B, G, S, D]: the cache's keys with the new rows behind its length,
    v: tuple[Array, ...]  # L x [B, G, S, D]  or, without a cache, those of all rows of the pass


def config_from_hf(config: Mapping[str, Any]) -> TargetConfig:
    """Reads a published config.json.

    Raises:
      ValueError: an architecture, a key or a value that is not supported, by its name.
    """
    family = _family(config)
    get: Callable[..., Any] = {**FAMILIES[family], **config}.get
    _refuse(config)
    sizes = ("vocab_size", "hidden_size", "intermediate_size")
    for key in (*sizes, "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ValueError(
                f"config.json: {key} must be a positive integer, not {config.get(key)!r}"
            )
    heads = get("num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    head_dim = get("head_dim") or config["hidden_size"] // heads
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"config.json: {heads} heads over {kv_heads} key/value heads of {head_dim} channels: "
            "heads must be a multiple of key/value heads and head_dim even"
        )
    attention_bias = bool(get("attention_bias", False)) and family in ("llama", "qwen3")
    layers = LayerConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
        rope=rope.from_hf(config, default_theta=DEFAULT_THETA),
        windows=windows_from_hf(config, family),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
    )
    return TargetConfig(
        family=family,
        layers=layers,
        vocab_size=config["vocab_size"],
        max_positions=get("max_position_embeddings"),
        tied=bool(get("tie_word_embeddings", False)),
    )


def windows_from_hf(config: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """The attention window of every layer; None sees everything."""
    count = config["num_hidden_layers"]
    types = config.get("layer_types")
    if family == "llama":
        return (None,) * count
    window = config.get("sliding_window", 4096)  # the default of all three families
    if family == "mistral":
        if types is not None:
            raise ValueError("config.json: layer_types are not supported for Mistral")
        return (window,) * count
    if not config.get("use_sliding_window", False):
        window = None
    if types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(count))
    if len(types) != count:
        raise ValueError(f"config.json: {len(types)} layer_types for {count} layers")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"config.json: layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def table(config: TargetConfig) -> Table:
    """The parameter table under the published names."""
    V, E = config.vocab_size, config.layers.hidden_size
    tensors: Table = {
        "embed": Param((V, E), ("vocab", None), "normal", "model.embed_tokens.weight"),
        "layers": [
            layer_table(config.layers, f"model.layers.{i}.")
            for i in range(config.layers.num_layers)
        ],
        "norm": Param((E,), (None,), "ones", "model.norm.weight"),
    }
    if not config.tied:
        tensors["head"] = Param((V, E), ("vocab", None), "normal", "lm_head.weight")
    return tensors


def vocabulary(params: Params) -> Vocabulary:
    """Embedding and head, for drafters and for logits."""
    return Vocabulary(params["embed"], params["head"] if "head" in params else params["embed"])


def unembed(vocabulary: Vocabulary, hidden: Array) -> Array:
    """Logits [..., V] float32 of final hidden states [..., E]."""
    return jnp.einsum("...e,ve->...v", hidden, vocabulary.head, preferred_element_type=jnp.float32)


def forward(
    config: TargetConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    *,
    context: KVCache | None = None,
    context_end: Array | None = None,
    context_start: Array | None = None,
    tail_valid: Array | None = None,
    tail_allowed: Array | None = None,
    taps: Sequence[int] = (),
) -> Output:
    """Runs N blocks of T rows behind a shared context.

    Rows of a block see each other causally by position. With a cache as context (decoding) they
    also see its committed rows; without one the context is the pass's own earlier rows, which
    makes it a pass over packed documents in N chunks (or, with N = 1, over a whole text). With a
    cache and one block, the new rows are written behind the committed ones; they stay dead until
    `cache.commit`.

    Args:
      config: the target.
      params: its parameters.
      tokens: [B, N, T] int32.
      positions: [B, N, T] int32, within the row's document.
      context: committed keys and values.
      context_end: [B, N] int32, the first context row a block does not see; by default the
        length of the cache, or the block's own first row.
      context_start: [B, N] or [B, N, T] int32, the context row where a row's document begins.
      tail_valid: [B, N, T] bool, false for padding rows.
      tail_allowed: [B or 1, N or 1, T, T] bool, replaces "all earlier rows" by fewer, such as
        the ancestors in a tree.
      taps: layer ids; l is the residual stream after layer l (HF `hidden_states[l + 1]`).

    Raises:
      ValueError: a tap that is not a layer before the last one.
    """
    check_taps(taps, config.layers.num_layers)
    _, N, T = tokens.shape
    if context_end is None:
        own = jnp.arange(N, dtype=jnp.int32)[None] * T
        context_end = own if context is None else context.length[:, None]
        context_end = jnp.broadcast_to(context_end, tokens.shape[:2])
    seen = {
        window: visibility(
            positions,
            context_end,
            context_start=context_start,
            causal=True,
            window=window,
            tail_valid=tail_valid,
            tail_allowed=tail_allowed,
        )
        for window in dict.fromkeys(config.layers.windows)
    }
    rotation = rope.rotation(config.layers.rope, positions, config.layers.head_dim)
    x = params["embed"][tokens]
    keys, values, tapped = [], [], {}
    write_at = context.length if context is not None and N == 1 else None
    for i, layer in enumerate(params["layers"]):
        rows = None if context is None else (context.k[i], context.v[i])
        x, (k, v) = decoder_layer(
            config.layers,
            layer,
            x,
            rotation,
            rows,
            seen[config.layers.windows[i]],
            write_at=write_at,
        )
        keys.append(k)
        values.append(v)
        if i in taps:
            tapped[i] = x
    features = [tapped[tap] for tap in taps] or [x[..., :0]]
    return Output(
        hidden=rms_norm(x, params["norm"], config.layers.rms_norm_eps),
        features=jnp.concatenate(features, axis=-1),
        k=tuple(keys),
        v=tuple(values),
    )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises ValueError for ids that are repeated or not layers 0 .. num_layers - 2.

    The last layer is refused: published trainers store it after the final norm, others before,
    so that its id means different things.
    """
    wrong = [tap for tap in taps if not 0 <= tap < num_layers - 1]
    if wrong:
        raise ValueError(
            f"tap {wrong[0]} is not one of the layers 0 to {num_layers - 2} of the target "
            "(the last layer cannot be tapped)"
        )
    if len(set(taps)) != len(taps):
        raise ValueError(f"taps {list(taps)} name a layer twice")


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    known = f"supported: {', '.join(ARCHITECTURES)}"
    if names:
        if names[0] not in ARCHITECTURES:
            raise ValueError(f"architecture {names[0]!r} is not supported; {known}")
        return ARCHITECTURES[names[0]]
    if config.get("model_type") not in FAMILIES:
        raise ValueError(
            f"config.json names no architecture and model_type {config.get('model_type')!r} is "
            f"not supported; {known}"
        )
    return config["model_type"]


def _refuse(config: Mapping[str, Any]) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu", "swish"),
        "quantization_config": (None,),
        "compression_config": (None,),
        "logits_scaling": (None, 1, 1.0),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "embedding_multiplier": (None, 1, 1.0),
        "residual_multiplier": (None, 1, 1.0),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise ValueError(
                f"config.json: {key} = {config[key]!r} is not supported"
                + ("; load an unquantised checkpoint" if "_config" in key else "")
            )
