"""Verification rules against exact laws, each with wrong variants that the same checker rejects.

The checker is in `exact.py`; tests that draw are in `test_verify_counted.py`.
"""

from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import (
    BELOW_ONE,
    BLOCK,
    C2,
    RULES,
    S2,
    S3,
    TOKEN,
    K,
    V,
    W,
    accepted_drafts,
    call,
    check,
    compiled,
    constant,
    first_token,
    law_error,
    match,
    match_mass,
    near,
    path_rows,
    probability,
    random_table,
    token_mass,
)

from specjax.decoding import sampling, verify
from specjax.types import SparseLaw


# ----------------------------------------------------------------------------- exact: tables
@pytest.mark.parametrize(
    ("tables", "v", "gamma", "token", "block", "sampled"),
    [
        (S2, 2, 1, 2 / 3, 2 / 3, 4 / 9),
        (S2, 2, 2, 10 / 9, 11 / 9, 52 / 81),
        (S2, 2, 3, 38 / 27, 5 / 3, 532 / 729),
        (S2, 2, 4, 130 / 81, 166 / 81, 5044 / 6561),
        (S3, 3, 2, 24 / 25, 26 / 25, 1311 / 2500),
        (C2, 2, 2, 63 / 40, 13 / 8, 3 / 4),
    ],
)
def test_reference_tables(tables, v, gamma, token, block, sampled):
    for (rule, mass_of), expected in zip(RULES, (token, block, sampled), strict=True):
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
    for rule, mass_of in RULES:
        mass, start = mass_of(rule, *rows), 0
        for p, v, gamma, (_, _, tokens, _, weights) in cases:
            part = mass[start : (start := start + len(tokens))]
            error = law_error(p, v, gamma, part, weights, tokens)
            results.append((accepted_drafts(part, weights), error))
    results = np.array(results).reshape(3, 240, 2)
    assert results[..., 1].max() < 1e-6
    token, block, sampled = results[..., 0]
    for more, less in ((token, sampled), (block, token)):  # always at least as many drafts
        assert (more - less).min() > -1e-6
    assert (token - sampled > 0.01).sum() > 150
    assert (block - token > 0.001).sum() > 100


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


# --------------------------------------------------------------- exact: wrong rules for blocks
def wrong_block(
    stops=False, scaled=True, scaled_mass=True, clip_late=False, chance_is_keep=False, shared=False
):
    """Block verification with one of the mistakes that implementations make."""

    def rule(p, q, tokens, count, uniforms):
        slots = jnp.arange(K, dtype=jnp.int32)
        if shared:
            uniforms = jnp.broadcast_to(uniforms[:1], (K,))
        ratio = jnp.where(slots < count, p[slots, tokens] / q[slots, tokens], 0)
        keep = [jnp.float32(1.0)]
        for k in range(K):
            run = keep[-1] * ratio[k]
            keep.append(run if clip_late else jnp.minimum(run, 1.0))
        keep = jnp.minimum(jnp.stack(keep), 1.0)
        scale = keep[:K, None]
        leaves = jnp.maximum((scale if scaled_mass else 1.0) * p[:K] - q, 0).sum(-1)
        stays = leaves + 1 - keep[:K]
        chance = jnp.where(stays > 0, leaves / stays, 1.0)[1:]
        chance = jnp.append(chance, 0.0)
        chance = keep[1:] if chance_is_keep else jnp.where(slots + 1 == count, keep[1:], chance)
        success = (uniforms < chance) & (slots < count)
        if stops:
            success = jnp.cumprod(success.astype(jnp.int32)) > 0
        accepted = jnp.max(jnp.where(success, slots + 1, 0))
        at = jnp.minimum(accepted, K - 1)
        rest = jnp.maximum((keep[accepted] if scaled else 1.0) * p[accepted] - q[at], 0)
        total = rest.sum()
        usable = (accepted < count) & (total > 1e-9)
        return accepted, jnp.where(usable, rest / jnp.where(usable, total, 1.0), p[accepted])

    return rule


def test_the_block_rule_written_down_again_is_right():
    accepted, error = check(*S3, 3, 2, wrong_block(), BLOCK[1])
    assert (accepted, error) == near((26 / 25, 0))


@pytest.mark.parametrize(
    ("mistake", "drafts", "error"),
    [
        ("scaled", 1.04, 0.0080),
        ("scaled_mass", 1.1733, 0.0533),
        ("clip_late", 1.12, 0.0160),
        ("chance_is_keep", 1.20, 0.0640),
    ],
)
def test_wrong_block_rules_are_rejected(mistake, drafts, error):
    """The known mistakes on S3, with the figures that they give; a longer draft is no proof."""
    default = {"scaled": True, "scaled_mass": True}
    wrong = wrong_block(**{mistake: not default.get(mistake, False)})
    assert check(*S3, 3, 2, wrong, BLOCK[1]) == pytest.approx((drafts, error), abs=1e-4)


def test_a_block_rule_that_stops_at_a_failure_is_rejected():
    """S2, path AB: slot 1 always fails, and both drafts are accepted all the same."""
    accepted, error = check(*S2, 2, 2, wrong_block(stops=True), TOKEN[1])
    assert (accepted, error) == pytest.approx((5 / 9, 0.148), abs=1e-3)
    p = jnp.asarray([[1 / 3, 2 / 3]] * 3, jnp.float32)
    q = jnp.asarray([[2 / 3, 1 / 3]] * 2, jnp.float32)
    for u in (0.0, 0.5, 0.99):
        got = verify.block(p, q, jnp.array([0, 1]), jnp.int32(2), jnp.array([u, 0.99]))
        assert int(got[0]) == 2


def test_one_uniform_for_all_slots_is_rejected_for_blocks():
    """On S3 by integrating the shared uniform."""
    *rows, weights = path_rows(*S3, 3, 2)
    steps = 4096
    shared = (np.arange(steps) + 0.5) / steps
    mass = np.zeros((len(weights), W, V))
    for n in range(len(weights)):
        P, Q, tokens, count = (np.repeat(x[n : n + 1], steps, axis=0) for x in rows)
        uniforms = np.broadcast_to(shared[:, None], (steps, K)).astype(np.float32)
        accepted, laws = call(verify.block, P, Q, tokens, count, uniforms)
        np.add.at(mass[n], accepted, laws / steps)
    got = accepted_drafts(mass, weights), law_error(S3[0], 3, 2, mass, weights, rows[2])
    assert got == pytest.approx((0.96, 0.0320), abs=1e-3)


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
        (SLOT_Q, SLOT_Q, 1, 0.7),
        (SLOT_Q, SLOT_Q, 2, 0.31),
        (ARGMAX_Q, SLOT_Q, 2, 0.3),
        (ARGMAX_Q, None, 1, 0.3),
        (ARGMAX_Q, ARGMAX_Q, 0, 0.3),
        (ARGMAX_Q, None, 0, 0.3),
    ],
)
def test_one_slot_right(drawn, ratio, rule, acceptance):
    accepted, law = one_slot(SLOT_P, drawn, ratio, *RULES[rule])
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
    for (rule, mass_of), chance in zip(RULES, (0.85, 0.85, 0.7), strict=True):
        mass = mass_of(rule, P, Q, tokens, count)
        assert first_token(mass, weights, tokens)[0] == near(chance)


# ------------------------------------------------------------------------- exact: many rounds
@pytest.mark.parametrize(("rule", "mass_of"), RULES)
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


# ------------------------------------------------------------------------- shapes and corners
def random_laws(rng, shape, spread=3.0):
    weights = np.exp(rng.normal(size=shape) * spread)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("rule", [verify.token, verify.block])
def test_sparse_and_point_laws_equal_their_dense_form(rule):
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
    run = compiled(rule)
    for short, full in (
        (SparseLaw(ids, probs), dense),
        (SparseLaw(*twice), dense),  # repeated ids count together
        (None, np.eye(v, dtype=np.float32)[tokens]),
    ):
        got, expected = (run(p, q, tokens, count, uniforms) for q in (short, full))
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_allclose(got[1], expected[1], atol=1e-6)
        often = np.bincount(got[0], minlength=W) > 10
        assert often.all() or (rule is verify.block and often[:3].all())


@pytest.mark.parametrize("rule", [verify.token, verify.block])
def test_drafts_past_the_count_are_not_read(rule):
    p, run = jnp.asarray(random_laws(np.random.default_rng(0), (W, 5))), jax.jit(rule)
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


@pytest.mark.parametrize("rule", [verify.token, verify.block])
def test_corners_of_one_slot(rule):
    """Drafts that q excludes divide by nothing; a residual that vanishes gives p; no slots."""
    p, q = jnp.array([[0.5, 0.0, 0.5], [0.2, 0.3, 0.5]]), jnp.array([[1.0, 0.0, 0.0]])
    run = jax.jit(rule)
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
    accepted, law = rule(p[:1], None, none, jnp.int32(0), jnp.zeros((0,)))
    assert int(accepted) == int(verify.match(jnp.array([1]), none, jnp.int32(0))) == 0
    np.testing.assert_array_equal(law, p[0])


@pytest.mark.parametrize("rule", [verify.token, verify.block])
def test_drafts_from_the_target_s_own_law_are_all_accepted(rule):
    p = random_laws(np.random.default_rng(0), (50, W, V))
    tokens = np.random.default_rng(1).integers(0, V, (50, K)).astype(np.int32)
    last = np.full((50, K), BELOW_ONE)
    accepted, law = compiled(rule)(p, p[:, :K], tokens, np.full(50, K, np.int32), last)
    assert (np.asarray(accepted) == K).all()
    np.testing.assert_array_equal(law, p[:, K])


def test_with_one_hot_laws_all_rules_accept_alike():
    """Argmax drafts, with and without their one-hot law, and a target at temperature 0."""
    p, q = (random_table(np.random.default_rng(seed), 3) for seed in (3, 4))
    drafts, greedy = (1, 0, 2), lambda prefix: np.eye(3)[(sum(prefix) + len(prefix)) % 3]
    argmax = lambda prefix: np.eye(3)[drafts[len(prefix)]]  # noqa: E731
    by_draft = sum(probability(p, drafts[:k]) for k in (1, 2, 3))
    by_target = sum(probability(q, (0, 1, 0)[:k]) for k in (1, 2, 3))
    for rule, mass_of in RULES:
        assert check(p, argmax, 3, 3, rule, mass_of) == near((by_draft, 0))
        assert check(greedy, q, 3, 3, rule, mass_of) == near((by_target, 0))


@pytest.mark.parametrize("rule", [verify.token, verify.block])
def test_a_vocabulary_of_150_thousand(rule):
    rng, v, run = np.random.default_rng(0), 150_000, jax.jit(rule)
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


def test_coupled_drafts_are_refused_by_rules_that_read_a_law():
    with pytest.raises(ValueError, match="fresh noise in every round, and noise shared by posi"):
        verify.check_rule("token", "coupled")
    with pytest.raises(ValueError, match="fresh noise in every round"):
        verify.check_rule("block", "coupled")
    with pytest.raises(ValueError, match="verify='tree' is unknown: choose from match, token"):
        verify.check_rule("tree", "greedy")
    for name, drafting in (("token", "greedy"), ("block", "independent"), ("match", "coupled")):
        verify.check_rule(name, drafting)
    assert {d for ways in verify.RULES.values() for d in ways} == set(sampling.DRAFTING)
