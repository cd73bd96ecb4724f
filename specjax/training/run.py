"""A training run from prompts to an exported drafter: everything it makes is in `runs/<name>`.

config.json      the whole configuration, defaults written out
answers/<name>/  what the target answered to a source's prompts
heldout/         its greedy answers to prompts that are not trained on; heldout-1/: at temperature 1
features/        its states of the training text, where they are cached
checkpoints/     parameters and optimizer, to go on from
metrics.jsonl    a line per step;  walks.jsonl  a line per held-out walk
curves.png       both, drawn
report.json      the figures of the end, with the keys of `specjax eval`
drafter/         the drafter in its published layout
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from specjax import evaluation
from specjax.models.drafter import DrafterConfig, restrict, unrestricted
from specjax.models.drafter_hf import check_config
from specjax.models.hub import Drafter, Target, load_drafter, load_target
from specjax.models.packaged import keep_compiled
from specjax.models.storage import write_json
from specjax.models.target import vocabulary
from specjax.models.text import tokenizer_fingerprint
from specjax.training import config as configs
from specjax.training import data, export, heldout, plots, report, trainer
from specjax.training.checkpoint import Checkpoints, check_meta
from specjax.training.config import TrainConfig
from specjax.training.features import FeatureCache
from specjax.training.log import Log
from specjax.training.losses import DECAYING
from specjax.training.network import drafter_config, extended
from specjax.training.packing import Batch, Packing
from specjax.training.trainer import Plan, States, TrainState
from specjax.types import Params

# What may differ between a run and its continuation: none of it reaches a parameter.
FREE = ("heldout", "checkpoint_every", "keep", "tensorboard", "license")


@dataclass(frozen=True)
class Setup:
    """What a run works with, loaded and checked."""

    config: TrainConfig
    folder: Path
    target: Target
    network: DrafterConfig
    plan: Plan
    mesh: Mesh | None
    start: Params | None  # of the drafter that the run begins with


@dataclass(frozen=True)
class Text:
    """What a run reads.

    Attributes:
      documents: the answers of every source.
      packing: of all of them.
      held: answers that are never trained on, or None.
    """

    documents: list[data.Documents]
    packing: Packing
    held: data.Documents | None


def fit(config: TrainConfig, *, runs: str | Path = "runs", progress: bool = True) -> dict[str, Any]:
    """Trains a drafter, or goes on with a run that was interrupted.

    Answers of the target that are missing are made first. A run that is complete only reports.

    Args:
      config: the run.
      runs: the folder of all runs.
      progress: bars on stderr.

    Returns:
      The report that is also written to `report.json`.

    Raises:
      ValueError: a config that does not fit the target, or differs from that of the run so far.
    """
    keep_compiled()
    setup = prepare(config, runs)
    checkpoints = Checkpoints(setup.folder / "checkpoints", keep=config.keep)
    latest = checkpoints.latest()
    if latest is not None:
        _check_same(checkpoints.meta(latest), _meta(setup))
    setup.folder.mkdir(parents=True, exist_ok=True)
    write_json(setup.folder / "config.json", configs.to_json(config))
    text = _text(setup, progress)
    meta = _meta(setup) | {"answers": [one.manifest["sha256"] for one in text.documents]}
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    state = trainer.fresh_state(setup.plan, optimizer, mesh=setup.mesh, params=setup.start)
    if latest is not None:
        check_meta(checkpoints.meta(latest), meta)
        state = checkpoints.restore(latest, like=state)

    def save(state: TrainState, tau: float | None) -> None:
        checkpoints.save(int(state.step), state, meta, metric=tau)
        plots.curves(setup.folder)

    if int(state.step) < config.steps:
        state = _train(setup, text, optimizer, state, save, progress)
    return _finish(setup, text, state, checkpoints.best(), progress)


def prepare(config: TrainConfig, runs: str | Path = "runs") -> Setup:
    """Loads the target and settles the network; what can be wrong is found here, before any work.

    Raises:
      ValueError, FileNotFoundError, ImportError: what the run would fail with later.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"{jax.process_count()} processes: a run on several hosts is not supported yet; use "
            "the devices of one"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ImportError("tensorboard needs tensorboardX: pip install tensorboardX")
    for source in config.sources:
        prompts_of(source)
        if misread := config.objective.misread(source.temperature, source.top_k, source.top_p):
            warnings.warn(f"source {source.name!r}: {misread}", stacklevel=2)
    mesh = _mesh(config)
    target = load_target(config.target, dtype=_compute(config), mesh=mesh)
    start = None
    if config.init_from is not None:
        loaded = load_drafter(config.init_from, target)
        network, start = loaded.config, unrestricted(loaded.config, loaded.params)
        if config.block_size is not None:
            network = replace(network, block_size=config.block_size)
            check_config(network)
    else:
        assert config.drafter is not None
        network = drafter_config(config.drafter, target)
    if network.draft_vocab_size is not None:
        raise ValueError("init_from has a head of its own over a reduced vocabulary: not trained")
    network, start = extended(config, network, start)
    if config.objective.weights in DECAYING:
        config.objective.decay(network.block_size)
    if config.heldout is not None:
        evaluation.read_prompts(config.heldout.prompts, config.heldout.limit)
        for count in config.heldout.drafts:
            network.check_num_draft(count)
    if config.row_length > target.config.max_positions:
        raise ValueError(
            f"row_length {config.row_length} exceeds the {target.config.max_positions} positions "
            f"of {target.name}"
        )
    plan = Plan(
        target=target.config,
        drafter=network,
        objective=config.objective,
        anchors=config.anchors,
        accumulate=config.accumulate,
        head_chunk=config.head_chunk,
        seed=config.seed,
        compute=_compute(config),
        steps=config.steps,
        branches=config.branches,
    )
    return Setup(config, Path(runs) / config.name, target, network, plan, mesh, start)


def prompts_of(source: configs.Source) -> Any:
    """The prompts of a source, or how many texts of a base model it is made of."""
    if source.prompts is not None:
        return evaluation.read_prompts(source.prompts, source.limit)
    if source.limit is None:
        raise ValueError(f"source {source.name} has no prompts: limit must say how many texts")
    return source.limit


def answers(target: Target, source: configs.Source, folder: Path, progress: bool) -> data.Documents:
    """The target's answers to a source's prompts, made where they are missing."""
    return data.answer(
        target,
        prompts_of(source),
        Path(source.answers) if source.answers else folder / "answers" / source.name,
        max_new_tokens=source.max_new_tokens,
        temperature=source.temperature,
        top_k=source.top_k,
        top_p=source.top_p,
        seed=source.seed,
        batch_size=source.batch_size,
        progress=progress,
    )


# --------------------------------------------------------------------------------- the training
def _text(setup: Setup, progress: bool) -> Text:
    """Everything that the run reads, made where it is missing."""
    config, wanted = setup.config, setup.config.heldout
    documents = [answers(setup.target, one, setup.folder, progress) for one in config.sources]
    held = None
    if wanted is not None:
        held = data.answer(
            setup.target,
            evaluation.read_prompts(wanted.prompts, wanted.limit),
            Path(wanted.answers) if wanted.answers else setup.folder / "heldout",
            max_new_tokens=wanted.max_new_tokens,
            batch_size=wanted.batch_size,
            progress=progress,
        )
    weights = [source.weight for source in config.sources]
    weighted = list(zip(documents, weights, strict=True))
    packing = Packing(weighted, config.row_length, config.rows, config.seed)
    if progress:
        print(packing, file=sys.stderr)
    return Text(documents, packing, held)


def _train(
    setup: Setup,
    text: Text,
    optimizer: Any,
    state: TrainState,
    save: Callable[[TrainState, float | None], None],
    progress: bool,
) -> TrainState:
    config, done = setup.config, int(state.step)
    rows, cache, some = _rows(setup, text), _cache(setup, text, progress), _walkable(setup, text)
    update = trainer.make_step(setup.plan, optimizer)
    rate = trainer.schedule(config.optimizer, config.steps)
    every = config.heldout.every if config.heldout else 0
    alone = replace(setup.network, reuse=None)  # a walk has no rejected states
    with (
        Log(setup.folder, done, tensorboard=config.tensorboard) as log,
        tqdm(
            total=config.steps, initial=done, desc="training", unit="step", disable=not progress
        ) as bar,
    ):
        for step in range(done + 1, config.steps + 1):
            begin = time.perf_counter()
            arrays = _arrays(setup, text.packing, cache, step - 1)
            state, metrics = update(state, setup.target.params, *arrays, rows)
            now = {k: np.asarray(v, np.float64) for k, v in jax.device_get(metrics).items()}
            _check_finite(now, step)
            now["learning_rate"] = np.asarray(rate(step - 1), np.float64)
            seconds = time.perf_counter() - begin
            now["tokens_per_s"] = np.round(config.rows * config.row_length / seconds, 1)
            log.write("metrics", step, {key: value.tolist() for key, value in now.items()})
            bar.set_postfix(loss=f"{now['loss']:.3f}", tau=f"{now['tau']:.2f}", refresh=False)
            bar.update()
            last, tau = step == config.steps, None
            if some is not None and (last or (every and step % every == 0)):
                walked = heldout.walk(
                    setup.target, alone, _proposing(setup, rows, state.params), some
                )
                tau = walked["tau"]
                log.write("walks", step, walked)
            if last or tau is not None or step % config.checkpoint_every == 0:
                save(state, tau)
    return state


def _arrays(
    setup: Setup, packing: Packing, cache: FeatureCache | None, step: int
) -> tuple[Batch, States | None]:
    """The batch of a step, and the target's states where they are cached."""
    batch = packing.batch(step)
    found: Any = () if cache is None else cache.rows(batch.source, setup.plan.compute)
    return placed(setup.mesh, batch, States(*found) if found else None)


def _check_finite(metrics: dict[str, np.ndarray], step: int) -> None:
    if not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])):
        raise FloatingPointError(
            f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}. The last "
            "checkpoint is from before it; start another run with a lower learning rate"
        )


def placed(mesh: Mesh | None, batch: Batch, states: States | None) -> tuple[Batch, States | None]:
    """A batch and its cached states on the devices; each host gives its own rows."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, (batch, states))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), (batch, states)
    )


def _walkable(setup: Setup, text: Text) -> heldout.Walkable | None:
    """The answers of the walks on the way; the target runs over them once."""
    wanted, network = setup.config.heldout, setup.network
    if text.held is None or wanted is None:
        return None
    return heldout.Walkable(
        setup.target, network.taps, network.num_drafts, text.held, limit=wanted.walked, keep=True
    )


def _rows(setup: Setup, text: Text) -> jax.Array | None:
    """The token ids that logits and drafts are restricted to, or None."""
    if setup.config.vocabulary == "all":
        return None
    V = setup.target.config.vocab_size
    ids = np.unique(np.concatenate([one.occurring(V) for one in text.documents]))
    return None if len(ids) == V else jnp.asarray(ids, jnp.int32)


def _proposing(setup: Setup, rows: jax.Array | None, params: Params) -> Params:
    """The parameters of a drafter that proposes the tokens `rows` only."""
    return params if rows is None else restrict(params, vocabulary(setup.target.params), rows)


def _cache(setup: Setup, text: Text, progress: bool) -> FeatureCache | None:
    if setup.config.features == "online":
        return None
    return FeatureCache.build(
        setup.target,
        setup.network.taps,
        text.documents,
        Path(setup.config.cache_folder or setup.folder / "features"),
        final_hidden=setup.config.objective.needs_target,
        limit_bytes=int(setup.config.cache_gb * 1e9),
        progress=progress,
    )


# -------------------------------------------------------------------------------------- the end
def _finish(
    setup: Setup, text: Text, state: TrainState, best: int | None, progress: bool
) -> dict[str, Any]:
    """Exports the drafter and reports what it is worth."""
    config, folder = setup.config, setup.folder / "drafter"
    # What is measured is what is written.
    written = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), state.params)
    written = _proposing(setup, _rows(setup, text), written)
    made = Drafter(config.name, folder, setup.network, written)
    found: dict[str, Any] = {
        "name": config.name,
        "steps": int(state.step),
        "best_walked_step": best,
        "documents": sum(map(len, text.documents)),
        "documents_cut": text.packing.cut,
        "documents_left_out": text.packing.dropped,
    }
    if text.held is not None and config.heldout is not None:
        asked = config.heldout, text.held, setup.folder, progress
        found = report.measured(setup.target, made, *asked) | found
    plots.curves(setup.folder)
    write_json(setup.folder / "report.json", found)
    export.replace(made, folder, target=setup.target, card=report.card(config, found))
    return found


# ---------------------------------------------------------------------------------------- parts
def _compute(config: TrainConfig) -> str:
    fitting = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return fitting if config.compute == "auto" else config.compute


def _mesh(config: TrainConfig) -> Mesh | None:
    shape = (config.data_parallel, config.model_parallel)
    needed = shape[0] * shape[1]
    if needed == 1:
        return None
    if needed > jax.device_count():
        raise ValueError(
            f"data_parallel {shape[0]} times model_parallel {shape[1]} needs {needed} devices; "
            f"there are {jax.device_count()}"
        )
    devices = np.asarray(jax.devices()[:needed]).reshape(shape)
    return Mesh(devices, ("data", "model"))


def _meta(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it."""
    written = configs.to_json(setup.config)
    return {
        "config": {key: value for key, value in written.items() if key not in FREE},
        "target": data.fingerprint(setup.target),
        "tokenizer": tokenizer_fingerprint(setup.target.directory),
        "compute": setup.plan.compute,
    }


def _check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Before anything is made: all that the checkpoint knows but the answers themselves."""
    check_meta({key: value for key, value in saved.items() if key in now}, now)
