"""Verification rules against exact laws by counting draws, and the streams the draws come from."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from exact import S3, path_rows, token_mass
from scipy import stats

from specjax.decoding import sampling, verify

N = 200_000
CRITICAL = {df: stats.chi2.isf(1e-9, df) for df in range(1, 10)}


def chi_square(tokens, p):
    expected = np.asarray(p, float) * len(tokens)
    return np.sum((np.bincount(tokens, minlength=len(p)) - expected) ** 2 / expected)


@lru_cache(1)
def fresh():
    """Draft noise [N, 2, 4], uniforms [N, 2] and residual noise [N, 4] of N rounds of a row."""

    @jax.jit
    def make(row):
        draft, accept, rest = sampling.round_keys(row, jnp.arange(N, dtype=jnp.int32))
        slots = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[None], (N, 2))
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(accept)
        noise = sampling.position_noise(rest, slots[:, :1], 4)[:, 0]
        return sampling.position_noise(draft, slots, 4), uniforms, noise

    return make(jnp.broadcast_to(sampling.row_keys(3, [0]), (N,)))


@jax.jit
def played(p, q, draft_noise, uniforms, rest_noise):
    """N rounds under one law p [V], q [N, K, V]: accepted, next tokens and drafts."""
    v, k = q.shape[-1], q.shape[1]
    drafts = jnp.argmax(jnp.log(q) + draft_noise[..., :v], axis=-1).astype(jnp.int32)
    P = jnp.broadcast_to(p[None, None], (N, k + 1, v))
    count = jnp.full((N,), k, jnp.int32)
    accepted, law = jax.vmap(verify.token)(P, q, drafts, count, uniforms)
    following = jnp.argmax(jnp.log(law) + rest_noise[:, :v], axis=-1)
    return accepted, following.astype(jnp.int32), drafts


def first_of(p, q, *noise):
    accepted, following, drafts = played(p, q, *noise)
    return np.where(accepted > 0, drafts[:, 0], following), accepted


def test_each_draw_has_a_stream_of_its_own():
    p, q = jnp.array([0.4, 0.3, 0.2, 0.1]), jnp.array([0.1, 0.2, 0.3, 0.4])
    noise, uniforms, rest = (x[:, :1] if x.shape[1] == 2 else x for x in fresh())
    same = jnp.exp(-jnp.exp(-noise[:, :, 0]))  # the uniform behind the first token's noise
    q = jnp.broadcast_to(q[None, None], (N, 1, 4))
    tokens, accepted = first_of(p, q, noise, uniforms, rest)
    assert chi_square(tokens, p) < CRITICAL[3]
    assert abs(float(accepted.mean()) - 0.6) < 5 * np.sqrt(0.24 / N)
    for wrong in ((uniforms, noise[:, 0]), (same, rest), (same, noise[:, 0])):
        assert chi_square(first_of(p, q, noise, *wrong)[0], p) > 10 * CRITICAL[3]


def test_two_slots_counted():
    """S3 with two drafts: every cell of (accepted, next token), and the mean."""
    p, q = (jnp.asarray(table(()), jnp.float32) for table in S3)
    accepted, following, _ = played(p, jnp.broadcast_to(q[None, None], (N, 2, 3)), *fresh())
    *rows, weights = path_rows(*S3, 3, 2)
    exact = np.einsum("n,nwv->wv", weights, token_mass(verify.token, *rows))[:3, :3].ravel()
    possible, cells = exact > 1e-6, np.asarray(3 * accepted + following)
    assert possible[cells].all()
    ranks = (np.cumsum(possible) - 1)[cells]
    assert chi_square(ranks, exact[possible]) < CRITICAL[possible.sum() - 1]
    deviation = np.sqrt(exact @ (np.arange(9) // 3 - 0.96) ** 2 / N)
    assert abs(float(accepted.mean()) - 0.96) < 5 * deviation


def test_noise_keyed_by_position_biases_the_token_rule():
    """A rejected position is drafted again by a q that depends on what was rejected there."""
    noise, uniforms, rest = fresh()
    old, p = noise[:, :1], jnp.array([0.7, 0.3])
    rejected = jnp.argmax(old[:, 0, :2], axis=-1)  # a fair coin
    q = jnp.array([[0.9, 0.1], [0.5, 0.5]])[rejected][:, None]
    right, wrong = (first_of(p, q, x, uniforms[:, :1], rest)[0] for x in (noise[:, 1:], old))
    assert chi_square(right, p) < CRITICAL[1]
    assert chi_square(wrong, p) > 10 * CRITICAL[1]
    assert abs(np.mean(wrong == 0) - 53 / 90) < 5 * np.sqrt(0.25 / N)
