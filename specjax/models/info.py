"""What a model directory is, from its config and file headers alone: no weight is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from specjax.models import drafter, drafter_hf, hub, params, reuse, target
from specjax.models.storage import open_checkpoint, read_json
from specjax.models.text import has_tokenizer


@dataclass(frozen=True)
class Description:
    """A directory's kind, its parsed config and the lines a person wants to see."""

    name: str
    config: target.TargetConfig | drafter.DrafterConfig
    lines: dict[str, str]


def describe(name: str) -> Description:
    """Describes the target or drafter behind a name that `load_target` takes.

    Raises:
      FileNotFoundError, ValueError: what loading it would raise.
    """
    directory = hub.resolve(name)
    raw = read_json(directory / "config.json")
    checkpoint = open_checkpoint(directory)
    stored = Counter(str(info.dtype) for info in checkpoint.tensors.values())
    files = {info.file.name for info in checkpoint.tensors.values()}
    common = {
        "directory": str(directory),
        "stored as": f"{', '.join(stored)} in {len(files)} file{'s' if len(files) > 1 else ''}",
    }
    if is_drafter(raw):
        config = drafter_hf.config_from_hf(raw)
        carried = {*drafter_hf.TARGET_COPIES, *hub.REDUCED}
        params.check_manifest(drafter.table(config), checkpoint, carried.__contains__)
        lines = _drafter_lines(config) | common
        if (directory / hub.DRAFT_IDS).exists():
            count = len(hub.draft_ids(directory, config.vocab_size))
            lines["proposes"] = f"{count:,} of the target's tokens ({hub.DRAFT_IDS})"
        return Description(name, config, lines)
    model = target.config_from_hf(raw)
    params.check_manifest(target.table(model), checkpoint, hub.carries_no_parameter(model))
    return Description(name, model, _target_lines(model, directory) | common)


def is_drafter(config: dict) -> bool:
    """True for the config.json of a drafter in any published layout."""
    nested = ("dflash_config", "target_layer_ids", "speculators_model_type")
    return any(config.get(key) is not None for key in nested)


def fit(one: Description, other: Description) -> str | None:
    """Whether a drafter and a target fit, in words; None for two of a kind."""
    pair = {isinstance(d.config, drafter.DrafterConfig): d for d in (one, other)}
    if len(pair) < 2:
        return None
    draft, model = pair[True], pair[False]
    assert isinstance(draft.config, drafter.DrafterConfig)
    assert isinstance(model.config, target.TargetConfig)
    try:
        hub.check_fit(draft.config, model.config, model.name)
    except ValueError as error:
        return f"{draft.name} does not fit {model.name}: {error}"
    return f"{draft.name} fits {model.name}"


def _layer_lines(config: target.TargetConfig | drafter.DrafterConfig) -> dict[str, str]:
    layers = config.layers
    windows = sorted({window for window in layers.windows if window is not None})
    attention = f"{layers.num_heads} heads, {layers.num_kv_heads} key/value, {layers.head_dim} wide"
    if windows:
        sliding = sum(window is not None for window in layers.windows)
        attention += f"; {sliding} of {layers.num_layers} layers see {windows} positions back"
    scaling = (
        "" if layers.rope.kind == "default" else f", {layers.rope.kind} x{layers.rope.factor:g}"
    )
    return {
        "layers": f"{layers.num_layers} of hidden size {layers.hidden_size}, "
        f"mlp {layers.intermediate_size}",
        "attention": attention,
        "rope": f"theta {layers.rope.theta:g}{scaling}",
    }


def _target_lines(config: target.TargetConfig, directory: Path) -> dict[str, str]:
    tokenizer = "none"
    if has_tokenizer(directory):
        config_file = read_json(directory / "tokenizer_config.json")
        separate = (directory / "chat_template.jinja").exists()
        template = separate or config_file.get("chat_template")
        tokenizer = f"yes, {'with' if template else 'no'} chat template"
    head = ", head tied to the embedding" if config.tied else ""
    return {
        "kind": f"target, {config.family} family",
        "parameters": f"{params.count(target.table(config)):,}",
        **_layer_lines(config),
        "vocabulary": f"{config.vocab_size:,}{head}",
        "context": f"{config.max_positions:,} positions",
        "end of text": str(list(hub.eos_token_ids(directory))),
        "tokenizer": tokenizer,
    }


def _drafter_lines(config: drafter.DrafterConfig) -> dict[str, str]:
    predicts = {"fill": "its own position", "next": "the position behind it"}[config.layout]
    depth = config.num_target_layers or "unrecorded"
    return {
        "kind": "drafter, DFlash backbone",
        "parameters": f"{params.count(drafter.table(config)):,}",
        **_layer_lines(config),
        "block": f"{config.block_size} rows, {config.num_drafts} drafts; "
        f"layout {config.layout!r}: a slot predicts {predicts}",
        "in-block": "causal"
        if all(config.causal)
        else "mixed"
        if any(config.causal)
        else "bidirectional",
        "reuse": "none" if config.reuse is None else reuse.name_of(config.reuse),
        "verification": "head" if config.verification_head else "no head",
        "taps": f"outputs of target layers {list(config.taps)}",
        "mask token": str(config.mask_token_id),
        "vocabulary": f"{config.vocab_size:,} of the target"
        + (f", own head over {config.draft_vocab_size:,}" if config.draft_vocab_size else ""),
        "fits": f"targets of hidden size {config.target_hidden_size}, {depth} layers, "
        f"vocabulary {config.vocab_size:,}",
        "template": config.template or "unrecorded",
    }
