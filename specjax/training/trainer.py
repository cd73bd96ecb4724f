"""One training step: target states in, drafter blocks at random anchors, one optimizer update.

The step is a pure function of (state, batch); its anchors follow from the seed and the step, so
that a run which was interrupted goes on as if it had not been, whatever the micro-batches and
devices it is split into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import drafter as backbone
from specjax.models import target as networks
from specjax.models.drafter import DrafterConfig
from specjax.models.params import init, leaves
from specjax.models.target import TargetConfig
from specjax.training import blocks, branches, config, objectives
from specjax.training.branches import Branches
from specjax.training.features import clean_pass
from specjax.training.objectives import Objective, Sums
from specjax.training.packing import Batch
from specjax.types import Array, Params, Vocabulary


@struct.dataclass
class TrainState:
    """Everything that changes in a run; the data's position is the step itself."""

    step: Array  # [] int32: updates made
    params: Params  # float32
    opt_state: Any


@struct.dataclass
class Starts:
    """Where the blocks of a step begin."""

    plain: blocks.Anchors
    branches: blocks.Anchors | None  # where the rounds of a branch begin
    keys: Array | None  # [B] PRNG keys of what branches draw


@struct.dataclass
class States:
    """The target's states of the rows of a batch, where they are not computed in the step."""

    features: Array  # [B, S, F]
    final_hidden: Array | None  # [B, S, E], where the objective needs the target's distribution


@dataclass(frozen=True)
class Plan:
    """What is static about a step; two equal ones share a compile.

    Attributes:
      target, drafter: the networks.
      objective: what is minimised.
      anchors: blocks per row, A.
      accumulate: micro-batches.
      head_chunk: blocks whose logits exist at a time.
      seed: of the anchors.
      compute: dtype of the drafter's arithmetic.
      steps: of the whole run; a loss may change on the way.
      branches: drafts behind a rejection that are trained too, or None.
    """

    target: TargetConfig
    drafter: DrafterConfig
    objective: Objective
    anchors: int
    accumulate: int = 1
    head_chunk: int = 32
    seed: int = 0
    compute: str = "float32"
    steps: int = 1
    branches: Branches | None = None


def schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, cosine to zero."""
    rising = max(1, round(optimizer.warmup * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=optimizer.learning_rate / (rising + 1),  # the first step counts too
        peak_value=optimizer.learning_rate,
        warmup_steps=rising,
        decay_steps=max(2, steps),
    )


def make_optimizer(optimizer: config.Optimizer, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW or Muon; its state is float32 like the parameters."""
    rate = schedule(optimizer, steps)

    def matrices(params: Params) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    if optimizer.name == "muon":
        from optax import contrib

        update = contrib.muon(
            rate,
            weight_decay=optimizer.weight_decay,
            adam_b1=optimizer.b1,
            adam_b2=optimizer.b2,
        )
    else:
        update = optax.adamw(
            rate,
            b1=optimizer.b1,
            b2=optimizer.b2,
            weight_decay=optimizer.weight_decay,
            mask=matrices,
        )
    return optax.chain(optax.clip_by_global_norm(optimizer.clip), update)


def fresh_state(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    params: Params | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
      plan: of the run.
      optimizer: from `make_optimizer`.
      mesh: devices; parameters are placed by their logical axes.
      params: a drafter to start from; None: random, from the plan's seed.
    """
    table = backbone.table(plan.drafter)
    if params is None:
        params = init(table, _keys(plan)[0])
    # Copies: the state is donated, and the loaded drafter stays the caller's.
    params = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
    step = jnp.int32(0)
    if mesh is not None:
        specs = jax.tree.unflatten(
            jax.tree.structure(params), [param.spec(mesh) for param in leaves(table)]
        )
        params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
        step = jax.device_put(step, NamedSharding(mesh, PartitionSpec()))
    return TrainState(step, params, optimizer.init(params))


def make_step(plan: Plan, optimizer: optax.GradientTransformation) -> Any:
    """The jitted update. The state given is consumed.

    Takes (state, target parameters, batch, the target's states or None to compute them, the sorted
    token ids that logits are restricted to or None). Returns the new state and what a person may
    want to look at: loss, accuracy and count per slot, expected acceptance length, gradient norm.
    """
    return jax.jit(partial(_step, plan, optimizer), donate_argnums=0)


def loss_sums(
    plan: Plan,
    params: Params,
    target_params: Params,
    batch: Batch,
    starts: Starts,
    states: States | None,
    rows: Array | None,
    progress: Array | float = 1.0,
) -> Sums:
    """The objective over all blocks of a batch, as sums that add up over batches."""
    dtype = jnp.dtype(plan.compute)
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    vocabulary = jax.tree.map(lambda x: x.astype(dtype), networks.vocabulary(target_params))
    clean = None
    if states is None:
        clean = clean_pass(plan.target, target_params, batch, plan.drafter.taps)
        states = States(clean.features, clean.final_hidden)
    score = partial(_score, plan, params, vocabulary, states, rows, progress)
    hidden = blocks.hidden(plan.drafter, params, vocabulary, batch, states.features, starts.plain)
    total = score(hidden, blocks.block_labels(plan.drafter, batch, starts.plain))
    if plan.branches is None:
        return total
    if clean is None:
        raise ValueError("branches need the target in every step: features must be online")
    assert starts.branches is not None
    assert starts.keys is not None
    for draft in branches.drafts(
        plan.branches,
        plan.target,
        plan.drafter,
        target_params,
        params if rows is None else backbone.restrict(params, vocabulary, rows),
        vocabulary,
        batch,
        clean,
        starts.branches,
        starts.keys,
        progress * plan.steps,
    ):
        total += score(draft.hidden, draft.labels)
    return total


def _score(
    plan: Plan,
    params: Params,
    vocabulary: Vocabulary,
    states: States,
    rows: Array | None,
    progress: Array | float,
    hidden: Array,
    labels: blocks.Labels,
) -> Sums:
    """The objective over some blocks."""
    target_hidden = None
    if plan.objective.needs_target:
        if states.final_hidden is None:
            raise ValueError("this objective needs the target's final states; the cache has none")
        target_hidden = blocks.target_rows(states.final_hidden, labels).astype(hidden.dtype)
    return objectives.loss_sums(
        plan.objective,
        plan.drafter,
        params,
        vocabulary,
        hidden,
        labels,
        target_hidden,
        chunk=plan.head_chunk,
        rows=rows,
        progress=progress,
    )


def starts_of(plan: Plan, batch: Batch, step: Array) -> Starts:
    """Where the blocks of a step begin: by the seed and the step, whatever the micro-batches."""
    key = jax.random.fold_in(_keys(plan)[1], step)
    plain = blocks.draw_anchors(key, batch, plan.anchors)
    if plan.branches is None:
        return Starts(plain, None, None)
    branch_key, draw_key = jax.random.split(jax.random.fold_in(key, 1))
    return Starts(
        plain,
        blocks.draw_anchors(branch_key, batch, plan.branches.anchors),
        jax.random.split(draw_key, batch.tokens.shape[0]),
    )


def _step(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    target_params: Params,
    batch: Batch,
    states: States | None,
    rows: Array | None,
) -> tuple[TrainState, dict[str, Array]]:
    starts = starts_of(plan, batch, state.step)
    progress = state.step.astype(jnp.float32) / plan.steps

    def total(params: Params, piece: Any) -> tuple[Array, Sums]:
        batch, starts, states = piece
        sums = loss_sums(plan, params, target_params, batch, starts, states, rows, progress)
        return sums.loss, sums

    whole = (batch, starts, states)
    if plan.accumulate == 1:
        grads, sums = jax.grad(total, has_aux=True)(state.params, whole)
    else:
        grads, sums = _accumulated(plan.accumulate, total, state.params, whole)
    # A batch without any label has the gradient zero.
    weight = jnp.where(sums.weight > 0, sums.weight, 1.0)
    grads = jax.tree.map(lambda g: g / weight.reshape((1,) * g.ndim), grads)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax needs it
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": sums.mean,
        "accuracy": sums.correct / jnp.maximum(sums.seen, 1),
        "tau": 1.0 + sums.expected / jnp.maximum(sums.blocks, 1),
        "labels": jnp.sum(sums.seen),
        "grad_norm": optax.tree.norm(grads),
    }
    return TrainState(state.step + 1, params, opt_state), metrics


def _keys(plan: Plan) -> Array:
    """Streams of their own for the initial parameters and for the anchors."""
    return jax.random.split(jax.random.key(plan.seed))


def _accumulated(
    count: int, total: Callable[..., Any], params: Params, whole: Any
) -> tuple[Params, Sums]:
    """Gradient and sums over `count` micro-batches; each takes its share of every device."""

    def split(x: Array) -> Array:
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    def body(carry: Any, piece: Any) -> tuple[Any, None]:
        made = jax.grad(total, has_aux=True)(params, piece)
        return jax.tree.map(jnp.add, carry, made), None

    pieces = jax.tree.map(split, whole)
    shapes = jax.eval_shape(
        jax.grad(total, has_aux=True), params, jax.tree.map(lambda x: x[0], pieces)
    )
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(body, zero, pieces)[0]
