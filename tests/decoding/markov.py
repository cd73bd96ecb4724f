"""A target and a drafter whose laws are tables, so that the law of a decoded text is a product."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import tiny
from scipy import stats

from specjax.decoding.drafting import DFlash, Plain
from specjax.decoding.sampling import argmax, choose, law
from specjax.models import hub
from specjax.types import Proposal


def target(directory, p):
    """A real network whose next-token law behind x is p[x], whatever came before."""
    vocab = len(p)
    loaded = hub.load_target(tiny.successor_target(directory, range(vocab)))
    # The last norm turns a one-hot row of E entries into one of this length.
    scale = (1 / vocab + loaded.config.layers.rms_norm_eps) ** -0.5
    head = jnp.asarray(np.log(p).T / scale, jnp.float32)
    return replace(loaded, params=loaded.params | {"head": head})


@dataclass(frozen=True)
class Table(Plain):
    """Draws slot r from q[last token, what it remembers]: a tokenwise law given the past.

    It remembers the token that was rejected at the very position of the slot, else the first
    rejected one, else nothing (V). Parameters: `q` [V, V + 1, V], logits.
    """

    num_draft: int = 3
    keeps: ClassVar = frozenset({"tokens"})
    _noise = DFlash._noise

    def propose(self, params, vocabulary, draft, tokens, length, rejected, key, sampling):
        q, K = params["q"], self.num_draft
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        # Row 0 of the buffer stands for the new anchor, row r + 1 for slot r.
        old = jnp.pad(rejected.tokens, ((0, 0), (0, 1)))[:, 1:]
        same = jnp.arange(1, K + 1, dtype=jnp.int32)[None] < rejected.count[:, None]
        memory = jnp.where(same, old, rejected.tokens[:, :1])
        memory = jnp.where(rejected.count[:, None] > 0, memory, q.shape[-1])
        logits = q[last, memory]  # [B, K, V]
        count = jnp.full_like(length, K)
        if sampling.drafting == "greedy":
            return Proposal(argmax(logits), count), draft
        noise = self._noise(sampling, key, length - 1, q.shape[-1])
        return Proposal(choose(logits, sampling, noise), count, self.law(logits, sampling)), draft

    def law(self, logits, sampling):
        return law(logits, sampling)


@dataclass(frozen=True)
class Boastful(Table):
    """Hands over the law of other tokens than those it drew from."""

    def law(self, logits, sampling):
        return jnp.roll(law(logits, sampling), 1, axis=-1)


def text_law(p, first, length, temperature):
    """The exact law [V ** length] of the tokens behind `first`, in the order of the digits."""
    p = np.asarray(p, float) ** (1 / temperature)
    p /= p.sum(1, keepdims=True)
    out = p[first]
    for _ in range(length - 1):
        out = out[..., None] * p
    return out.ravel()


def chi_square(counts, law):
    """The statistic and its degrees of freedom; the rarest cells share one that expects 5."""
    order = np.argsort(law)
    expected, counts = law[order] * counts.sum(), counts[order]
    pooled = max(np.sum(expected < 5), np.searchsorted(np.cumsum(expected), 5) + 1)
    starts = np.append(0, np.arange(pooled, len(law)))
    expected, counts = (np.add.reduceat(x, starts) for x in (expected, counts))
    return float(np.sum((counts - expected) ** 2 / expected)), len(expected) - 1


def critical(freedom, false_alarm=1e-9):
    return float(stats.chi2.isf(false_alarm, freedom))
