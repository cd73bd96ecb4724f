"""How tokens are drawn: temperature, filters, keys and noise.

Two kinds of randomness, never mixed. *Match* needs noise that is keyed by the absolute position
alone, so that plain decoding and every drafter see the same (Daliri et al., arXiv 2408.07978).
The *token* rule needs fresh noise in every round: it conditions on tokens that were rejected, and
noise that comes back with the position would bias what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from specjax.types import Array, Sampling

GREEDY_BELOW = 1e-5  # a temperature up to this is 0: logits over it would leave float32's range
DRAFTING = ("greedy", "coupled", "independent")

_POSITIONS, _ROUNDS = 0, 1  # what a row's key is used for
_CANDIDATES = 256  # so many top tokens usually hold the threshold of a filter
_INF_BITS = 0x7F800000


# ---------------------------------------------------------------------------------- host side
def make_sampling(
    temperature: float | Sequence[float] | np.ndarray,
    top_k: int | None,
    top_p: float | None,
    *,
    batch: int,
    vocab_size: int,
    drafting: str,
) -> Sampling:
    """Checks the sampling arguments of a call and decides its mode. Host side, before any compute.

    Args:
      temperature: one number, or one for each of the `batch` rows. Up to `GREEDY_BELOW` it is 0.
      top_k: keep the k most likely tokens. None, 0, -1 and `vocab_size` or more keep all.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p. None and 1 keep
        all.
      batch: rows, B.
      vocab_size: V.
      drafting: how a drafter draws, one of `DRAFTING`.

    Returns:
      A `Sampling` whose mode is "greedy" if every temperature is 0 (filters change nothing then),
      "filtered" if a filter is on, else "sampled". Within a mode no value recompiles anything.

    Raises:
      ValueError: a value out of its range, or another number of temperatures than `batch`.
    """
    heat = np.asarray(temperature, np.float64)
    if heat.ndim and heat.shape != (batch,):
        raise ValueError(
            f"temperature has shape {heat.shape} for {batch} prompts: give one number, or one "
            "per prompt"
        )
    for value in heat.flat:
        if not 0 <= value < np.inf:
            raise ValueError(
                f"temperature must be a finite number of at least 0, not {value}: 0 is greedy, "
                "1 leaves the model's law as it is"
            )
    if drafting not in DRAFTING:
        raise ValueError(f"drafting={drafting!r} is unknown: choose from {', '.join(DRAFTING)}")
    heat = np.where(heat <= GREEDY_BELOW, 0.0, heat).astype(np.float32)
    k, p = _top_k(top_k, vocab_size), _top_p(top_p)
    mode = "greedy" if not heat.any() else "filtered" if k or p < 1 else "sampled"
    return Sampling(
        temperature=jnp.asarray(np.broadcast_to(heat, (batch,))),
        top_k=jnp.asarray(k),
        top_p=jnp.asarray(p),
        mode=mode,
        drafting=drafting,
    )


def _top_k(value: int | None, vocab_size: int) -> np.int32:
    if value is None:
        return np.int32(0)
    if value != int(value) or value < -1:
        raise ValueError(
            f"top_k must be a whole number of at least 1, not {value}: None, 0 or -1 keep every "
            "token"
        )
    return np.int32(value if 0 < value < vocab_size else 0)


def _top_p(value: float | None) -> np.float32:
    if value is None:
        return np.float32(1)
    if not 0 < value <= 1:
        raise ValueError(
            f"top_p must be above 0 and at most 1, not {value}: 1 keeps every token, top_k=1 only "
            "the best"
        )
    return np.maximum(np.float32(value), np.finfo(np.float32).tiny)


# ------------------------------------------------------------------------------ keys and noise
def row_keys(seed: int, indices: Sequence[int] | Array) -> Array:
    """One key [B] per prompt, from the seed and the prompt's index in the call.

    A row alone therefore draws what it draws in any batch. Threefry whatever JAX's default is.

    Raises:
      ValueError: a seed outside 0 to 2**32 - 1, which JAX would wrap around silently.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and {2**32 - 1}, not {seed}")
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(indices, jnp.int32))


def round_keys(keys: Array, round: Array) -> tuple[Array, Array, Array]:
    """Fresh keys for one round: `(draft, accept, residual)`, each [B], from keys and rounds [B].

    For the rules that read the drafter's law. Draws for several slots come from one of the three
    as `position_noise(draft, slots, V)` or `jax.random.uniform(accept, (K,))`.
    """
    keys = _fold(_fold(keys, _ROUNDS), round)
    return _fold(keys, 0), _fold(keys, 1), _fold(keys, 2)


def position_noise(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise [B, W, V] float32 of keys [B] and positions [B, W].

    A row of it depends on its key, its absolute position and V only: not on the batch, the round
    or the place of the position in W. It is finite, at most 23: all 32 bits enter, and the scarce
    large values, which decide the draw, get the finest steps (`jax.random.gumbel` never draws a
    token of probability 1e-8).
    """

    def row(key: Array, position: Array) -> Array:
        # Both words of every threefry block are used; jax.random.bits throws one of them away,
        # and at 8 rows of 49,152 this is most of what sampling costs.
        words = jax.random.key_data(jax.random.fold_in(key, position))
        return threefry_2x32(words, jnp.arange(vocab_size, dtype=jnp.uint32))

    bits = jax.vmap(jax.vmap(row, (None, 0)))(_fold(keys, _POSITIONS), positions)
    return _gumbel(bits)


def _fold(keys: Array, data: int | Array) -> Array:
    """`fold_in` of one number or of one per key, keys [B]."""
    return jax.vmap(jax.random.fold_in, (0, None if isinstance(data, int) else 0))(keys, data)


def _gumbel(bits: Array) -> Array:
    """-log of an exponential variate; uniforms near 0, which make the largest, are exact."""
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


# -------------------------------------------------------------------------------- laws, draws
def argmax(scores: Array) -> Array:
    """The index [...] int32 of the largest of scores [..., V] float32, the first of equal ones.

    On CPU XLA's argmax is a scalar loop that recomputes what was fused into it (16 ms for 8 rows
    of 49,152 with noise); its top-k takes 0.5 ms.
    """
    return lax.platform_dependent(
        scores,
        cpu=lambda x: lax.top_k(x, 1)[1][..., 0],
        default=lambda x: lax.argmax(x, x.ndim - 1, jnp.int32),
    )


def filtered(logits: Array, sampling: Sampling) -> Array:
    """Logits [B, W, V] float32 with -inf where top-k or top-p cuts; else as they were.

    The order is that of `transformers`: temperature, top-k, then top-p over the softmax of what
    is left. Tokens that tie with the last one kept are all kept. Rows with temperature 0 keep
    everything: their argmax is never cut. Only mode "filtered" does anything, and of the two
    filters only those that are on (inside `jax.vmap` both run).
    """
    if sampling.mode != "filtered":
        return logits
    heat = sampling.temperature[:, None, None]

    def limit(value: Array) -> Array:
        return jnp.where(heat > 0, value, jnp.inf)

    def by_count(x: Array) -> Array:
        return _cut(x, jnp.ones_like, limit(sampling.top_k.astype(jnp.float32)))

    def by_mass(x: Array) -> Array:
        weigh = partial(_weigh, top=jnp.max(x, axis=-1, keepdims=True), heat=heat)
        total = jnp.sum(weigh(x), axis=-1, keepdims=True)
        return _cut(x, weigh, limit(sampling.top_p * total))

    logits = lax.cond(sampling.top_k > 0, by_count, lambda x: x, logits)
    return lax.cond(sampling.top_p < 1, by_mass, lambda x: x, logits)


def law(logits: Array, sampling: Sampling) -> Array:
    """The processed law [B, W, V] float32 of logits [B, W, V] float32: what `choose` draws from.

    Softmax at the row's temperature of what the filters keep; one-hot at the argmax where the
    temperature is 0. Finite logits, and -inf beside them, never give NaN or inf.
    """

    def one_hot() -> Array:
        vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
        return (vocabulary == argmax(logits)[..., None]).astype(jnp.float32)

    if sampling.mode == "greedy":
        return one_hot()
    kept = filtered(logits, sampling)
    heat = sampling.temperature[:, None, None]
    weights = _weigh(kept, top=jnp.max(kept, axis=-1, keepdims=True), heat=heat)
    soft = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return lax.cond(jnp.all(heat > 0), lambda: soft, lambda: jnp.where(heat > 0, soft, one_hot()))


def choose(logits: Array, sampling: Sampling, noise: Array | None) -> Array:
    """Draws tokens [B, W] int32 from `law(logits, sampling)`, logits [B, W, V] float32.

    argmax of filtered logits plus temperature times Gumbel `noise` [B, W, V], a function of the
    two alone. In mode "greedy" noise is not read and may be None.

    Raises:
      ValueError: no noise in another mode, which would be greedy without saying so.
    """
    if sampling.mode == "greedy":
        return argmax(logits)
    if noise is None:
        raise ValueError(f'mode "{sampling.mode}" needs noise: see position_noise')
    return argmax(filtered(logits, sampling) + sampling.temperature[:, None, None] * noise)


def _weigh(logits: Array, top: Array, heat: Array) -> Array:
    """Unnormalised probabilities; 1 for the top logit. Finite where the temperature is 0 too."""
    return jnp.exp((logits - top) / jnp.where(heat > 0, heat, 1.0))


def _cut(logits: Array, weigh: Callable[[Array], Array], limit: Array) -> Array:
    """-inf where all larger logits together weigh `limit` [B, W, 1] or more; inf keeps the row.

    The last logit kept is mostly among the top few, and to fetch those costs a fifth of searching
    the vocabulary. Only if some row needs more are all searched.
    """
    count = min(_CANDIDATES, logits.shape[-1])
    best = lax.top_k(logits, count)[0]
    weights = weigh(best)
    kept = jnp.cumsum(weights, axis=-1) - weights < limit
    last = jnp.min(jnp.where(kept, best, jnp.inf), axis=-1, keepdims=True)
    if count < logits.shape[-1]:
        found = jnp.all(~kept[..., -1:] | jnp.isinf(limit))
        search = partial(_bisect, logits, weigh, limit)
        last = lax.cond(found, lambda: last, search)
    last = jnp.where(jnp.isinf(limit), -jnp.inf, last)
    return jnp.where(logits >= last, logits, -jnp.inf)


def _bisect(logits: Array, weigh: Callable[[Array], Array], limit: Array) -> Array:
    """The smallest float [B, W, 1] above which the logits weigh less than `limit`; no sort.

    Bisects the integers that order the floats, so 32 steps end at an exact logit, ties included.
    """
    weights = weigh(logits)

    def step(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = jnp.where(logits > _float_of(middle), weights, 0.0)
        enough = jnp.sum(above, axis=-1, keepdims=True) < limit
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    low = _order_of(jnp.min(logits, axis=-1, keepdims=True))
    bracket = (jnp.maximum(low - 1, -_INF_BITS), _order_of(jnp.max(logits, -1, keepdims=True)))
    return _float_of(lax.fori_loop(0, 32, step, bracket)[1])


def _order_of(x: Array) -> Array:
    """Integers in the order of the floats x; 0 for both zeros."""
    bits: Any = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _float_of(order: Array) -> Array:
    """The inverse of `_order_of`."""
    bits = jnp.where(order < 0, -order | jnp.int32(-(2**31)), order)
    return lax.bitcast_convert_type(bits, jnp.float32)
