"""Published drafter layouts, read and written: z-lab, DeepSpec and speculators.

The layouts disagree about names, about which position a slot predicts and about how a tapped
layer is counted. All of it is settled here; nothing that matters is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.models import reuse, rope
from specjax.models.drafter import DrafterConfig, Layout
from specjax.models.layers import LayerConfig
from specjax.models.rope import Rope

NEXT_ARCHITECTURES = ("Qwen3DSparkModel",)  # DeepSpec: the anchor's slot predicts too
FILL_ARCHITECTURES = ("DFlashDraftModel",)
# Frozen copies of target tensors that DeepSpec and speculators files carry.
TARGET_COPIES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "verifier_lm_head.weight": "head",
}
SPECULATORS_VERSION = "0.9.0"  # the release whose format `config_to_speculators` writes


def config_from_hf(config: Mapping[str, Any], *, layout: Layout | None = None) -> DrafterConfig:
    """Reads the config.json of a drafter.

    A key at the top level wins over the same key under `dflash_config`. The layout is, in this
    order: the argument, the flag `sample_from_anchor`, the architecture.

    Raises:
      ValueError: a missing key, or an architecture, key or value that is not supported, by name.
    """
    if config.get("speculators_model_type") is not None:
        config = _from_speculators(config)
    top = {key: value for key, value in config.items() if value is not None}
    merged = {**(config.get("dflash_config") or {}), **top}
    _refuse(merged)
    layers, causal = _layers(merged)
    taps = _required(merged, "target_layer_ids", "dflash_config.target_layer_ids")
    own = merged.get("specjax") or {}
    parsed = DrafterConfig(
        layers=layers,
        causal=causal,
        taps=tuple(int(tap) for tap in taps),
        mask_token_id=_required(merged, "mask_token_id", "dflash_config.mask_token_id"),
        block_size=_required(merged, "block_size", "block_size (or dflash_config.block_size)"),
        layout=layout or _layout(merged),
        target_hidden_size=merged.get("target_hidden_size") or layers.hidden_size,
        vocab_size=_required(merged, "vocab_size", "vocab_size"),
        max_positions=merged.get("max_position_embeddings") or 32768,
        draft_vocab_size=merged.get("draft_vocab_size"),
        num_target_layers=merged.get("num_target_layers"),
        embedding_scale=float(merged.get("input_embedding_scale") or 1.0),
        output_multiplier=float(merged.get("output_multiplier") or 1.0),
        logit_softcap=merged.get("final_logit_softcapping") or None,
        template=own.get("template"),
        reuse=reuse.from_json(own["reuse"]) if own.get("reuse") else None,
        verification_head=bool(own.get("verification_head")),
    )
    check_config(parsed)
    return parsed


def config_to_hf(config: DrafterConfig) -> dict[str, Any]:
    """The config.json of a drafter: z-lab's layout, or DeepSpec's when the anchor's slot predicts.

    Either way the file says which position a slot predicts (`sample_from_anchor`).

    Raises:
      ValueError: a reduced vocabulary, which neither layout can hold.
    """
    if config.draft_vocab_size is not None:
        raise ValueError("a drafter with a reduced vocabulary cannot be written in this layout")
    own = {
        "target_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
    }
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if config.layout == "fill" else "Qwen3DSparkModel"],
        "block_size": config.block_size,
        "sample_from_anchor": config.layout == "next",
        **_layers_to_hf(config),
    }
    if config.layout == "fill":
        written |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dflash_config": own}
    else:
        written |= {**own, "markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
    default = tuple(window is not None for window in config.layers.windows)
    if config.causal != default:
        if len(set(config.causal)) > 1:
            raise ValueError("is_causal holds for all layers; this drafter mixes both kinds")
        written["is_causal"] = config.causal[0]
    if config.target_hidden_size != config.layers.hidden_size:
        written["target_hidden_size"] = config.target_hidden_size
    if config.embedding_scale != 1.0:
        written["input_embedding_scale"] = config.embedding_scale
    if config.output_multiplier != 1.0:
        written["output_multiplier"] = config.output_multiplier
    if config.logit_softcap is not None:
        written["final_logit_softcapping"] = config.logit_softcap
    if config.template is not None or config.reuse is not None or config.verification_head:
        written["specjax"] = {"template": config.template}
    if config.reuse is not None:
        written["specjax"]["reuse"] = reuse.to_json(config.reuse)
    if config.verification_head:
        written["specjax"]["verification_head"] = True
    return written


def config_to_speculators(
    config: DrafterConfig, *, verifier: str | None, architectures: Sequence[str]
) -> dict[str, Any]:
    """The config.json of a drafter in the layout of the package `speculators`.

    Its layer ids count the embedding as 0, one more than `taps`. Its full layers are always
    bidirectional; its sliding layers are causal, or all bidirectional by a flag. (Where its own
    trainer counts a window from the anchor for every slot of a block, this library and the serving
    engines count it from each slot.)

    Args:
      config: the drafter.
      verifier: hub id or directory that readers fetch the target's embedding and head from, or
        None: they must be given both.
      architectures: of the target, as in its config.json.

    Raises:
      ValueError: something that this layout has no word for, by name.
    """
    _check_speculators(config)
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "sample_from_anchor": config.layout == "next",
        "sliding_window_non_causal": _slides_both_ways(config),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers_to_hf(config),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }
    if config.template is not None:
        written["specjax"] = {"template": config.template}
    return written


def _check_speculators(config: DrafterConfig) -> None:
    unsaid = {
        "target_hidden_size": config.target_hidden_size != config.layers.hidden_size,
        "embedding_scale": config.embedding_scale != 1.0,
        "output_multiplier": config.output_multiplier != 1.0,
        "logit_softcap": config.logit_softcap is not None,
        "reuse": config.reuse is not None,
        "verification_head": config.verification_head,
    }
    for name, present in unsaid.items():
        if present:
            raise ValueError(
                f"the speculators layout cannot hold {name} = {getattr(config, name)}: "
                "use the z-lab layout"
            )
    slides = [window is not None for window in config.layers.windows]
    both_ways = _slides_both_ways(config)
    if list(config.causal) != [sliding and not both_ways for sliding in slides]:
        raise ValueError(
            f"the speculators layout cannot hold causal = {list(config.causal)} with windows "
            f"{list(config.layers.windows)}: its full layers are bidirectional and its sliding "
            "layers all alike; use the z-lab layout"
        )


def _slides_both_ways(config: DrafterConfig) -> bool:
    kinds = zip(config.layers.windows, config.causal, strict=True)
    return any(window is not None and not causal for window, causal in kinds)


def _layers_to_hf(config: DrafterConfig) -> dict[str, Any]:
    layers = config.layers
    windows = [window for window in layers.windows if window is not None]
    if len(set(windows)) > 1:
        raise ValueError(f"one sliding window can be written, not {sorted(set(windows))}")
    return {
        "model_type": "qwen3",
        "num_target_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "attention_bias": layers.qkv_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": layers.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in layers.windows
        ],
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": layers.num_layers,
        **_rope_to_hf(layers.rope),
    }


def _layers(config: Mapping[str, Any]) -> tuple[LayerConfig, tuple[bool, ...]]:
    sizes = {
        key: _required(config, key, key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    heads = sizes["num_attention_heads"]
    count = sizes["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * count
    if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types {types} must name full_attention or sliding_attention for {count} layers"
        )
    window = config.get("sliding_window")
    if config.get("use_swa"):  # every layer slides, bidirectionally
        types = ["sliding_attention"] * count
        window = _required(config, "swa_window_size", "dflash_config.swa_window_size")
    elif config.get("use_sliding_window") is False:
        window = None
    elif "sliding_attention" in types and window is None:
        raise ValueError("layer_types names sliding_attention but sliding_window is missing")
    sliding = [kind == "sliding_attention" for kind in types]
    causal = config.get("is_causal", config.get("causal"))
    if causal is None:
        causal_layers = tuple(slides and not config.get("use_swa") for slides in sliding)
    else:
        causal_layers = (bool(causal),) * count
    if config.get("sliding_window_non_causal"):
        causal_layers = (False,) * count
    bias = bool(config.get("attention_bias", False))
    layers = LayerConfig(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or sizes["hidden_size"] // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope.from_hf(config, default_theta=None),
        windows=tuple(window if slides else None for slides in sliding),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
    return layers, causal_layers


def _layout(config: Mapping[str, Any]) -> Layout:
    flag = config.get("sample_from_anchor")
    if flag is not None:
        return "next" if flag else "fill"
    names = config.get("architectures") or []
    if any(name in NEXT_ARCHITECTURES for name in names) or config.get("markov_rank") is not None:
        return "next"
    return "fill"


def _from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter in z-lab's words: ids counted from block outputs, one flat object."""
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise ValueError(f"speculators_model_type {kind!r} is not supported, only 'dflash'")
    inner = dict(_required(config, "transformer_layer_config", "transformer_layer_config"))
    ids = _required(config, "aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    draft_vocab = config.get("draft_vocab_size")
    return {
        **inner,
        "architectures": list(FILL_ARCHITECTURES),
        "target_layer_ids": [layer - 1 for layer in ids],
        "mask_token_id": _required(config, "mask_token_id", "mask_token_id"),
        "block_size": _required(config, "block_size", "block_size"),
        "sample_from_anchor": bool(config.get("sample_from_anchor", False)),
        "sliding_window_non_causal": config.get("sliding_window_non_causal", False),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": None if draft_vocab == inner.get("vocab_size") else draft_vocab,
        "specjax": config.get("specjax"),
    }


def _required(config: Mapping[str, Any], key: str, shown: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"config.json lacks {shown}: it is not guessed, write the trained value")
    return value


def _refuse(config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or []
    known = (*FILL_ARCHITECTURES, *NEXT_ARCHITECTURES)
    if names and not any(name in known for name in names):
        raise ValueError(
            f"drafter architecture {names[0]!r} is not supported; supported: {', '.join(known)}"
        )
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu", "swish"),
        "quantization_config": (None,),
        "markov_rank": (None, 0),
        "enable_confidence_head": (None, False),
        "projector_type": (None, "dflash"),
        "conv_kernel_size": (None,),
        "selector_rank": (None,),
        "attention_sink_bias": (None, False),
        "is_neox_style": (None, True),
        "logit_scale": (None, 1, 1.0),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise ValueError(f"drafter config: {key} = {config[key]!r} is not supported")


def check_config(config: DrafterConfig) -> None:
    """Raises ValueError for a drafter that cannot run: slots, taps, mask token or head counts."""
    if not (
        isinstance(config.mask_token_id, int) and 0 <= config.mask_token_id < config.vocab_size
    ):
        raise ValueError(
            f"mask_token_id {config.mask_token_id!r} is not a row of the embedding "
            f"(0 to {config.vocab_size - 1})"
        )
    if config.block_size <= config.first_slot:
        raise ValueError(f"block_size {config.block_size} leaves no slot to draft a token in")
    if not config.taps or min(config.taps) < 0 or len(set(config.taps)) != len(config.taps):
        raise ValueError(
            f"target_layer_ids {list(config.taps)} must name at least one layer, none twice, "
            "counted from 0"
        )
    if config.num_target_layers is not None and max(config.taps) >= config.num_target_layers - 1:
        raise ValueError(
            f"target_layer_ids {list(config.taps)} reach the last of {config.num_target_layers} "
            "target layers, which cannot be tapped"
        )
    layers = config.layers
    if layers.num_heads % layers.num_kv_heads or layers.head_dim % 2:
        raise ValueError(
            f"{layers.num_heads} heads over {layers.num_kv_heads} key/value heads of "
            f"{layers.head_dim} channels: heads must divide evenly and head_dim be even"
        )


def _rope_to_hf(value: Rope) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if value.kind != "default":
        scaling = {"rope_type": value.kind, "factor": value.factor}
    if value.kind in ("llama3", "yarn"):
        assert scaling is not None
        scaling["original_max_position_embeddings"] = value.original
    if value.kind == "llama3":
        assert scaling is not None
        scaling |= {"low_freq_factor": value.low, "high_freq_factor": value.high}
    if value.kind == "yarn":
        assert scaling is not None
        scaling |= {
            "beta_fast": value.beta_fast,
            "beta_slow": value.beta_slow,
            "attention_factor": value.attention_factor,
            "truncate": value.truncate,
        }
    return {"rope_theta": value.theta, "rope_scaling": scaling}
