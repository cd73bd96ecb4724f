"""Verification rules against exact laws, each with wrong variants that the same checker rejects.

A rule is a black box here. For every draft path the acceptance probability of each slot is found
by bisecting its uniform, the law of the next token is read after every number of accepted drafts,
and all paths are summed. Rows are padded to one shape with what no rule may read.
"""

from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.decoding import sampling, verify
from specjax.types import SparseLaw

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


def token_mass(rule, P, Q, tokens, count):
    """Pr(accepted, next token | draft path) [N, W, V] of a rule with a uniform for each slot."""
    N = len(tokens)

    def run(uniforms):  # [N, lanes, K]
        lanes = uniforms.shape[1]
        rows = jax.tree.map(lambda x: np.repeat(x, lanes, axis=0), (P, Q, tokens, count))
        accepted, law = call(rule, *rows, uniforms.reshape(-1, K).astype(np.float32))
        return accepted.reshape(N, lanes), law.reshape(N, lanes, V).astype(float)

    def passes(u):  # [N, K]: is slot k accepted at u, if all before it were?
        return run(np.eye(K)[None] * u[:, :, None])[0] > np.arange(K)

    low, high = np.zeros((N, K)), np.ones((N, K))
    possible = passes(low)
    for _ in range(24):
        middle = (low + high) / 2
        inside = passes(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    accept = np.pad(np.where(possible, high, 0), ((0, 0), (0, 1)))
    stay = np.cumprod(np.pad(accept[:, :-1], ((0, 0), (1, 0)), constant_values=1), 1) * (1 - accept)
    uniforms = np.where(np.arange(K)[None] < np.arange(W)[:, None], 0, BELOW_ONE)
    accepted, laws = run(np.broadcast_to(uniforms[None], (N, W, K)))
    # A rule that does not stop slot by slot loses mass here, and the law is off.
    there = (stay > 1e-6) & (accepted == np.arange(W))
    return np.where(there[..., None], stay[..., None] * laws, 0)


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


BOTH = [(verify.token, token_mass), (match, match_mass)]


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


# ------------------------------------------------------------------------------ exact: tables
S2 = (constant(1, 2), constant(2, 1))
S3 = (constant(4, 4, 2), constant(8, 1, 1))
_BEHIND = {(): [0.5, 0.5], (0,): [0.75, 0.25], (1,): [0.25, 0.75]}
C2 = (
    lambda prefix: np.array(_BEHIND[prefix[-1:]]),
    lambda prefix: np.array([[0.6, 0.4], [0.5, 0.5]])[len(prefix)],
)


@pytest.mark.parametrize(
    ("tables", "v", "gamma", "token", "sampled"),
    [
        (S2, 2, 1, 2 / 3, 4 / 9),
        (S2, 2, 2, 10 / 9, 52 / 81),
        (S2, 2, 3, 38 / 27, 532 / 729),
        (S2, 2, 4, 130 / 81, 5044 / 6561),
        (S3, 3, 2, 24 / 25, 1311 / 2500),
        (C2, 2, 2, 63 / 40, 3 / 4),
    ],
)
def test_reference_tables(tables, v, gamma, token, sampled):
    for (rule, mass_of), expected in zip(BOTH, (token, sampled), strict=True):
        assert check(*tables, v, gamma, rule, mass_of) == near((expected, 0))


@lru_cache(1)
def random_cases():
    """240 pairs of tables, half of them with zeros, as one batch of rows."""
    rng, cases = np.random.default_rng(0), []
    for v, gamma in ((2, 1), (2, 2), (2, 3), (3, 2), (3, 3)):
        for by_slot, zeros, _ in product((False, True), (False, True), range(12)):
            p, q = random_table(rng, v, zeros), random_table(rng, v, zeros, by_slot)
            cases.append((p, v, gamma, path_rows(p, q, v, gamma)))
    return cases, [np.concatenate(parts) for parts in zip(*(c[-1] for c in cases), strict=True)]


def test_240_random_tables():
    cases, (*rows, _) = random_cases()
    results = []
    for rule, mass_of in BOTH:
        mass, start = mass_of(rule, *rows), 0
        for p, v, gamma, (_, _, tokens, _, weights) in cases:
            part = mass[start : (start := start + len(tokens))]
            error = law_error(p, v, gamma, part, weights, tokens)
            results.append((accepted_drafts(part, weights), error))
    results = np.array(results).reshape(2, 240, 2)
    assert results[..., 1].max() < 1e-6
    gain = results[0, :, 0] - results[1, :, 0]
    assert gain.min() > -1e-6  # the token rule never accepts less than match
    assert (gain > 0.01).sum() > 150


def test_slots_decide_by_their_own_uniform():
    """What the exact checker takes for granted, on random uniforms; the rest is never NaN."""
    P, Q, tokens, count, _ = random_cases()[1]
    uniforms = np.random.default_rng(0).random(tokens.shape).astype(np.float32)
    pd, qd = (np.take_along_axis(x[:, :K], tokens[..., None] % V, 2)[..., 0] for x in (P, Q))
    expected = np.cumprod((uniforms * qd < pd) & (np.arange(K) < count[:, None]), axis=1).sum(1)
    accepted, laws = call(verify.token, P, Q, tokens, count, uniforms)
    np.testing.assert_array_equal(accepted, expected)
    np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-6)
    assert (laws >= 0).all()


def residual(p, q):
    rest = jnp.maximum(p - q, 0)
    return rest / jnp.maximum(jnp.sum(rest), 1e-9)


def redraws_from_p(p, q, *rest):
    accepted, _ = verify.token(p, q, *rest)
    return accepted, p[accepted]


def goes_on_after_a_failure(p, q, tokens, count, uniforms):
    slots = jnp.arange(K, dtype=jnp.int32)
    accept = (uniforms * q[slots, tokens] < p[slots, tokens]) & (slots < count)
    accepted = jnp.sum(accept.astype(jnp.int32))
    rest = residual(p[accepted], q[jnp.minimum(accepted, K - 1)])
    return accepted, jnp.where(accepted == count, p[accepted], rest)


def ratio_upside_down(p, q, tokens, *rest):
    accepted, _ = verify.token(jnp.concatenate([q, p[K:]]), p[:K], tokens, *rest)
    slots = jnp.arange(K, dtype=jnp.int32)
    return accepted, verify.token(p, q, tokens, rest[0], jnp.where(slots < accepted, 0, 1))[1]


def residual_of_the_first_slot(p, q, tokens, count, uniforms):
    accepted, law = verify.token(p, q, tokens, count, uniforms)
    return accepted, jnp.where(accepted == count, law, residual(p[0], q[0]))


def residual_behind_the_last_slot(p, q, tokens, count, uniforms):
    accepted, law = verify.token(p, q, tokens, count, uniforms)
    last = residual(p[accepted], q[jnp.minimum(accepted, count - 1)])
    return accepted, jnp.where(accepted == count, last, law)


def one_uniform_for_all_slots(p, q, tokens, count, uniforms):
    return verify.token(p, q, tokens, count, jnp.broadcast_to(uniforms[:1], (K,)))


@pytest.mark.parametrize(
    "wrong",
    [
        redraws_from_p,
        goes_on_after_a_failure,
        ratio_upside_down,
        residual_of_the_first_slot,
        residual_behind_the_last_slot,
        one_uniform_for_all_slots,
    ],
)
def test_wrong_token_rules_are_rejected(wrong):
    p, q = (random_table(np.random.default_rng(seed), 3) for seed in (1, 2))
    assert check(p, q, 3, 2)[1] < 1e-6
    assert check(p, q, 3, 2, wrong)[1] > 0.01


# ------------------------------------------------------------------- exact: one slot, by hand
SLOT_P, SLOT_Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
ARGMAX_Q = np.eye(3)[1]


def one_slot(p, drawn, ratio, rule=verify.token, mass_of=token_mass):
    """Acceptance and law of the first token: drafts from `drawn`, `ratio` as the rule's q."""
    v = len(p)
    P, Q, tokens, count, _ = path_rows(
        constant(*p), constant(*drawn if ratio is None else ratio), v, 1
    )
    mass = mass_of(rule, P, None if ratio is None else Q, tokens, count)
    weights = np.asarray(drawn, float)
    return accepted_drafts(mass, weights), first_token(mass, weights, tokens)[:v]


def match_then_redraw(choice, p, q, tokens, count):
    accepted, law = match(choice, p, q, tokens, count)
    return accepted, jnp.where(accepted == count, law, p[accepted])


def match_then_residual(choice, p, q, tokens, count):
    accepted, law = match(choice, p, q, tokens, count)
    return accepted, jnp.where(accepted == count, law, residual(p[0], q[0]))


@pytest.mark.parametrize(
    ("drawn", "ratio", "rule", "acceptance"),
    [
        (SLOT_Q, SLOT_Q, 0, 0.7),
        (SLOT_Q, None, 0, 0.31),  # a point mass is exact for drawn drafts too
        (SLOT_Q, SLOT_Q, 1, 0.31),
        (ARGMAX_Q, SLOT_Q, 1, 0.3),
        (ARGMAX_Q, ARGMAX_Q, 0, 0.3),
        (ARGMAX_Q, None, 0, 0.3),
    ],
)
def test_one_slot_right(drawn, ratio, rule, acceptance):
    accepted, law = one_slot(SLOT_P, drawn, ratio, *BOTH[rule])
    assert accepted == near(acceptance)
    assert law == near(SLOT_P)


@pytest.mark.parametrize(
    ("drawn", "rule", "mass_of", "law"),
    [
        (SLOT_Q, match_then_redraw, match_mass, (0.445, 0.357, 0.198)),
        (SLOT_Q, match_then_residual, match_mass, (0.79, 0.15, 0.06)),
        (ARGMAX_Q, verify.token, token_mass, (0.4, 0.6, 0.0)),  # argmax draft, soft q
    ],
)
def test_one_slot_wrong(drawn, rule, mass_of, law):
    got = one_slot(SLOT_P, drawn, SLOT_Q, rule, mass_of)[1]
    assert got == near(law)
    assert got != near(SLOT_P)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, 2, 1), (1, 0, 0.6), (0.5, 0, 1), (0.5, 2, 0.6), (2, 3, 0.9)],
)
def test_q_is_the_law_after_temperature_and_filters(temperature, top_k, top_p):
    how = sampling.make_sampling(
        temperature, top_k, top_p, batch=1, vocab_size=4, drafting="independent"
    )
    raw = np.array([[[0.4, 0.3, 0.2, 0.1], [0.3, 0.4, 0.1, 0.2]]], np.float32)
    p, q = np.asarray(jax.jit(sampling.law)(np.log(raw), how)[0], float)
    accepted, law = one_slot(p, q, q)
    assert accepted == near(np.minimum(p, q).sum())
    assert law == near(p)
    raw_accepted, raw_law = one_slot(p, q, raw[0, 1])
    if (temperature, top_k) == (1, 2) or (temperature, top_p) == (1, 0.6):
        assert (accepted, raw_accepted) == near((6 / 7, 1))
        assert law == near((4 / 7, 3 / 7, 0, 0))
        assert raw_law == near((3 / 7, 4 / 7, 0, 0))
    # All of p on one token hides the bug: no other draft is accepted whatever its q.
    assert p.max() == 1 or np.abs(raw_law - p).max() > 0.01


def test_an_admission_that_looks_at_the_draft_needs_match():
    P, Q, tokens, _, weights = path_rows(constant(7, 3), constant(1, 1), 2, 1)
    count = (tokens[:, 0] == 0).astype(np.int32)
    for (rule, mass_of), chance in zip(BOTH, (0.85, 0.7), strict=True):
        mass = mass_of(rule, P, Q, tokens, count)
        assert first_token(mass, weights, tokens)[0] == near(chance)


# ------------------------------------------------------------------------- exact: many rounds
@pytest.mark.parametrize(("rule", "mass_of"), BOTH)
def test_drafters_may_remember_rejected_tokens(rule, mass_of):
    """Two drafts a round until 4 tokens stand; q depends on the text and the rejected suffix."""
    N, gamma, rng = 4, 2, np.random.default_rng(4)
    full, drafts = random_table(rng, 2), random_table(rng, 2)
    suffixes = [c for n in range(gamma + 1) for c in product(range(2), repeat=n)]
    states = [(s, c) for n in range(N) for s in product(range(2), repeat=n) for c in suffixes]
    rows = [
        path_rows(
            lambda prefix, s=text: full((s + prefix)[: N - 1]),
            lambda prefix, s=text[-2:], c=suffix: drafts((s, c, len(prefix))),
            *(2, gamma),
        )
        for text, suffix in states
    ]
    *arrays, weights = (np.concatenate(x) for x in zip(*rows, strict=True))
    mass = (mass_of(rule, *arrays) * weights[:, None, None]).reshape(len(states), -1, W, V)
    frontier, out = {((), ()): 1.0}, {}
    while frontier:
        (text, suffix), weight = frontier.popitem()
        n = states.index((text, suffix))
        for path, a, t in product(range(2**gamma), range(gamma + 1), range(2)):
            drafted = tuple(rows[n][2][path, :gamma].tolist())
            longer = (*text, *drafted[:a], t)
            done = len(longer) >= N
            into, key = (out, longer[:N]) if done else (frontier, (longer, drafted[a:]))
            into[key] = into.get(key, 0.0) + weight * mass[n, path, a, t]
    assert out == near({text: probability(full, text) for text in product(range(2), repeat=N)})


# ------------------------------------------------------------------------------- counted draws
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


# ------------------------------------------------------------------------- shapes and corners
def random_laws(rng, shape, spread=3.0):
    weights = np.exp(rng.normal(size=shape) * spread)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def test_sparse_and_point_laws_equal_their_dense_form():
    rng, n, v, C = np.random.default_rng(0), 400, 12, 3
    p, probs = random_laws(rng, (n, W, v), 1.0), random_laws(rng, (n, K, C), 1.0)
    ids = rng.permuted(np.tile(np.arange(v, dtype=np.int32), (n, K, 1)), axis=-1)[..., :C]
    probs[:, :, 1] += probs[:, :, 2]
    probs[:, :, 2] = 0  # padding
    dense = np.zeros((n, K, v), np.float32)
    np.put_along_axis(dense, ids, probs, -1)
    tokens, count = ids[:, :, 0], rng.integers(0, W, n).astype(np.int32)
    uniforms = rng.random((n, K)).astype(np.float32) * 0.1
    twice = np.concatenate([ids, ids], -1), np.concatenate([probs, probs], -1) / 2
    run = compiled(verify.token)
    for short, full in (
        (SparseLaw(ids, probs), dense),
        (SparseLaw(*twice), dense),  # repeated ids count together
        (None, np.eye(v, dtype=np.float32)[tokens]),
    ):
        got, expected = (run(p, q, tokens, count, uniforms) for q in (short, full))
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_allclose(got[1], expected[1], atol=1e-6)
        assert (np.bincount(got[0], minlength=W) > 10).all()


def test_drafts_past_the_count_are_not_read():
    p, run = jnp.asarray(random_laws(np.random.default_rng(0), (W, 5))), jax.jit(verify.token)
    q = jnp.full((K, 5), jnp.nan).at[0].set(p[0])
    tokens = jnp.array([2, -1, 99, -1], jnp.int32)
    sparse = SparseLaw(jnp.full((K, 1), -7).at[0].set(2), q[:, :1].at[0].set(1.0))
    for law, count in product((q, sparse, None), (0, 1)):
        accepted, rest = run(p, law, tokens, jnp.int32(count), jnp.zeros((K,)))
        assert int(accepted) == count
        np.testing.assert_array_equal(rest, p[count])
    choice = jnp.array([2, -1, 99, -1, 3], jnp.int32)
    assert [int(verify.match(choice, tokens, jnp.int32(n))) for n in range(W)] == list(range(W))
    assert int(verify.match(choice.at[1].set(0), tokens, jnp.int32(4))) == 1


def test_corners_of_one_slot():
    """Drafts that q excludes divide by nothing; a residual that vanishes gives p; no slots."""
    p, q = jnp.array([[0.5, 0.0, 0.5], [0.2, 0.3, 0.5]]), jnp.array([[1.0, 0.0, 0.0]])
    run = jax.jit(verify.token)
    for law, draft, u, accepted, rest in [
        (q, 2, 0.99, 1, p[1]),
        (q, 1, 0.0, 0, [0, 0, 1]),
        (q, 0, 0.4, 1, p[1]),
        (q, 0, 0.6, 0, [0, 0, 1]),
        (p[:1], 1, 0.0, 0, p[0]),
    ]:
        got = run(p, law, jnp.array([draft]), jnp.int32(1), jnp.array([u]))
        assert int(got[0]) == accepted
        np.testing.assert_allclose(got[1], rest, atol=1e-6)
    none = jnp.zeros((0,), jnp.int32)
    accepted, law = verify.token(p[:1], None, none, jnp.int32(0), jnp.zeros((0,)))
    assert int(accepted) == int(verify.match(jnp.array([1]), none, jnp.int32(0))) == 0
    np.testing.assert_array_equal(law, p[0])


def test_with_one_hot_laws_both_rules_accept_alike():
    """Argmax drafts, with and without their one-hot law, and a target at temperature 0."""
    p, q = (random_table(np.random.default_rng(seed), 3) for seed in (3, 4))
    drafts, greedy = (1, 0, 2), lambda prefix: np.eye(3)[(sum(prefix) + len(prefix)) % 3]
    argmax = lambda prefix: np.eye(3)[drafts[len(prefix)]]  # noqa: E731
    by_draft = sum(probability(p, drafts[:k]) for k in (1, 2, 3))
    by_target = sum(probability(q, (0, 1, 0)[:k]) for k in (1, 2, 3))
    for rule, mass_of in BOTH:
        assert check(p, argmax, 3, 3, rule, mass_of) == near((by_draft, 0))
        assert check(greedy, q, 3, 3, rule, mass_of) == near((by_target, 0))


def test_a_vocabulary_of_150_thousand():
    rng, v, run = np.random.default_rng(0), 150_000, jax.jit(verify.token)
    p, count, last = random_laws(rng, (3, v), 2.0), np.int32(2), np.full(2, BELOW_ONE)
    p[0, 7] = p[1, 7] = 0
    q = np.stack([p[0] * rng.uniform(0.5, 1.5, v).astype(np.float32), p[1]])
    q[0] /= q[0].sum()
    worst = np.argmax(q[0] - p[0])
    accepted, law = run(p, q, np.array([worst, 5], np.int32), count, last)
    exact = np.maximum(p[0].astype(float) - q[0].astype(float), 0)
    assert int(accepted) == 0
    assert np.abs(np.asarray(law) - exact / exact.sum()).sum() < 1e-5
    # p and q equal but for rounding: what is left is still a law inside the support of p.
    noisy = np.stack([p[0] * (1 + rng.uniform(-1, 1, v).astype(np.float32) * 3e-7), p[1]])
    for q in (noisy, p[:2]):
        accepted, law = run(p, q, np.array([7, 7], np.int32), count, last)
        assert int(accepted) == 0
        assert abs(float(law.sum()) - 1) < 1e-4
        assert float(law.min()) >= float(law[7]) == 0


def test_coupled_drafts_are_refused_by_the_token_rule():
    with pytest.raises(ValueError, match="fresh noise in every round, and noise shared by posi"):
        verify.check_rule("token", "coupled")
    with pytest.raises(ValueError, match="verify='block' is unknown: choose from match, token"):
        verify.check_rule("block", "greedy")
    for name, drafting in (("token", "greedy"), ("token", "independent"), ("match", "coupled")):
        verify.check_rule(name, drafting)
    assert {d for rule in verify.RULES.values() for d in rule.drafting} == set(sampling.DRAFTING)
