"""What a drafter is trained for: losses with their weights, as sums that add up.

Losses and weights are in `training.losses`. Everything is returned as sums over slots, so that
micro-batches and devices add up to what one big batch gives: a mean of means would weigh short
batches up.

The head of the target is most of a training step. It runs over a few blocks at a time, and the
gradient with respect to the hidden states is made in the same visit: the frozen head needs none of
its own, so nothing of the size of the vocabulary is kept for the backward pass, and nothing is
computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax.models import drafter, target
from specjax.models.drafter import DrafterConfig
from specjax.training.blocks import Labels
from specjax.training.losses import DECAYING, LOSSES, OF_SAMPLES, READ_TARGET, WEIGHTS, Scores
from specjax.types import Array, Params, Vocabulary

# Decay of the exponential weights by block size (DFlash, arXiv 2602.06036).
GAMMA: Mapping[int, float] = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Objective:
    """What is minimised: the sum of losses, each slot by its weight.

    Attributes:
      losses: names in `LOSSES` with their coefficients.
      weights: a name in `WEIGHTS`.
      gamma: decay of "exponential" and "vat"; None: 7, 5, 4 for blocks of 16, 10, 8.
      alpha: smoothing of "dpace", 0 to 1.
      temperature: of both laws, that of verification.
      verification: factor of the verification head's loss (VAT, arXiv 2608.30135); 0: no head.
      finish: the losses of the last part of a run, if others: KL learns fastest from nothing, BV is
        what block verification accepts.
      finish_share: how much of the run that part is.

    Raises:
      ValueError: an unknown name or a number out of range.
    """

    losses: tuple[tuple[str, float], ...] = (("ce", 1.0),)
    weights: str = "exponential"
    gamma: float | None = None
    alpha: float = 0.5
    temperature: float = 1.0
    verification: float = 0.0
    finish: tuple[tuple[str, float], ...] = ()
    finish_share: float = 0.3

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in LOSSES:
                raise ValueError(f"loss {name!r} is unknown; choose from {', '.join(LOSSES)}")
        if not self.losses or len(dict(self.losses)) < len(self.losses):
            raise ValueError(f"losses {self.losses} must name at least one loss, and each once")
        if len(dict(self.finish)) < len(self.finish):
            raise ValueError(f"finish {self.finish} must name each loss once")
        if not 0 < self.finish_share < 1:
            raise ValueError(f"finish_share must be between 0 and 1, not {self.finish_share}")
        if self.weights not in WEIGHTS:
            raise ValueError(
                f"weights {self.weights!r} are unknown; choose from {', '.join(WEIGHTS)}"
            )
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma must be positive, not {self.gamma}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, not {self.alpha}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be positive and finite, not {self.temperature}: for "
                "verification at 0 take the loss chain over greedy text"
            )
        if not 0 <= self.verification < math.inf:
            raise ValueError(f"verification must be 0 or more, not {self.verification}")

    @property
    def names(self) -> tuple[str, ...]:
        """Every loss of the run, each once."""
        return tuple(dict(self.losses + self.finish))

    @property
    def needs_target(self) -> bool:
        """Whether a loss reads the target's distribution."""
        return any(name in READ_TARGET for name in self.names)

    def misread(self, temperature: float, top_k: int = 0, top_p: float = 1.0) -> str | None:
        """What follows where text was recorded at these settings; None where all is as assumed.

        Losses that weigh a text by R_i are expectations over text that the target draws at the
        temperature of verification, from its whole law.
        """
        names = ", ".join(name for name in self.names if name in OF_SAMPLES)
        if not names or (temperature, top_k, top_p) == (self.temperature, 0, 1.0):
            return None
        if temperature == 0:
            return (
                f"recorded greedily, and {names} takes text as drawn at temperature "
                f"{self.temperature:g}: it matches no verifier. Under greedy verification every "
                "rule accepts what the loss chain counts: take it, or record the text at "
                f"temperature {self.temperature:g}"
            )
        filters = "" if (top_k, top_p) == (0, 1.0) else f", top_k {top_k}, top_p {top_p:g}"
        return (
            f"recorded at temperature {temperature:g}{filters}, and {names} takes text as drawn at "
            f"temperature {self.temperature:g} without filters: likely texts count too much, and "
            "the mean is no longer what a rule accepts. Record the text so, or set "
            "objective.temperature to what the text has"
        )

    def decay(self, block_size: int) -> float:
        """Gamma for blocks of this size; ValueError where it has no default."""
        if self.gamma is not None:
            return self.gamma
        if block_size not in GAMMA:
            raise ValueError(
                f"gamma has no default for blocks of {block_size} (only for "
                f"{', '.join(map(str, GAMMA))}): set objective.gamma"
            )
        return GAMMA[block_size]


@struct.dataclass
class Sums:
    """Sums over slots and blocks, float32. They add up; loss / weight is the mean."""

    loss: Array  # []: weighted; the only one with a gradient
    weight: Array  # []: of all labels
    correct: Array  # [K]: labels that are the drafter's first choice
    seen: Array  # [K]: labels
    expected: Array  # []: drafts that greedy verification of the recorded text would accept
    blocks: Array  # []: blocks with a label

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)

    @property
    def mean(self) -> Array:
        """loss / weight, and 0 where there was no label."""
        return self.loss / jnp.where(self.weight > 0, self.weight, 1.0)


class Verdicts(NamedTuple):
    """What simulated verification says of every slot, [B, A, K]."""

    hit: Array  # bool: its label is the drafter's first choice
    weight: Array  # float32; 0 without a label


def loss_sums(
    objective: Objective,
    config: DrafterConfig,
    params: Params,
    vocabulary: Vocabulary,
    hidden: Array,
    labels: Labels,
    target_hidden: Array | None = None,
    *,
    chunk: int,
    rows: Array | None = None,
    progress: Array | float = 1.0,
) -> Sums:
    """Runs the head over all blocks and sums the objective.

    Differentiable in `hidden` and in the verification head (reverse mode), through `loss` alone;
    vocabulary and target are frozen. Memory is that of one chunk's logits, whatever the number of
    blocks.

    Args:
      objective: losses and weights.
      config: the drafter.
      params: its parameters.
      vocabulary: the target's head, in the dtype of `hidden`.
      hidden: [B, A, K, E] from `blocks.hidden`.
      labels: from `blocks.block_labels`.
      target_hidden: [B, A, K, E], the target's final states from `blocks.target_rows`, where a
        loss reads them.
      chunk: blocks whose logits exist at a time; rounded to the same number of every batch row,
        so that data-parallel rows stay on their devices, and to at least one.
      rows: sorted token ids [V'] that stand for the whole vocabulary. A label outside makes the
        loss infinite.
      progress: share of the run that is done, for losses that change on the way.

    Raises:
      ValueError: no target states, no gamma, a chunk below 1, or a drafter with a head of its own.
    """
    if "head" in params:
        raise ValueError(
            "this drafter has a head of its own over a reduced vocabulary, which is not trained "
            "here; train one with the target's head and restrict the loss by `rows`"
        )
    if objective.needs_target and target_hidden is None:
        raise ValueError(f"losses {objective.names} need the target's final hidden states")
    if objective.weights in DECAYING:
        objective.decay(config.block_size)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    head, tokens = vocabulary.head, labels.tokens
    if rows is not None:
        found = jnp.searchsorted(rows, tokens).astype(jnp.int32)
        found = jnp.minimum(found, rows.shape[0] - 1)
        tokens = jnp.where(rows[found] == tokens, found, -1)
        head = head[rows]
    teacher = target_hidden if objective.needs_target else None
    per_row = max(1, chunk // hidden.shape[0])
    progress = jnp.asarray(progress, jnp.float32)
    fixed = head, tokens, labels.mask, teacher, progress
    sums, verdicts = _head_sums((objective, config, per_row), hidden, *fixed)
    if not objective.verification:
        return sums
    sure = _verification(params, hidden, verdicts)
    return replace(sums, loss=sums.loss + objective.verification * sure)


def _verification(params: Params, hidden: Array, verdicts: Verdicts) -> Array:
    """Binary cross-entropy of the verification head, []: is a slot right, and all before it?"""
    logits = drafter.confidence(params, hidden)
    right = jnp.cumprod(verdicts.hit.astype(jnp.float32), axis=-1)
    return jnp.sum(verdicts.weight * (jax.nn.softplus(logits) - right * logits))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_sums(static: Any, hidden: Array, *fixed: Any) -> tuple[Sums, Verdicts]:
    """The sums; `fixed`: head [V', E], tokens, mask [B, A, K], target states or None, progress."""
    return _over_chunks(static, hidden, *fixed, with_gradient=False)[0]


def _forward(static: Any, hidden: Array, *fixed: Any) -> tuple[tuple[Sums, Verdicts], Array]:
    return _over_chunks(static, hidden, *fixed, with_gradient=True)


def _backward(static: Any, gradient: Array, cotangents: Any) -> tuple[Array | None, ...]:
    scale = cotangents[0].loss.astype(gradient.dtype).reshape((1,) * gradient.ndim)
    return gradient * scale, None, None, None, None, None


_head_sums.defvjp(_forward, _backward)


def _over_chunks(
    static: Any,
    hidden: Array,
    head: Array,
    tokens: Array,
    mask: Array,
    teacher: Array | None,
    progress: Array,
    *,
    with_gradient: bool,
) -> tuple[tuple[Sums, Verdicts], Any]:
    """The sums and verdicts of all blocks and, if asked for, the gradient of `loss` in `hidden`."""
    objective, config, per_row = static
    B, A, K, _ = hidden.shape
    steps = -(-A // per_row)
    size = -(-A // steps)  # even chunks: the last one holds the fewest rows of padding

    def split(x: Array) -> Array:  # [B, A, ...] -> [steps, B, size, ...]
        x = jnp.pad(x, ((0, 0), (0, steps * size - A)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(B, steps, size, *x.shape[2:]).swapaxes(0, 1)

    def body(total: Sums, piece: Any) -> tuple[Sums, Any]:
        def loss(x: Array, *rest: Any) -> tuple[Array, tuple[Sums, Verdicts]]:
            sums, verdicts = _chunk_sums(objective, config, head, progress, x, *rest)
            return sums.loss, (sums, verdicts)

        gradient = None
        if with_gradient:
            gradient, (sums, verdicts) = jax.grad(loss, has_aux=True)(*piece)
        else:
            _, (sums, verdicts) = loss(*piece)
        return total + sums, (gradient, verdicts)

    def joined(x: Array) -> Array:  # the inverse of split
        return x.swapaxes(0, 1).reshape(B, steps * size, *x.shape[3:])[:, :A]

    zero, slots = jnp.zeros((), jnp.float32), jnp.zeros((K,), jnp.float32)
    start = Sums(zero, zero, slots, slots, zero, zero)
    pieces = jax.tree.map(split, (hidden, tokens, mask, teacher))
    sums, made = jax.lax.scan(body, start, pieces)
    gradient, verdicts = jax.tree.map(joined, made)
    return (sums, verdicts), gradient


def _chunk_sums(
    objective: Objective,
    config: DrafterConfig,
    head: Array,
    progress: Array,
    hidden: Array,  # [B, size, K, E]
    tokens: Array,
    mask: Array,
    teacher: Array | None,
) -> tuple[Sums, Verdicts]:
    shape, (K, E) = mask.shape, hidden.shape[2:]
    mask, tokens = mask.reshape(-1, K), tokens.reshape(-1, K)
    vocabulary = Vocabulary(head, head)
    heat = objective.temperature
    logits = drafter.unembed(config, {}, vocabulary, hidden.reshape(-1, K, E)) / heat  # [n, K, V']
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_total = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    chosen = _logit_of(logits, tokens)
    log_p = target_label = None
    if teacher is not None:
        states = jax.lax.stop_gradient(teacher).reshape(-1, K, E)
        log_p = jax.nn.log_softmax(target.unembed(vocabulary, states) / heat, axis=-1)
        target_label = _logit_of(log_p, tokens)
    hit = mask & (chosen == top)  # argmax costs a pass; ties are no matter
    scores = Scores(
        logits - log_total[..., None], chosen - log_total, mask, log_p, target_label, hit, progress
    )
    fixed = jax.lax.stop_gradient(scores)
    weights = WEIGHTS[objective.weights](objective, config.block_size, fixed)
    weights = jnp.where(mask, weights, 0.0)
    loss = _loss(objective, scores)
    hits = hit.astype(jnp.float32)
    seen = mask.astype(jnp.float32)
    sums = Sums(
        loss=jnp.sum(weights * jnp.where(mask, loss, 0.0)),
        weight=jnp.sum(weights),
        correct=jnp.sum(hits, axis=0),
        seen=jnp.sum(seen, axis=0),
        expected=jnp.sum(jnp.cumprod(hits, axis=-1)),
        blocks=jnp.sum(seen[:, 0]),
    )
    return sums, Verdicts(hit.reshape(shape), weights.reshape(shape))


def _loss(objective: Objective, scores: Scores) -> Array:
    """The losses that count at this point of the run, [n, K]; either part is a run of its own."""

    def total(losses: tuple[tuple[str, float], ...], progress: Array) -> Array:
        now = scores._replace(progress=progress)
        return jnp.asarray(sum(factor * LOSSES[name](objective, now) for name, factor in losses))

    done, share = scores.progress, objective.finish_share
    if not objective.finish:
        return total(objective.losses, done)
    return jax.lax.cond(
        done < 1 - share,
        lambda: total(objective.losses, done / (1 - share)),
        lambda: total(objective.finish, (done - 1 + share) / share),
    )


@jax.custom_vjp
def _logit_of(logits: Array, tokens: Array) -> Array:
    """logits [n, K, V'] of the tokens [n, K]; -inf for a token of -1.

    The gradient is a comparison that melts into whatever reads it, where that of a gather would be
    a scatter into zeros of the size of the logits.
    """
    found = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, :, None], axis=-1)[..., 0]
    return jnp.where(tokens >= 0, found, -jnp.inf)


def _logit_of_forward(logits: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _logit_of(logits, tokens), (jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2), tokens)


def _logit_of_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    ids, tokens = saved
    return jnp.where(ids == tokens[:, :, None], cotangent[:, :, None], 0.0), None


_logit_of.defvjp(_logit_of_forward, _logit_of_backward)
