"""A training run from prompts to an exported drafter: everything it makes is in `runs/<name>`.

config.json      the whole configuration, defaults written out
answers/<name>/  what the target answered to a source's prompts
heldout/         its greedy answers to prompts that are not trained on
features/        its states of the training text, where they are cached
checkpoints/     parameters and optimizer, to go on from
metrics.jsonl    a line per step;  walks.jsonl  a line per held-out walk
curves.png       both, drawn
report.json      the figures of the end, with the keys of `specjax eval`
drafter/         the drafter in its published layout
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import evaluation
from specjax.models.drafter import DrafterConfig
from specjax.models.hub import Drafter, Target, load_drafter, load_target
from specjax.models.packaged import keep_compiled
from specjax.models.storage import write_json
from specjax.models.text import tokenizer_fingerprint
from specjax.training import config as configs
from specjax.training import data, export, heldout, plots, trainer
from specjax.training.checkpoint import Checkpoints, check_meta
from specjax.training.config import TrainConfig
from specjax.training.features import FeatureCache
from specjax.training.log import Log
from specjax.training.packing import Batch, Packing
from specjax.training.trainer import Plan, States, TrainState
from specjax.types import Params

# What may differ between a run and its continuation: none of it reaches a parameter.
FREE = ("heldout", "checkpoint_every", "keep", "tensorboard")


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
    meta = _meta(setup)
    if latest is not None:
        check_meta(checkpoints.meta(latest), meta)
    setup.folder.mkdir(parents=True, exist_ok=True)
    write_json(setup.folder / "config.json", configs.to_json(config))
    documents = [
        (answers(setup.target, source, setup.folder, progress), source.weight)
        for source in config.sources
    ]
    held = _heldout_answers(setup, progress)
    packing = Packing(documents, config.row_length, config.rows, config.seed)
    if progress:
        print(_packed(packing), file=sys.stderr)
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    state = trainer.fresh_state(setup.plan, optimizer, mesh=setup.mesh, params=setup.start)
    if latest is not None:
        state = checkpoints.restore(latest, like=state)
    state = _train(setup, checkpoints, meta, packing, documents, optimizer, state, held, progress)
    return _finish(setup, state, held, progress)


def prepare(config: TrainConfig, runs: str | Path = "runs") -> Setup:
    """Loads the target and settles the network; everything that can be wrong is found here."""
    mesh = _mesh(config)
    target = load_target(config.target, dtype=_compute(config), mesh=mesh)
    start = None
    if config.init_from is not None:
        loaded = load_drafter(config.init_from, target)
        network, start = loaded.config, loaded.params
    else:
        assert config.drafter is not None
        network = configs.drafter_config(config.drafter, target)
    if config.objective.weights == "exponential":
        config.objective.decay(network.block_size)
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
def _train(
    setup: Setup,
    checkpoints: Checkpoints,
    meta: dict[str, Any],
    packing: Packing,
    documents: list[tuple[data.Documents, float]],
    optimizer: Any,
    state: TrainState,
    held: data.Documents | None,
    progress: bool,
) -> TrainState:
    config, done = setup.config, int(state.step)
    if done == config.steps:
        return state
    rows = _rows(setup, documents)
    cache = _cache(setup, [d for d, _ in documents], progress)
    update = trainer.make_step(setup.plan, optimizer)
    rate = trainer.schedule(config.optimizer, config.steps)
    log = Log(setup.folder, done, tensorboard=config.tensorboard)
    bar = _bar(config.steps, done, progress)
    every = config.heldout.every if config.heldout else 0
    some = _walkable(setup, held)
    last = time.perf_counter()
    for step in range(done, config.steps):
        batch = packing.batch(step, jax.process_index(), jax.process_count())
        found: Any = () if cache is None else cache.rows(batch.source, setup.plan.compute)
        states = States(*found) if found else None
        batch, states = placed(setup.mesh, batch, states)
        state, metrics = update(state, setup.target.params, batch, states, rows)
        now = jax.device_get(metrics)
        seconds, last = time.perf_counter() - last, time.perf_counter()
        values = {key: np.asarray(value, np.float64).tolist() for key, value in now.items()}
        values["learning_rate"] = float(rate(step))
        values["tokens_per_s"] = round(config.rows * config.row_length / seconds, 1)
        log.write("metrics", step + 1, values)
        bar.set_postfix(loss=f"{now['loss']:.3f}", tau=f"{now['tau']:.2f}", refresh=False)
        bar.update()
        final, tau = step + 1 == config.steps, None
        if some is not None and every and (step + 1) % every == 0 and not final:
            report = heldout.walk(setup.target, setup.network, state.params, some)
            tau = report["tau"]
            log.write("walks", step + 1, report)
            last = time.perf_counter()
        if (step + 1) % config.checkpoint_every == 0 or final:
            checkpoints.save(step + 1, state, meta, metric=tau)
            plots.curves(setup.folder)
            last = time.perf_counter()
    bar.close()
    return state


def placed(mesh: Mesh | None, batch: Batch, states: States | None) -> tuple[Batch, States | None]:
    """A batch and its cached states on the devices; each host gives its own rows."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, (batch, states))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), (batch, states)
    )


def _walkable(setup: Setup, held: data.Documents | None) -> heldout.Walkable | None:
    """The answers of the walks on the way; the target runs over them once."""
    wanted, network = setup.config.heldout, setup.network
    if held is None or wanted is None:
        return None
    return heldout.Walkable(
        setup.target, network.taps, network.num_drafts, held, limit=wanted.walked, keep=True
    )


def _rows(setup: Setup, documents: list[tuple[data.Documents, float]]) -> jax.Array | None:
    """The token ids that logits are restricted to, or None."""
    if setup.config.vocabulary == "all":
        return None
    V = setup.target.config.vocab_size
    ids = np.unique(np.concatenate([d.occurring(V) for d, _ in documents]))
    return jnp.asarray(ids, jnp.int32)


def _cache(setup: Setup, documents: list[data.Documents], progress: bool) -> FeatureCache | None:
    if setup.config.features == "online":
        return None
    return FeatureCache.build(
        setup.target,
        setup.network.taps,
        documents,
        setup.folder / "features",
        final_hidden=setup.config.objective.needs_target,
        limit_bytes=int(setup.config.cache_gb * 1e9),
        progress=progress,
    )


# -------------------------------------------------------------------------------------- the end
def _finish(
    setup: Setup, state: TrainState, held: data.Documents | None, progress: bool
) -> dict[str, Any]:
    """Exports the drafter and reports what it is worth."""
    made = Drafter(setup.config.name, setup.folder / "drafter", setup.network, state.params)
    report: dict[str, Any] = {"name": setup.config.name, "steps": int(state.step)}
    if held is not None:
        report = _evaluated(setup, made, held) | report
    plots.curves(setup.folder)
    write_json(setup.folder / "report.json", report)
    export.replace(
        made,
        setup.folder / "drafter",
        target=setup.target,
        card={"report": report, "command": _command(setup.config)},
    )
    return report


def _evaluated(setup: Setup, made: Drafter, held: data.Documents) -> dict[str, Any]:
    """Held-out figures: the walk over all greedy answers, and decoding at each temperature."""
    wanted = setup.config.heldout
    assert wanted is not None
    walked = heldout.walk(setup.target, made.config, made.params, held)
    prompts = evaluation.read_prompts(wanted.prompts, wanted.limit)[: wanted.decoded]
    drafter = Drafter(
        made.name,
        made.directory,
        made.config,
        jax.tree.map(lambda p: p.astype(setup.plan.compute), made.params),
    )
    lengths = wanted.drafts or (made.config.num_drafts,)
    runs = [
        evaluation.evaluate(
            setup.target,
            drafter,
            prompts,
            max_new_tokens=wanted.max_new_tokens,
            temperature=temperature,
            num_draft=length,
        )
        for temperature in wanted.temperatures
        for length in lengths
    ]
    best = max(runs, key=lambda run: (run["asked"]["temperature"] == 0, run["speedup"] or 0))
    return best | {"walk": walked, "runs": runs}


def table(report: dict[str, Any]) -> str:
    """What a person wants to know at the end of a run."""
    lines = [f"{report['name']}, {report['steps']} steps"]
    if "walk" not in report:
        return lines[0]
    walk = report["walk"]
    slots = " ".join(f"{share:.2f}" for share in walk["acceptance_per_position"])
    lines += [
        f"held-out, teacher-forced, greedy: acceptance length {walk['tau']:.3f} "
        f"(mean of {walk['answers']} answers {walk['tau_macro']:.3f} "
        f"+- {walk['standard_error']:.3f})",
        f"accepted by slot: {slots}",
        "",
        f"{'temperature':>11} " + evaluation.as_table(report["runs"]).splitlines()[0],
    ]
    rows = evaluation.as_table(report["runs"]).splitlines()[1:]
    for run, row in zip(report["runs"], rows, strict=True):
        lines.append(f"{run['asked']['temperature']:>11} {row}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------- parts
def _bar(total: int, done: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=done, desc="training", unit="step", disable=not progress)


def _heldout_answers(setup: Setup, progress: bool) -> data.Documents | None:
    wanted = setup.config.heldout
    if wanted is None:
        return None
    return data.answer(
        setup.target,
        evaluation.read_prompts(wanted.prompts, wanted.limit),
        Path(wanted.answers) if wanted.answers else setup.folder / "heldout",
        max_new_tokens=wanted.max_new_tokens,
        batch_size=wanted.batch_size,
        progress=progress,
    )


def _packed(packing: Packing) -> str:
    text = f"{len(packing.tokens):,} tokens in {packing.packed:,} rows, {packing.fill:.0%} full"
    if packing.cut:
        text += f"; {packing.cut} documents are longer than a row and lose their end"
    if packing.dropped:
        text += f"; {packing.dropped} of them lose all of their answer and are left out"
    return text


def _compute(config: TrainConfig) -> str:
    if config.compute != "auto":
        return config.compute
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


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
    }


def _command(config: TrainConfig) -> str:
    return f"specjax train --config {shlex.quote(f'experiments/configs/{config.name}.json')}"
