"""What a training run is made of: frozen dataclasses that are also its JSON config."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specjax.models.drafter import DrafterConfig, Layout
from specjax.models.hub import Target
from specjax.models.layers import LayerConfig
from specjax.models.target import check_taps
from specjax.models.text import template_fingerprint
from specjax.training.objectives import Objective


@dataclass(frozen=True)
class Source:
    """Prompts, and how the target answers them.

    Attributes:
      name: of its folder.
      prompts: a JSON lines file of `prompt`, `messages` or `turns`; None: texts of a base model
        that start from nothing, `limit` of them.
      limit: so many prompts, the first ones; None: all.
      answers: folder of the answers, made there where it is missing; None: inside the run.
      weight: how often each document occurs in an epoch.
      max_new_tokens, temperature, top_k, top_p, seed: of the answers.
      batch_size: prompts answered together.
    """

    name: str
    prompts: str | None = None
    limit: int | None = None
    answers: str | None = None
    weight: float = 1.0
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 48


@dataclass(frozen=True)
class Shape:
    """The drafter to be trained; what is None is the target's.

    Attributes:
      layers: decoder layers of the drafter.
      taps: target layers whose outputs it reads.
      mask_token_id: token of an open slot; its embedding is the target's.
      block_size: rows of a block, the anchor included.
      layout: which position a slot predicts, "fill" or "next" (`models.drafter.Layout`).
      num_heads, num_kv_heads, head_dim, intermediate_size: of its layers.
    """

    layers: int
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int = 8
    layout: Layout = "fill"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None


@dataclass(frozen=True)
class Optimizer:
    """Warm-up to the learning rate, then a cosine to zero; no weight decay on norms.

    Attributes:
      name: "adamw" or "muon" (matrices by Muon, the rest by AdamW).
      learning_rate: the highest one.
      warmup: share of all steps.
      weight_decay: of matrices.
      clip: largest norm of the whole gradient.
      b1, b2: of Adam.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95


@dataclass(frozen=True)
class HeldOut:
    """Prompts that are never trained on, and what is measured on them.

    Attributes:
      prompts: a JSON lines file.
      limit: the first so many.
      answers: folder of the greedy answers; None: inside the run.
      max_new_tokens: per answer.
      batch_size: prompts answered together.
      every: steps between two teacher-forced walks; 0: only at the end.
      walked: prompts of a walk on the way; the last one takes all.
      decoded: prompts that are decoded at the end with and without the drafter.
      temperatures: at which they are decoded.
      drafts: draft lengths with which they are decoded; empty: all that a block holds.
    """

    prompts: str
    limit: int | None = None
    answers: str | None = None
    max_new_tokens: int = 256
    batch_size: int = 48
    every: int = 500
    walked: int = 50
    decoded: int = 16
    temperatures: tuple[float, ...] = (0.0, 1.0)
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainConfig:
    """A training run, whole.

    Attributes:
      name: of the run; everything it writes is in `runs/<name>`.
      target: as for `load_target`.
      sources: the training text.
      drafter: the network; None where `init_from` gives it.
      heldout: what is evaluated, or None.
      init_from: a drafter checkpoint to start from.
      objective: what is minimised.
      optimizer: how.
      steps: optimizer steps.
      row_length: tokens of a packed row.
      rows: packed rows of one step, over all devices; accumulated ones included.
      anchors: blocks per row.
      accumulate: micro-batches of a step.
      head_chunk: blocks whose logits exist at a time.
      vocabulary: logits over "all" tokens, or over those in the "data".
      features: the target's states "online" in every step, or from a "cache" on disk that is
        filled once.
      cache_gb: a larger cache is refused.
      compute: dtype of the networks' arithmetic; parameters and moments are float32.
      data_parallel, model_parallel: devices of the mesh.
      checkpoint_every: steps between two checkpoints.
      keep: latest checkpoints that are kept; the best one is kept beside them.
      tensorboard: write event files too (needs tensorboardX).
      seed: of the initial parameters, the packing and the anchors.
    """

    name: str
    target: str
    sources: tuple[Source, ...]
    drafter: Shape | None = None
    heldout: HeldOut | None = None
    init_from: str | None = None
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 1000
    row_length: int = 512
    rows: int = 8
    anchors: int = 32
    accumulate: int = 1
    head_chunk: int = 32
    vocabulary: Literal["all", "data"] = "all"
    features: Literal["online", "cache"] = "online"
    cache_gb: float = 20.0
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    data_parallel: int = 1
    model_parallel: int = 1
    checkpoint_every: int = 200
    keep: int = 2
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("steps", "row_length", "rows", "anchors", "accumulate", "head_chunk")
        for name in (*positive, "data_parallel", "model_parallel", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.rows % (self.accumulate * self.data_parallel):
            raise ValueError(
                f"rows {self.rows} must be a multiple of accumulate {self.accumulate} times "
                f"data_parallel {self.data_parallel}"
            )
        if not self.sources:
            raise ValueError("sources is empty: there is nothing to train on")
        if (self.drafter is None) == (self.init_from is None):
            raise ValueError("give either drafter (a new network) or init_from (a checkpoint)")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} does not name a folder")


def read(file: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Reads a JSON config and applies changes like "optimizer.learning_rate=1e-3".

    Raises:
      ValueError: no JSON, an unknown key, or a value of another type, by its dotted name.
    """
    try:
        raw = json.loads(Path(file).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    for change in changes:
        _change(raw, change)
    return from_json(raw)


def from_json(raw: Mapping[str, Any]) -> TrainConfig:
    """The config behind a JSON object; ValueError names what does not fit."""
    return _read(TrainConfig, raw, "")


def to_json(config: Any) -> dict[str, Any]:
    """The JSON object of a config, all defaults written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def drafter_config(shape: Shape, target: Target) -> DrafterConfig:
    """The network that `shape` describes, for this target.

    Raises:
      ValueError: taps or a mask token that the target does not have.
    """
    model, own = target.config.layers, dataclasses.asdict(shape)
    check_taps(shape.taps, model.num_layers)
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
        **{name: own[name] or getattr(model, name) for name in sizes},
    )
    chats = target.has_tokenizer and target.tokenizer.chat_template
    return DrafterConfig(
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


def _change(raw: dict[str, Any], change: str) -> None:
    path, sign, text = change.partition("=")
    if not sign:
        raise ValueError(f"--set {change}: write it as name=value, such as steps=100")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text  # a bare word is a string
    *parents, last = path.split(".")
    where: Any = raw
    for key in parents:
        where = _item(where, key, change) if isinstance(where, list) else where.setdefault(key, {})
        if not isinstance(where, dict | list):
            raise ValueError(f"--set {change}: {key} holds no further names")
    if isinstance(where, list):
        _item(where, last, change)
        where[int(last)] = value
    else:
        where[last] = value


def _item(values: list[Any], key: str, change: str) -> Any:
    if not key.isdecimal() or int(key) >= len(values):
        raise ValueError(f"--set {change}: {key} is not one of the entries 0 to {len(values) - 1}")
    return values[int(key)]


def _read(kind: Any, value: Any, path: str) -> Any:
    """`value` of a JSON file as `kind`, a type annotation of a config."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, path)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{path} = {value!r} is not one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            pair = zip(arguments, value, strict=True)
            return tuple(_read(kind, item, f"{path}.{i}") for i, (kind, item) in enumerate(pair))
        if isinstance(value, dict):  # names and weights
            value = [list(item) for item in value.items()]
        if not isinstance(value, list):
            raise ValueError(f"{path} = {value!r} must be a list")
        return tuple(_read(arguments[0], item, f"{path}.{i}") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, path)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{path} = {value!r} must be {kind.__name__}")
    return value


def _read_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path or 'the config'} = {value!r} must be an object")
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    annotations = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(known))
    here = f"{path}." if path else ""
    if unknown:
        raise ValueError(f"{here}{unknown[0]} is unknown; known are {', '.join(known)}")
    for name, entry in known.items():
        optional = (entry.default, entry.default_factory) != (dataclasses.MISSING,) * 2
        if name not in value and not optional:
            raise ValueError(f"{here}{name} is missing")
    return kind(**{name: _read(annotations[name], value[name], here + name) for name in value})
