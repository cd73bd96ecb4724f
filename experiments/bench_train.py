"""One training step of a SmolLM2-135M drafter: ours against `speculators` 0.9.0 (torch).

Run by `make bench-train`, in the environment that has torch too. Both sides start from the same
drafter (three layers, block 8, five taps), read the same stored states of the target for 4 rows of
352 tokens, place the same 32 blocks per row, compute the loss over the full vocabulary of 49,152,
its gradient, clip it and update by AdamW; everything float32, on the same cores. `speculators`
runs its own forward with its eager losses, its own optimizer, and either of its attentions that a
CPU can run; it packs the four rows into one. Nothing is timed unless both losses are equal.

The two losses are cross-entropy and KL to the target's law. For cross-entropy `speculators` makes
its labels from the target's states, one more pass of the head, where ours are the recorded tokens;
for KL both sides need that pass.

time     milliseconds of a step; the arms in turn, medians over the rounds, and the ratio of
         each round to the faster of the two attentions of `speculators`
memory   bytes that our compiled step needs beyond its arguments, by anchors and vocabulary
losses   our step with every kind of loss, against cross-entropy: `--part losses` needs no torch
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import drafter as backbone
from specjax.models import drafter_hf, params, target
from specjax.models.drafter import DrafterConfig
from specjax.models.storage import write_directory
from specjax.training import blocks, config, trainer
from specjax.training.objectives import Objective
from specjax.training.packing import Batch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "golden"))

ROWS, LENGTH, PROMPT, ANCHORS, BLOCK, LAYERS, CHUNK = 4, 352, 32, 32, 8, 3, 32
TAPS, MASK, VOCAB, RATE = (1, 8, 14, 20, 27), 16, 49_152, 1e-4
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
EPS = 1e-5  # of the target's last norm, which `speculators` applies itself


@dataclass(frozen=True)
class Problem:
    """What both sides are given."""

    embedding: np.ndarray  # [V, E], the head too
    features: np.ndarray  # [B, S, F]
    before_norm: np.ndarray  # [B, S, E], the target's last states before its last norm
    batch: Batch
    anchors: blocks.Anchors


# An arm makes one step and returns its loss, summed over slots and divided by their number.
Arm = Callable[[], float]


def network() -> DrafterConfig:
    """The drafter, in the shapes of its target's layers."""
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "num_target_layers": TARGET["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    }
    return drafter_hf.config_from_hf(TARGET | own)


def make_plan(loss: str, anchors: int = ANCHORS, vocab: int = VOCAB) -> trainer.Plan:
    """Our step; both sides weigh slot k by exp(-(k - 1) / 4)."""
    return trainer.Plan(
        target=target.config_from_hf(TARGET | {"vocab_size": vocab}),
        drafter=network(),
        objective=Objective(losses=((loss, 1.0),), gamma=4.0),
        anchors=anchors,
        head_chunk=CHUNK,
    )


def make_problem(plan: trainer.Plan) -> Problem:
    """Random states; every token is the target's own first choice, as in a greedy answer."""
    rng = np.random.default_rng(0)
    E, F = TARGET["hidden_size"], TARGET["hidden_size"] * len(TAPS)
    embedding = rng.normal(0, 0.05, (VOCAB, E)).astype(np.float32)
    features = rng.normal(0, 1, (ROWS, LENGTH, F)).astype(np.float32)
    states = rng.normal(0, 1, (ROWS, LENGTH, E)).astype(np.float32)
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    tokens[:, 1:] = (normed(states) @ embedding.T).argmax(-1)[:, :-1]
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    # `speculators` reads past the end of a block at the end of a row: there is no answer there.
    supervised = (positions >= PROMPT) & (positions < LENGTH - BLOCK)
    batch = Batch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        start=jnp.zeros((ROWS, LENGTH), jnp.int32),
        document=jnp.broadcast_to(jnp.arange(ROWS, dtype=jnp.int32)[:, None], tokens.shape),
        supervised=jnp.asarray(supervised),
        source=jnp.arange(ROWS * LENGTH, dtype=jnp.int32).reshape(tokens.shape),
    )
    anchors = trainer.starts_of(plan, batch, jnp.int32(0)).plain  # those of our first step
    return Problem(embedding, features, states, batch, anchors)


def normed(x: np.ndarray) -> np.ndarray:
    """The target's last norm, with weights of one."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


# ---------------------------------------------------------------------------------------- ours
def our_arm(plan: trainer.Plan, problem: Problem, start: Any) -> Arm:
    """The trainer's own step."""
    optimizer = trainer.make_optimizer(adamw(), steps=1000)
    step = trainer.make_step(plan, optimizer)
    state = trainer.fresh_state(plan, optimizer, params=start)
    weights = {"embed": jnp.asarray(problem.embedding)}
    final = jnp.asarray(normed(problem.before_norm))
    states = trainer.States(
        jnp.asarray(problem.features), final if plan.objective.needs_target else None
    )
    labels = blocks.block_labels(plan.drafter, problem.batch, problem.anchors)
    decay = np.exp(-np.arange(plan.drafter.num_drafts) / 4.0)
    mean_weight = float((np.asarray(labels.mask) * decay).sum() / np.asarray(labels.mask).sum())

    def arm() -> float:
        nonlocal state
        state, metrics = step(state, weights, problem.batch, states, None)
        # Ours is the mean over weights, theirs over slots.
        return float(metrics["loss"]) * mean_weight

    return arm


def adamw() -> config.Optimizer:
    """The settings that both sides share; the rate hardly moves, so the work stays the same."""
    return config.Optimizer(learning_rate=RATE, weight_decay=0.0, clip=1.0, b1=0.9, b2=0.999)


# -------------------------------------------------------------------------------------- theirs
def their_arms(plan: trainer.Plan, problem: Problem, start: Any, loss: str) -> dict[str, Arm]:
    """The package's model, losses and optimizer, once for each attention."""
    from published import load_speculator

    with tempfile.TemporaryDirectory() as folder:
        verifier, drafter = Path(folder, "target"), Path(folder, "drafter")
        norm = np.ones(TARGET["hidden_size"], np.float32)
        tensors = {"model.embed_tokens.weight": problem.embedding, "model.norm.weight": norm}
        write_directory(verifier, tensors, {"config.json": TARGET})
        written = drafter_hf.config_to_speculators(
            plan.drafter, verifier=str(verifier), architectures=TARGET["architectures"]
        )
        tensors = params.save(backbone.table(plan.drafter), start)
        write_directory(drafter, tensors, {"config.json": written | {"dtype": "float32"}})
        models = {kind: load_speculator(drafter, kind) for kind in ("eager", "sdpa")}
    return {kind: their_arm(model, problem, loss) for kind, model in models.items()}


def their_arm(model: Any, problem: Problem, loss: str) -> Arm:
    """One step as its trainer makes it, without the moves between devices."""
    from unittest import mock

    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.train.optimizers import build_optimizers

    (optimizer,) = build_optimizers(
        model, SimpleNamespace(optimizer="adamw", lr=RATE, weight_decay=0.0)
    )

    def flat(x: Any) -> Any:
        x = np.array(x)
        return torch.from_numpy(x.reshape(1, -1, *x.shape[2:]))

    batch = {
        "hidden_states": flat(problem.features),
        "input_ids": flat(problem.batch.tokens).long(),
        "loss_mask": flat(problem.batch.supervised).float(),
        "verifier_last_hidden_states": flat(problem.before_norm),
        "document_ids": flat(problem.batch.document).long(),
        "position_ids": flat(problem.batch.positions).long(),
    }
    at = np.asarray(problem.anchors.at) + LENGTH * np.arange(ROWS)[:, None]
    anchors = (torch.from_numpy(at.reshape(-1)).long(), flat(problem.anchors.valid)[0])
    settings = {
        "loss_config": resolve_loss_config({"kl": "kl_div"}.get(loss, loss), "eager"),
        "gamma": 4.0,
        "max_anchors": ROWS * ANCHORS,
    }
    model.train()

    def arm() -> float:
        with mock.patch.object(core, "select_anchors", return_value=anchors):
            _, value, _ = model(**batch, **settings)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(value.detach())

    return arm


# --------------------------------------------------------------------------------------- parts
def compare(loss: str, rounds: int) -> None:
    """Times the arms in turn; prints a table and a JSON line."""
    import torch

    plan = make_plan(loss)
    problem = make_problem(plan)
    start = params.init(backbone.table(plan.drafter), jax.random.key(0))
    arms = {"specjax": our_arm(plan, problem, start)} | {
        f"speculators {kind}": arm for kind, arm in their_arms(plan, problem, start, loss).items()
    }
    losses = {name: arm() for name, arm in arms.items()}  # the first step, before any update
    if max(losses.values()) - min(losses.values()) > 1e-4 * abs(losses["specjax"]):
        raise SystemExit(f"the first losses differ, so nothing is timed: {losses}")
    times = timed(arms, rounds)
    mine, *others = times.values()
    fastest = min(others, key=statistics.median)
    ratios = fastest / mine
    show(loss, times)
    row = {
        "loss": loss,
        "rounds": rounds,
        "first_loss": {name: round(value, 5) for name, value in losses.items()},
        "load_average": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "ms": {name: round(statistics.median(v) * 1e3, 1) for name, v in times.items()},
        "ratio_median": round(float(np.median(ratios)), 3),
        "ratio_range": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
    }
    print(json.dumps(row), flush=True)


def losses(rounds: int) -> None:
    """Times our step with every loss; prints a table and the ratios to cross-entropy."""
    plans = {name: make_plan(name) for name in ("ce", "kl", "tv", "token", "bv_linear", "bv")}
    problem = make_problem(plans["ce"])
    start = params.init(backbone.table(network()), jax.random.key(0))
    times = timed({name: our_arm(plan, problem, start) for name, plan in plans.items()}, rounds)
    show("loss", times)
    ratios = {name: values / times["ce"] for name, values in times.items() if name != "ce"}
    middle = {name: round(float(np.median(values)), 3) for name, values in ratios.items()}
    print(json.dumps({"rounds": rounds, "ratio_to_ce": middle}), flush=True)


def timed(arms: dict[str, Arm], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every arm, all in turn, after one step to warm up."""
    for arm in arms.values():
        arm()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            begun = time.perf_counter()
            arm()
            times[name].append(time.perf_counter() - begun)
    return {name: np.array(values) for name, values in times.items()}


def show(title: str, times: dict[str, np.ndarray]) -> None:
    print(f"{title}: {'ms a step':>{33 - len(title)}} {'range':>15} {'tokens/s':>9}")
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"{values.min() * 1e3:.0f}-{values.max() * 1e3:.0f}"
        print(f"{name:25}{middle * 1e3:10.0f} {spread:>15} {ROWS * LENGTH / middle:9.0f}")


def memory(loss: str) -> None:
    """What the compiled step needs beyond its arguments, at 1, 2 and 4 times the anchors."""
    print(f"{loss}: {'vocabulary':>20} {'anchors':>8} {'MB':>8}")
    growth = {}
    for vocab in (VOCAB // 12, VOCAB):
        needed = []
        for factor in (1, 2, 4):
            plan = make_plan(loss, ANCHORS * factor, vocab)
            needed.append(temporary_bytes(plan, vocab) / 1e6)
            print(f"{vocab:>24,} {ANCHORS * factor:>8} {needed[-1]:>8.1f}")
        one, two, four = needed
        growth[f"{vocab}"] = [round(two - one, 1), round((four - two) / 2, 1)]
    print(json.dumps({"loss": loss, f"mb_per_{ANCHORS}_anchors_from_1_and_2": growth}))


def temporary_bytes(plan: trainer.Plan, vocab: int) -> int:
    """Temporary buffers of the compiled step, from shapes alone."""
    optimizer = trainer.make_optimizer(adamw(), steps=1000)
    E = TARGET["hidden_size"]

    def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ints = shaped(ROWS, LENGTH, dtype=jnp.int32)
    batch = Batch(ints, ints, ints, ints, shaped(ROWS, LENGTH, dtype=jnp.bool_), ints)
    states = trainer.States(
        shaped(ROWS, LENGTH, E * len(TAPS)),
        shaped(ROWS, LENGTH, E) if plan.objective.needs_target else None,
    )
    state = jax.eval_shape(lambda: trainer.fresh_state(plan, optimizer))
    step = trainer.make_step(plan, optimizer)
    lowered = step.lower(state, {"embed": shaped(vocab, E)}, batch, states, None)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("time", "memory", "losses", "all"), default="all")
    parser.add_argument("--loss", choices=("ce", "kl"), nargs="*", default=["ce", "kl"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for loss in args.loss:
        if args.part in ("time", "all"):
            compare(loss, args.rounds)
        if args.part in ("memory", "all"):
            memory(loss)
    if args.part in ("losses", "all"):
        losses(args.rounds)


if __name__ == "__main__":
    main()
