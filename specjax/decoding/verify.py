"""Verification rules: which drafts are kept and what the next token's law is.

Every rule is a pure function of one row; `jax.vmap` lifts it over a batch. Row k of `p` is the
target's processed law (see `sampling.law`) behind the anchor and the first k drafts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import Array, SparseLaw

# A residual this small is rounding: p and q agree, and it is drawn from as rarely as it is small.
_NEAR_ZERO = 1e-9


# The ways of drafting under which a rule's output has the target's law. A rule that reads the law
# of each draft takes argmax drafts as point masses: a soft law with them biases the output.
RULES = {
    "match": ("greedy", "coupled", "independent"),
    "token": ("greedy", "independent"),
    "block": ("greedy", "independent"),
}


def check_rule(name: str, drafting: str) -> None:
    """Checks that a rule exists and keeps the target's law with this way of drafting.

    Raises:
      ValueError: an unknown rule, or one that the way of drafting would bias.
    """
    if name not in RULES:
        raise ValueError(f"verify={name!r} is unknown: choose from {', '.join(RULES)}")
    allowed = RULES[name]
    if drafting not in allowed:
        raise ValueError(
            f"verify={name!r} with drafting={drafting!r} would not sample from the target: this "
            "rule needs fresh noise in every round, and noise shared by position comes back when "
            "a rejected position is drafted again; use verify='match', or drafting="
            + " or ".join(map(repr, allowed))
        )


def match(choice: Array, tokens: Array, count: Array) -> Array:
    """Accepts drafts while they equal the target's own choices; exact whatever the drafter does.

    Args:
      choice: [W] int32, the target's token behind every verify row: argmax or a draw.
      tokens: [K] int32 drafts; those at or past `count` are not read.
      count: [] int32, how many drafts are real, at most K.

    Returns:
      accepted, [] int32: the next token is `choice[accepted]`, never a new draw.
    """
    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return _prefix((choice[: tokens.shape[0]] == tokens) & (slots < count))


def token(
    p: Array, q: Array | SparseLaw | None, tokens: Array, count: Array, uniforms: Array
) -> tuple[Array, Array]:
    """Speculative sampling: accepts draft d with probability min(1, p(d) / q(d)), left to right.

    The output has the target's law if `q` is the law that produced the drafts and the uniforms
    are fresh. Source: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).

    Args:
      p: [W, V] float32, the target's processed laws.
      q: the processed laws that produced the drafts: [K, V] float32; or one row of a `SparseLaw`
        (ids and probs [K, C], ids distinct and inside the vocabulary, padding has probability 0;
        a repeated id counts with the sum of its probabilities); or None, a point mass on each
        draft: the law of argmax drafts, and exact for any other, but then it accepts like match.
      tokens: [K] int32 drafts; those at or past `count` are not read, nor their q.
      count: [] int32, how many drafts are real, at most K.
      uniforms: [K] float32 in [0, 1), fresh in every round.

    Returns:
      accepted, [] int32, and the law [V] float32 of the next token: the residual (p - q)_+ at the
      first rejection, normalised (p itself if it vanishes), or `p[accepted]` if all were accepted.
    """
    K = tokens.shape[0]
    if K == 0:
        return jnp.int32(0), p[0]
    slots = jnp.arange(K, dtype=jnp.int32)
    # A product, not a quotient: q(d) = 0 divides nothing, and p(d) = 0 is never accepted.
    accept = uniforms * _probability(q, tokens) < p[slots, tokens]
    accepted = _prefix(accept & (slots < count))
    behind = p[accepted]
    rest = _residual(behind, q, tokens, jnp.minimum(accepted, K - 1))
    total = jnp.sum(rest)
    usable = (accepted < count) & (total > _NEAR_ZERO)
    return accepted, jnp.where(usable, rest / jnp.where(usable, total, 1.0), behind)


def block(
    p: Array, q: Array | SparseLaw | None, tokens: Array, count: Array, uniforms: Array
) -> tuple[Array, Array]:
    """Block verification: decides about the drafts jointly, and accepts no fewer than `token` does
    in the mean.

    The chance of keeping at least i drafts is the running product of p(d) / q(d), clipped to 1 at
    every step: what an early slot lost, a later one that was proposed too rarely pays back. The
    last slot that succeeds counts, whatever failed before it. The output has the target's law under
    the same conditions as for `token`, with which it agrees for a single draft, for point masses
    and for a deterministic target. Source: Sun et al. (arXiv 2403.10444), algorithm 2.

    Args:
      p, q, tokens, count, uniforms: as for `token`; the uniforms of the slots are independent.

    Returns:
      accepted, [] int32, and the law [V] float32 of the next token: `p[accepted]` if all were
      accepted, else the residual (r p - q)_+ with r the running product there, normalised (p itself
      if it vanishes).
    """
    K = tokens.shape[0]
    if K == 0:
        return jnp.int32(0), p[0]
    slots = jnp.arange(K, dtype=jnp.int32)
    real = slots < count
    drafted, proposed = p[slots, tokens], _probability(q, tokens)
    # A draft that q excludes was never drawn: its ratio is finite all the same.
    ratio = jnp.where(real, drafted / jnp.maximum(proposed, jnp.finfo(jnp.float32).tiny), 0.0)

    def clipped(run: Array, ratio: Array) -> tuple[Array, Array]:
        run = jnp.minimum(run * ratio, 1.0)
        return run, run

    keep = jnp.concatenate([jnp.ones(1), lax.scan(clipped, jnp.float32(1.0), ratio)[1]])  # [W]
    # The mass that leaves the prefix of i drafts, for i below count.
    rest = jax.vmap(_residual, (0, None, None, 0))(
        keep[:K, None] * p[:K], q, tokens, slots
    )  # [K, V]
    leaves = jnp.concatenate([jnp.sum(rest, axis=-1), jnp.zeros(1)])
    stays = leaves + 1.0 - keep
    chance = jnp.where(stays > 0, leaves / jnp.where(stays > 0, stays, 1.0), 1.0)
    drafts = slots + 1
    chance = jnp.where(drafts == count, keep[1:], chance[1:])
    accepted = jnp.max(jnp.where(real & (uniforms < chance), drafts, 0))
    behind = p[accepted]
    total = leaves[accepted]
    usable = (accepted < count) & (total > _NEAR_ZERO)
    law = rest[jnp.minimum(accepted, K - 1)] / jnp.where(usable, total, 1.0)
    return accepted, jnp.where(usable, law, behind)


def _prefix(accept: Array) -> Array:
    """How many of accept [K] are true before the first that is not."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32)))


def _probability(q: Array | SparseLaw | None, tokens: Array) -> Array:
    """q(d) of every draft, [K]."""
    if q is None:
        return jnp.ones(tokens.shape, jnp.float32)
    if isinstance(q, SparseLaw):
        return jnp.sum(jnp.where(q.ids == tokens[:, None], q.probs, 0.0), axis=-1)
    return q[jnp.arange(tokens.shape[0], dtype=jnp.int32), tokens]


def _residual(p: Array, q: Array | SparseLaw | None, tokens: Array, slot: Array) -> Array:
    """(p - q)_+ of p [V] and the law of one slot, not normalised."""
    if q is None:
        vocabulary = jnp.arange(p.shape[0], dtype=jnp.int32)
        return jnp.where(vocabulary == tokens[slot], 0.0, p)
    if isinstance(q, SparseLaw):
        return jnp.maximum(p.at[q.ids[slot]].add(-q.probs[slot]), 0.0)
    return jnp.maximum(p - q[slot], 0.0)
