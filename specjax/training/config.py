"""What a training run is made of: frozen dataclasses that are also its JSON config."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specjax.models.drafter import Layout
from specjax.models.reuse import ReAnchor, make
from specjax.training import jsonfile
from specjax.training.branches import Branches, growing
from specjax.training.objectives import Objective
from specjax.types import Reuse

# What a number may be; none of it holds for NaN.
RULES: Mapping[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "0 or more": lambda value: 0 <= value < math.inf,
    "positive and finite": lambda value: 0 < value < math.inf,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "between 0 and 4294967295": lambda value: 0 <= value < 2**32,  # seeds
}


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

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check(self, "at least 1", "limit", "max_new_tokens", "batch_size")
        _check(self, "positive and finite", "weight")
        _check(self, "0 or more", "temperature", "top_k")
        _check(self, "above 0 and at most 1", "top_p")
        _check(self, "between 0 and 4294967295", "seed")
        if self.prompts is None and self.limit is None:
            raise ValueError(f"limit of {self.name!r}, without prompts, must say how many texts")


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

    def __post_init__(self) -> None:
        sizes = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        _check(self, "at least 1", "layers", *sizes)
        if self.num_drafts < 1:
            raise ValueError(
                f"block_size {self.block_size} leaves no slot to draft a token in "
                f"(layout {self.layout!r})"
            )
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")

    @property
    def num_drafts(self) -> int:
        """Draft tokens of one block."""
        return self.block_size - (self.layout == "fill")


@dataclass(frozen=True)
class Reusing:
    """The reuse of rejected states that a drafter is trained for.

    Attributes:
      method: a name of `models.reuse.NAMES` that has weights of its own.
      site: of "carryover".
    """

    method: str
    site: Literal["pre_fc", "post_norm"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.made, ReAnchor):
            raise ValueError("method 'reanchor' needs no training: use generate(reuse='reanchor')")

    @property
    def made(self) -> Reuse:
        """The method itself."""
        return make(self.method, **({} if self.site is None else {"site": self.site}))


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

    def __post_init__(self) -> None:
        _check(self, "positive and finite", "learning_rate", "clip")
        _check(self, "0 or more", "weight_decay")
        _check(self, "at least 0 and below 1", "warmup", "b1", "b2")


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
      repeats: timed passes over them.
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
    repeats: int = 1
    temperatures: tuple[float, ...] = (0.0, 1.0)
    drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = ("limit", "max_new_tokens", "batch_size", "walked", "decoded", "repeats")
        _check(self, "at least 1", *counts, "drafts")
        _check(self, "0 or more", "every", "temperatures")
        if not self.temperatures:
            raise ValueError("temperatures is empty: give at least one")


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
      block_size: of a drafter from `init_from`, where it shall not be the checkpoint's.
      reuse: the reuse of rejected states that is trained, or None; `branches` say how.
      branches: drafts behind a rejection that are trained beside the plain ones.
      objective: what is minimised.
      optimizer: how.
      steps: optimizer steps.
      row_length: tokens of a packed row.
      rows: packed rows of one step, over all devices; accumulated ones included.
      anchors: blocks per row.
      accumulate: micro-batches of a step.
      head_chunk: blocks whose logits exist at a time.
      vocabulary: logits over "all" tokens, or over those in the "data"; the drafter then proposes
        no others.
      features: the target's states "online" in every step, or from a "cache" on disk that is
        filled once.
      cache_gb: a larger cache is refused.
      cache_folder: of the cache, for runs that share one; None: in the run's own folder.
      compute: dtype of the networks' arithmetic; parameters and moments are float32.
      data_parallel, model_parallel: devices of the mesh.
      checkpoint_every: steps between two checkpoints.
      keep: latest checkpoints that are kept; the best one is kept beside them.
      tensorboard: write event files too (needs tensorboardX).
      seed: of the initial parameters, the packing and the anchors.
      license: of the drafter, for its card; a hub licence id.
    """

    name: str
    target: str
    sources: tuple[Source, ...]
    drafter: Shape | None = None
    heldout: HeldOut | None = None
    init_from: str | None = None
    block_size: int | None = None
    reuse: Reusing | None = None
    branches: Branches | None = None
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
    cache_folder: str | None = None
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    data_parallel: int = 1
    model_parallel: int = 1
    checkpoint_every: int = 200
    keep: int = 2
    tensorboard: bool = False
    seed: int = 0
    license: str | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "row_length", "rows", "anchors", "accumulate", "head_chunk")
        devices = ("data_parallel", "model_parallel")
        _check(self, "at least 1", *counts, *devices, "checkpoint_every", "keep")
        _check(self, "positive and finite", "cache_gb")
        _check(self, "between 0 and 4294967295", "seed")
        _check_name(self.name)
        self._check_sources()
        if self.rows % (self.accumulate * self.data_parallel):
            raise ValueError(
                f"rows {self.rows} must be a multiple of accumulate {self.accumulate} times "
                f"data_parallel {self.data_parallel}"
            )
        if self.anchors >= self.row_length:
            raise ValueError(
                f"anchors must be at most {self.row_length - 1}, not {self.anchors}: the last "
                f"token of a row (row_length {self.row_length}) has nothing to predict"
            )
        if max(1, round(self.optimizer.warmup * self.steps)) >= max(2, self.steps):
            raise ValueError(
                f"optimizer.warmup {self.optimizer.warmup} leaves none of {self.steps} steps"
            )
        for part in ("losses", "finish"):
            for name, weight in getattr(self.objective, part):
                if not 0 < weight < math.inf:
                    raise ValueError(
                        f"objective.{part}.{name} must be positive and finite, not {weight}"
                    )
        if (self.drafter is None) == (self.init_from is None):
            raise ValueError("give either drafter (a new network) or init_from (a checkpoint)")
        if self.block_size is not None and self.drafter is not None:
            raise ValueError("block_size goes with init_from; of a new network it is in drafter")
        if (self.reuse is None) != (self.branches is None):
            raise ValueError("reuse and branches go together: give both or none")
        if self.branches is not None and self.features == "cache":
            raise ValueError("features must be online: branches need the target in every step")
        if self.branches is not None and self.branches.anchors >= self.row_length:
            raise ValueError(
                f"branches.anchors must be at most {self.row_length - 1}, not "
                f"{self.branches.anchors}"
            )
        if self.reuse and self.branches and self.branches.ramp and not growing(self.reuse.made):
            raise ValueError(
                f"branches.ramp {self.branches.ramp}: nothing of {self.reuse.method} grows"
            )
        drafts = self.heldout.drafts if self.heldout else ()
        if self.drafter and max(drafts, default=0) > self.drafter.num_drafts:
            raise ValueError(
                f"heldout.drafts must be at most {self.drafter.num_drafts}, what a block of "
                f"{self.drafter.block_size} holds, not {max(drafts)}"
            )

    def _check_sources(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: there is nothing to train on")
        names = [source.name for source in self.sources]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(
                    f"sources.{i}.name {name!r} is also that of sources.{names.index(name)}"
                )


def _check(config: Any, rule: str, *names: str) -> None:
    """Raises ValueError for a named value, or one in a tuple, that breaks a rule; None is free."""
    for name in names:
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and not RULES[rule](item):
                raise ValueError(f"{name} must be {rule}, not {item}")


def _check_name(name: str) -> None:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name {name!r} does not name a folder")


def read(file: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Reads a JSON config and applies changes like "optimizer.learning_rate=1e-3".

    Raises:
      ValueError: no JSON, an unknown key, a value of another type or one that no run can have,
        by its dotted name.
    """
    try:
        raw = json.loads(Path(file).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    for change in changes:
        jsonfile.change(raw, change)
    return from_json(raw)


def from_json(raw: Mapping[str, Any]) -> TrainConfig:
    """The config behind a JSON object; ValueError names what does not fit."""
    return jsonfile.read(TrainConfig, raw)


def to_json(config: Any) -> dict[str, Any]:
    """The JSON object of a config, all defaults written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
