"""How far a recorded text would have been accepted: states that losses and closed forms share.

Along a text x that the target wrote, with r_k = q(x_k) / p(x_k), the first i tokens of a block are
kept with the chance

    match, independent draws  prod_{k<=i} q(x_k)
    match, coupled draws      prod_{k<=i} of the chance that both choose x_k, given that p does
    token                     prod_{k<=i} min(1, r_k)
    block                     min(1, R_1, ..., R_i),  R_i = r_1 ... r_i

given all of the text: what a rule emits behind an accepted draft has the target's law, so that the
text behind it tells nothing about the round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array

LEAST = -80.0  # of a logarithm: below it nothing is learned, and nothing overflows


def log_ratios(log_q: Array, log_p: Array, mask: Array) -> Array:
    """log r_k of the recorded tokens, [..., K], from their log probabilities; 0 without a label.

    Text that the target could not have written (p = 0, recorded at other settings) is taken as
    certain, so that it teaches nothing but its own probability.
    """
    known = jnp.where(jnp.isfinite(log_p), log_p, 0.0)
    return jnp.where(mask, jnp.maximum(log_q, LEAST) - known, 0.0)


def running(log_ratio: Array) -> tuple[Array, Array]:
    """log R_i and log a_i = min(0, log R_1, ..., log R_i), [..., K]."""
    total = jnp.cumsum(log_ratio, axis=-1)
    return total, jnp.minimum(jax.lax.cummin(total, axis=total.ndim - 1), 0.0)


def kept(q: Array, p: Array, tokens: Array, mask: Array) -> dict[str, Array]:
    """The chance [..., K] that a round keeps its first i recorded tokens, i = 1 .. K, by rule.

    Args:
      q: [..., K, V] float32, the drafter's processed laws.
      p: [..., K, V] float32, the target's behind the recorded text.
      tokens: [..., K] int32, the recorded text.
      mask: [..., K] bool: the first so many slots; nothing is kept past them.

    Returns:
      Arrays by the names of `generate(verify=)`.
    """

    def of_text(law: Array) -> Array:
        return jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]

    qx, px = of_text(q), of_text(p)
    log_q = jnp.log(qx)
    log_ratio = log_ratios(log_q, jnp.log(px), mask)
    # With the same noise both choose x with the chance 1 / sum_v max(p_v / p_x, q_v / q_x), and the
    # target alone with the chance p_x.
    odds = px / jnp.where(qx > 0, qx, 1.0)
    coupled = -jnp.log(jnp.sum(jnp.maximum(p, q * odds[..., None]), axis=-1))
    logs = {
        "match": jnp.cumsum(jnp.where(qx > 0, coupled, LEAST), axis=-1),
        "match-independent": jnp.cumsum(jnp.maximum(log_q, LEAST), axis=-1),
        "token": jnp.cumsum(jnp.minimum(log_ratio, 0.0), axis=-1),
        "block": running(log_ratio)[1],
    }
    return {rule: jnp.where(mask, jnp.exp(value), 0.0) for rule, value in logs.items()}
