"""A checker that computes the output law of a verification rule, without drawing anything.

A rule is a black box here. For every draft path the acceptance probability of each slot is found
by bisecting its uniform, the law of the next token is read after every number of accepted drafts,
and all paths are summed. Rows are padded to one shape with what no rule may read.
"""

from functools import lru_cache
from itertools import product

import jax
import numpy as np
import pytest

from specjax.decoding import verify

V, K, W = 4, 4, 5  # the padded shape of every table
ROWS = 4096  # rows of one compiled call
BELOW_ONE = np.float32(1 - 2**-24)
near = lambda x: pytest.approx(x, abs=1e-6)  # noqa: E731


# ----------------------------------------------------------------------------------- tables
def constant(*weights):
    return lambda prefix: np.array(weights) / np.sum(weights)


def random_table(rng, v, zeros=False, by_slot=False):
    """A law per prefix, or per slot (a parallel drafter), of small random fractions."""
    rows = {}

    def at(prefix):
        key = len(prefix) if by_slot else prefix
        if key not in rows:
            weights = rng.integers(0 if zeros else 1, 10, v).astype(float)
            weights[0] += weights.sum() == 0
            rows[key] = weights / weights.sum()
        return rows[key]

    return at


def probability(law, path):
    return np.prod([law(path[:k])[path[k]] for k in range(len(path))])


def path_rows(p, q, v, gamma):
    """Every draft path: p [N, W, V], q [N, K, V], tokens [N, K], count [N], its weight [N]."""
    paths = list(product(range(v), repeat=gamma))
    P = np.full((len(paths), W, V), np.nan, np.float32)
    Q, tokens = P[:, :K].copy(), np.full((len(paths), K), -1, np.int32)
    for n, path in enumerate(paths):
        tokens[n, :gamma] = path
        for k in range(gamma + 1):
            P[n, k] = np.pad(p(path[:k]), (0, V - v))
        for k in range(gamma):
            Q[n, k] = np.pad(q(path[:k]), (0, V - v))
    weights = np.array([probability(q, path) for path in paths])
    return P, Q, tokens, np.full(len(paths), gamma, np.int32), weights


# ------------------------------------------------------------------- the rules as black boxes
@lru_cache
def compiled(rule):
    return jax.jit(jax.vmap(rule))


def call(rule, *arrays):
    """The rule on rows of equal shape, ROWS at a time; arrays may be None."""
    total, parts = len(arrays[0]), []
    for start in range(0, total, ROWS):
        pick = np.minimum(np.arange(start, start + ROWS), total - 1)
        parts.append(compiled(rule)(*jax.tree.map(lambda x, pick=pick: x[pick], arrays)))
    return jax.tree.map(lambda *xs: np.concatenate(xs)[:total], *parts)


def runner(rule, *rows):
    """The rule on rows [N, ...] at several uniforms each: uniforms [N, lanes, K] -> results."""
    N = len(rows[0])

    def run(uniforms):
        lanes = uniforms.shape[1]
        repeated = jax.tree.map(lambda x: np.repeat(x, lanes, axis=0), rows)
        accepted, law = call(rule, *repeated, uniforms.reshape(-1, K).astype(np.float32))
        return accepted.reshape(N, lanes), law.reshape(N, lanes, V).astype(float)

    return run


def chances(passes, N):
    """[N, K]: up to which uniform each slot passes, by bisection; 0 where it never does."""
    low, high = np.zeros((N, K)), np.ones((N, K))
    possible = passes(low)
    for _ in range(24):
        middle = (low + high) / 2
        inside = passes(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.where(possible, high, 0)


def at_every_length(run, weights, uniforms):
    """Pr(accepted, next token) [N, W, V] of lengths that have `weights` [N, W] and are made by
    `uniforms` [W, K]. What a rule does not make there is lost, and the law is off."""
    accepted, laws = run(np.broadcast_to(uniforms[None], (len(weights), W, K)))
    there = (weights > 1e-6) & (accepted == np.arange(W))
    return np.where(there[..., None], weights[..., None] * laws, 0)


def token_mass(rule, P, Q, tokens, count):
    """Pr(accepted, next token | draft path) [N, W, V] of a rule with a uniform for each slot."""
    run = runner(rule, P, Q, tokens, count)

    def passes(u):  # [N, K]: is slot k accepted at u, if all before it were?
        return run(np.eye(K)[None] * u[:, :, None])[0] > np.arange(K)

    accept = np.pad(chances(passes, len(tokens)), ((0, 0), (0, 1)))
    stay = np.cumprod(np.pad(accept[:, :-1], ((0, 0), (1, 0)), constant_values=1), 1) * (1 - accept)
    return at_every_length(run, stay, np.where(np.arange(K) < np.arange(W)[:, None], 0, BELOW_ONE))


def block_mass(rule, P, Q, tokens, count):
    """The same for a rule whose last success counts; each slot by its own uniform again."""
    run = runner(rule, P, Q, tokens, count)

    def succeeds(u):  # [N, K]: does slot k succeed at u, or a later one, all others failing?
        lanes = np.where(np.eye(K, dtype=bool)[None], u[:, :, None], BELOW_ONE)
        return run(lanes)[0] > np.arange(K)

    chance = np.pad(chances(succeeds, len(tokens)), ((0, 0), (1, 0)), constant_values=1)  # [N, W]
    later = np.flip(np.cumprod(np.flip(1 - chance[:, 1:], 1), axis=1), 1)
    last = chance * np.pad(later, ((0, 0), (0, 1)), constant_values=1)
    only = np.where(np.arange(1, W) == np.arange(W)[:, None], 0, BELOW_ONE)
    return at_every_length(run, last, only)


def match_mass(rule, P, Q, tokens, count):
    """The same for a rule that reads the target's choices: all of them are enumerated."""
    choices, weights, owner = [], [], []
    for n, gamma in enumerate(count):
        alive = [np.flatnonzero(P[n, k]) if k <= gamma else [0] for k in range(W)]
        for choice in product(*alive):
            choices.append(choice)
            weights.append(np.prod([float(P[n, k, choice[k]]) for k in range(gamma + 1)]))
            owner.append(n)
    choices, weights, owner = np.array(choices, np.int32), np.array(weights), np.array(owner)
    accepted, laws = call(rule, choices, P[owner], Q[owner], tokens[owner], count[owner])
    mass = np.zeros((len(tokens), W, V))
    np.add.at(mass, (owner, accepted), weights[:, None] * laws)
    return mass


def match(choice, p, q, tokens, count):
    accepted = verify.match(choice, tokens, count)
    return accepted, jax.nn.one_hot(choice[accepted], V)


TOKEN, BLOCK = (verify.token, token_mass), (verify.block, block_mass)
RULES = [TOKEN, BLOCK, (match, match_mass)]


def accepted_drafts(mass, weights):
    return float(np.einsum("n,nwv,w->", weights, mass, np.arange(W)))


def first_token(mass, weights, tokens):
    """The law [V] of the first token that a round emits."""
    law = weights @ mass[:, 0]
    np.add.at(law, tokens[:, 0], weights * mass[:, 1:].sum((1, 2)))
    return law


def law_error(p, v, gamma, mass, weights, tokens):
    """Largest error of the joint law of gamma + 1 tokens; short rounds are completed from p."""
    out = {}
    for path, row, weight in zip(tokens[:, :gamma].tolist(), mass, weights, strict=True):
        for a, t in product(range(gamma + 1), range(v)):
            out[*path[:a], t] = out.get((*path[:a], t), 0.0) + weight * row[a, t]
    worst = 0.0
    for text in product(range(v), repeat=gamma + 1):
        steps = [p(text[:k])[text[k]] for k in range(gamma + 1)]
        got = sum(out[text[: a + 1]] * np.prod(steps[a + 1 :]) for a in range(gamma + 1))
        worst = max(worst, abs(got - np.prod(steps)))
    return worst


def check(p, q, v, gamma, rule=verify.token, mass_of=token_mass):
    """Expected accepted drafts and law error of one round."""
    *rows, weights = path_rows(p, q, v, gamma)
    mass = mass_of(rule, *rows)
    return accepted_drafts(mass, weights), law_error(p, v, gamma, mass, weights, rows[2])


# ---------------------------------------------------------------------- tables with known values
S2 = (constant(1, 2), constant(2, 1))
S3 = (constant(4, 4, 2), constant(8, 1, 1))
_BEHIND = {(): [0.5, 0.5], (0,): [0.75, 0.25], (1,): [0.25, 0.75]}
C2 = (
    lambda prefix: np.array(_BEHIND[prefix[-1:]]),
    lambda prefix: np.array([[0.6, 0.4], [0.5, 0.5]])[len(prefix)],
)
