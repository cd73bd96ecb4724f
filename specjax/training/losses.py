"""Losses of drafted blocks and weights of their slots, as pure functions of `Scores`.

A loss gives a value for every slot; one about a whole block gives all its slots the same value, so
that the weighted mean over slots is one over blocks. To add a loss or a way to weigh, write the
function and name it in `LOSSES` or `WEIGHTS`.

Which loss goes with which rule (x is recorded text, r_k = q(x_k) / p(x_k), R_i = r_1 ... r_i):

    rule                      expected accepted drafts           loss
    match, independent draws  E sum_i prod_{k<=i} q(x_k)         chain
    token                     E sum_i prod_{k<=i} min(1, r_k)    token
    block                     E sum_i min(1, R_1, ..., R_i)      bv, bv_linear, bv_cheap

The expectations are over text that the target wrote at the temperature of verification; they need
no rollout. With text written greedily all three are the chain loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from specjax.training.acceptance import LEAST, log_ratios, running
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.training.objectives import Objective


class Scores(NamedTuple):
    """What losses and weights read of some blocks; n blocks of K slots, V' tokens."""

    log_q: Array  # [n, K, V'] float32, the drafter's law
    label: Array  # [n, K] float32, log q of the label; -inf where V' lacks it
    mask: Array  # [n, K] bool: the first so many slots
    log_p: Array | None  # [n, K, V'] float32, the target's law, without gradient
    target_label: Array | None  # [n, K] float32, log p of the label
    hit: Array  # [n, K] bool: the label is the drafter's first choice
    progress: Array  # [] float32, the share of the run that is done


# ------------------------------------------------------------------------------------- by slot
def cross_entropy(objective: Objective, scores: Scores) -> Array:
    """-log q of the recorded token."""
    return -scores.label


def kl(objective: Objective, scores: Scores) -> Array:
    """KL(p || q) of the target's law from the drafter's."""
    log_p = _target(scores)
    return jnp.sum(jnp.exp(log_p) * (log_p - scores.log_q), axis=-1)


def reverse_kl(objective: Objective, scores: Scores) -> Array:
    """KL(q || p)."""
    log_p = jnp.maximum(_target(scores), LEAST)
    return jnp.sum(jnp.exp(scores.log_q) * (scores.log_q - log_p), axis=-1)


def total_variation(objective: Objective, scores: Scores) -> Array:
    """1 - sum min(p, q): the chance that the token rule rejects the slot."""
    return 1.0 - _overlap(scores)


def lk(objective: Objective, scores: Scores) -> Array:
    """-log sum min(p, q) (LK, arXiv 2602.23881): the gradient of TV, larger where little fits."""
    return -jnp.maximum(jnp.log(_overlap(scores)), LEAST)


def lk_hybrid(objective: Objective, scores: Scores) -> Array:
    """lambda KL + (1 - lambda) TV with lambda = exp(-3 overlap), which is not differentiated."""
    overlap = _overlap(scores)
    share = jnp.exp(-3.0 * jax.lax.stop_gradient(overlap))
    return share * kl(objective, scores) + (1.0 - share) * (1.0 - overlap)


# ------------------------------------------------------------------------------------ by block
def focal(objective: Objective, scores: Scores) -> Array:
    """-log q of the first slot whose first choice is wrong; 0 where all are right
    (arXiv 2606.11552)."""
    wrong = ~scores.hit & scores.mask
    first = wrong & (jnp.cumsum(wrong.astype(jnp.int32), axis=-1) == 1)
    return _of_block(scores, jnp.sum(jnp.where(first, -scores.label, 0.0), axis=-1))


def chain(objective: Objective, scores: Scores) -> Array:
    """-mean_i prod_{k<=i} q(x_k) (arXiv 2606.11552)."""
    label = jnp.where(scores.mask, jnp.maximum(scores.label, LEAST), 0.0)
    return _of_block(scores, -_mean(scores, jnp.exp(jnp.cumsum(label, axis=-1))))


def token(objective: Objective, scores: Scores) -> Array:
    """-mean_i prod_{k<i} min(1, r_k) overlap_i: what the token rule accepts."""
    ratio = jnp.minimum(_log_ratio(scores), 0.0)
    before = jnp.cumsum(ratio, axis=-1) - ratio
    return _of_block(scores, -_mean(scores, jnp.exp(before) * _overlap(scores)))


def bv(objective: Objective, scores: Scores) -> Array:
    """-(1 / b) log mean_i s_i^b, b from 0 to 1 over the first half of the run.

    s_i is the chance that block verification keeps slot i, given the recorded text before it (BV,
    arXiv 2609.34832; the power mean and its course are ours). b = 1 is the logarithm of the
    expected accepted length, b = 0 the mean of the logarithms, which gives every slot a voice.
    """
    log_s = jnp.maximum(_log_kept(scores), LEAST)
    b = jnp.clip(2.0 * scores.progress, 1e-3, 1.0)
    log_s = jnp.where(scores.mask, log_s, -jnp.inf)
    count = jnp.maximum(jnp.sum(scores.mask.astype(jnp.float32), axis=-1), 1.0)
    safe = jnp.where(scores.mask[:, :1], log_s, 0.0)  # a block without labels has no mean
    log_mean = jax.nn.logsumexp(b * safe, axis=-1) - jnp.log(count)
    return _of_block(scores, -log_mean / b)


def bv_linear(objective: Objective, scores: Scores) -> Array:
    """-mean_i s_i: the exact objective of block verification."""
    return _of_block(scores, -_mean(scores, jnp.exp(_log_kept(scores))))


def bv_cheap(objective: Objective, scores: Scores) -> Array:
    """-mean_i min(1, R_1, ..., R_i): the same mean from the labels alone, with more variance."""
    _, low = running(_log_ratio(scores))
    return _of_block(scores, -_mean(scores, jnp.exp(low)))


LOSSES: Mapping[str, Callable[[Objective, Scores], Array]] = {
    "ce": cross_entropy,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
    "focal": focal,
    "chain": chain,
    "token": token,
    "bv": bv,
    "bv_linear": bv_linear,
    "bv_cheap": bv_cheap,
}
READ_TARGET = frozenset(LOSSES) - {"ce", "focal", "chain"}
OF_SAMPLES = frozenset({"token", "bv", "bv_linear", "bv_cheap"})  # take the text as drawn from p


# ------------------------------------------------------------------------------------- weights
def exponential(objective: Objective, block_size: int, scores: Scores) -> Array:
    """exp(-(k - 1) / gamma) for slot k = 1 .. K, [1, K] (DFlash, arXiv 2602.06036)."""
    k = jnp.arange(scores.mask.shape[-1], dtype=jnp.float32)[None, :]
    return jnp.exp(-k / objective.decay(block_size))


def dpace(objective: Objective, block_size: int, scores: Scores) -> Array:
    """sum_{j >= k} prod_{i <= j} ((1 - alpha) q_i + alpha), [n, K] (D-PACE, arXiv 2605.18810).

    q_i is the drafter's probability of the label. A slot counts for all later ones that it keeps
    alive; slots without a label keep nothing.
    """
    alive = (1 - objective.alpha) * jnp.exp(scores.label) + objective.alpha
    reach = jnp.where(scores.mask, jnp.cumprod(jnp.where(scores.mask, alive, 1.0), axis=-1), 0.0)
    return jnp.flip(jnp.cumsum(jnp.flip(reach, -1), axis=-1), -1)


def vat(objective: Objective, block_size: int, scores: Scores) -> Array:
    """1 before the first slot whose first choice is wrong, then exponential weights from the
    start, [n, K] (VAT, arXiv 2608.30135)."""
    base = exponential(objective, block_size, scores)[0]
    wrong = jnp.cumsum((~scores.hit).astype(jnp.int32), axis=-1) > 0
    behind = jnp.cumsum(wrong.astype(jnp.int32), axis=-1)
    return jnp.where(wrong, base[jnp.maximum(behind - 1, 0)], 1.0)


WEIGHTS: Mapping[str, Callable[[Objective, int, Scores], Array]] = {
    "exponential": exponential,
    "dpace": dpace,
    "vat": vat,
}
DECAYING = frozenset({"exponential", "vat"})  # read gamma


# ----------------------------------------------------------------------------- acceptance states
def _target(scores: Scores) -> Array:
    assert scores.log_p is not None
    return scores.log_p


def _overlap(scores: Scores) -> Array:
    """sum min(p, q) of every slot, [n, K]."""
    return jnp.sum(jnp.exp(jnp.minimum(_target(scores), scores.log_q)), axis=-1)


def _log_ratio(scores: Scores) -> Array:
    """log r_k of the labels, [n, K]; 0 without one."""
    assert scores.target_label is not None
    return log_ratios(scores.label, scores.target_label, scores.mask)


def _log_kept(scores: Scores) -> Array:
    """log s_i, s_i = sum_v min(a_{i-1} p_i(v), R_{i-1} q_i(v)), [n, K]: the mean of a_i over the
    token of slot i."""
    ratio, low = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in running(_log_ratio(scores)))
    # The prefix was proposed too rarely by this factor, at least 1: so much may q_i lack.
    slack = (ratio - low)[..., None]
    shared = jnp.sum(jnp.exp(jnp.minimum(_target(scores), slack + scores.log_q)), axis=-1)
    return low + jnp.log(jnp.maximum(shared, jnp.exp(LEAST)))


def _mean(scores: Scores, values: Array) -> Array:
    """The mean [n] of values [n, K] over the slots with a label."""
    count = jnp.maximum(jnp.sum(scores.mask.astype(jnp.float32), axis=-1), 1.0)
    return jnp.sum(jnp.where(scores.mask, values, 0.0), axis=-1) / count


def _of_block(scores: Scores, value: Array) -> Array:
    """A block's value [n] in all its slots."""
    return jnp.broadcast_to(value[:, None], scores.mask.shape)
