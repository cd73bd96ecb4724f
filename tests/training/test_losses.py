"""Every loss and weight against the numbers of its paper and against the rule that it belongs to.

The losses are given laws as they are: what the chunked head does with them is in test_objectives.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses
from specjax.training.losses import LOSSES, WEIGHTS, Scores
from specjax.training.objectives import Objective

near = lambda x: pytest.approx(x, abs=2e-6)  # noqa: E731

X = [0, 1, 1]
P = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.5, 0.2]])
Q = np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.2, 0.6, 0.2]])


def scores(logits, p, x, mask=None, progress=1.0):
    """One block of draft logits [K, V], target laws [K, V] and recorded tokens [K]."""
    log_q = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)[None]
    log_p = jnp.log(jnp.asarray(p, jnp.float32))[None]
    x = jnp.asarray(x, jnp.int32)[None]
    label, target_label = (
        jnp.take_along_axis(law, x[..., None], axis=-1)[..., 0] for law in (log_q, log_p)
    )
    mask = jnp.ones(x.shape, bool) if mask is None else jnp.asarray(mask)[None]
    hit = mask & (jnp.argmax(log_q, axis=-1).astype(jnp.int32) == x)
    return Scores(log_q, label, mask, log_p, target_label, hit, jnp.float32(progress))


def slots(name, *arguments, **settings):
    """What a loss gives for the slots of one block."""
    return LOSSES[name](Objective(), scores(*arguments, **settings))[0]


def block(name, *arguments, **settings):
    """The one value that a loss of whole blocks gives."""
    values = slots(name, *arguments, **settings)
    assert (values == values[0]).all()
    return float(values[0])


# ------------------------------------------------------------------------------------- by slot
def one(name, q, p=(0.5, 0.3, 0.2)):
    return float(slots(name, np.log([q]), [p], [0])[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl", 0.274887),
        ("reverse_kl", 0.274887),
        ("tv", 0.3),
        ("lk", 0.356675),
        ("lk_hybrid", 0.296925),
        ("ce", -np.log(0.2)),
    ],
)
def test_losses_of_a_slot(name, value):
    assert one(name, [0.2, 0.3, 0.5]) == near(value)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("tv", [-0.104, -0.1456, 0.2496]),
        ("lk", [-0.104 / 0.68, -0.1456 / 0.68, 0.2496 / 0.68]),
        ("kl", [-0.3, -0.02, 0.32]),
    ],
)
def test_gradients_of_a_slot(name, gradient):
    p = [[0.5, 0.3, 0.2]]
    got = jax.grad(lambda z: slots(name, z, p, [0])[0])(jnp.log(jnp.array([[0.2, 0.28, 0.52]])))
    np.testing.assert_allclose(got[0], gradient, atol=1e-6)


def test_far_from_the_target_only_kl_pulls():
    far, p = jnp.log(jnp.array([[1e-4, 1e-4, 0.9998]])), [[0.5, 0.3, 0.2]]
    norms = [
        float(jnp.linalg.norm(jax.grad(lambda z, n=name: slots(n, z, p, [0])[0])(far)))
        for name in ("tv", "lk", "kl")
    ]
    assert norms == pytest.approx([0.000245, 0.001223, 0.9897], rel=5e-3)


# ------------------------------------------------------------------------------------ by block
BV = {0.0: 0.4972182923, 0.25: 0.4855898536, 0.5: 0.4738937739, 1.0: 0.4505122860}


@pytest.mark.parametrize("beta", BV)
def test_bv_values(beta):
    tolerance = 2e-5 if beta == 0 else 2e-6  # 0 is approached: the power is 1e-3
    got = block("bv", np.log(Q), P, X, progress=beta / 2)
    assert got == pytest.approx(BV[beta], abs=tolerance)
    assert block("bv", np.log(Q), P, X, progress=1.0) == near(BV[1.0])


def test_bv_linear_values():
    assert 3 * block("bv_linear", np.log(Q), P, X) == near(-1.9119048)
    kept = jnp.exp(losses._log_kept(scores(np.log(Q), P, X)))[0]
    np.testing.assert_allclose(kept, [0.9, 0.5833333, 0.4285714], atol=1e-6)


@pytest.mark.parametrize("name", ["bv", "bv_linear", "bv_cheap", "token", "chain"])
def test_gradients_are_central_differences(name):
    z = np.log(Q) + 0.1 * np.random.default_rng(0).normal(size=Q.shape)

    @jax.jit
    def loss(z):
        return slots(name, z, P, X)[0]

    got = jax.grad(loss)(jnp.asarray(z, jnp.float32))
    for i in np.ndindex(z.shape):
        step = np.zeros_like(z)
        step[i] = 2e-3
        want = (float(loss(z + step)) - float(loss(z - step))) / 4e-3
        assert float(got[i]) == pytest.approx(want, abs=5e-4)


def test_limits_of_bv():
    same = block("bv", np.log(P), P, X), block("bv_linear", np.log(P), P, X)
    assert same == near((0, -1))
    assert block("bv_linear", np.log(Q[:1]), P[:1], X[:1]) == near(-(1 - 0.1))  # 1 - TV
    one_hot = np.eye(3)[X]
    assert 3 * block("bv_linear", np.log(Q), one_hot, X) == near(-(0.5 + 0.2 + 0.12))
    assert block("bv_linear", np.log(Q), one_hot, X) == near(block("chain", np.log(Q), P, X))
    got = block("bv", np.log(Q), one_hot, X, progress=0.0)
    assert got == pytest.approx(1.4742828764, abs=2e-3)
    values = [block("bv", np.log(Q), P, X, progress=b / 8) for b in range(5)]
    assert values == sorted(values, reverse=True)


def test_equal_laws_have_nothing_to_learn():
    for name in ("kl", "reverse_kl", "tv", "lk", "lk_hybrid", "bv"):
        np.testing.assert_allclose(slots(name, np.log(P), P, X), 0, atol=1e-6)
    for name in ("token", "bv_linear", "bv_cheap"):
        assert block(name, np.log(P), P, X) == near(-1)


def test_for_a_single_slot_all_rules_count_the_overlap():
    one = np.log(Q[:1]), P[:1], X[:1]
    overlap = 1 - float(slots("tv", *one)[0])
    assert overlap == near(0.9)
    assert block("token", *one) == block("bv_linear", *one) == near(-overlap)
    assert block("bv", *one) == near(float(slots("lk", *one)[0]))


def test_one_bad_early_slot_is_all_that_the_logarithm_sees():
    bad = Q.copy()
    bad[0] = [0.001, 0.6, 0.399]
    kept = jnp.exp(losses._log_kept(scores(np.log(bad), P, X)))[0]
    np.testing.assert_allclose(kept / kept.sum(), [0.995, 0.003, 0.002], atol=1e-3)


# ---------------------------------------------------------------------- against the rules
def expected(name, p, q):
    """The mean of a block loss over everything that the target writes."""
    paths = list(product(range(2), repeat=2))
    weights, values = [], []
    for x in paths:
        rows_p = [p[()], p[x[:1]]]
        weights.append(rows_p[0][x[0]] * rows_p[1][x[1]])
        values.append(block(name, np.log(q), rows_p, x))
    return -2 * float(np.dot(weights, values))


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("chain", 52 / 81), ("token", 10 / 9), ("bv_linear", 11 / 9), ("bv_cheap", 11 / 9)],
)
def test_a_loss_is_what_its_rule_accepts(name, accepted):
    """S2 of the rules' own tests: p = (1/3, 2/3), q = (2/3, 1/3) in both slots."""
    law = np.array([1 / 3, 2 / 3])
    p = {(): law, (0,): law, (1,): law}
    assert expected(name, p, np.array([[2 / 3, 1 / 3]] * 2)) == near(accepted)


@pytest.mark.parametrize(
    ("second", "token", "block"),
    [((1 / 3, 2 / 3), 1, 10 / 9), ((1e-9, 1), 1, 1), ((0.5, 0.5), 1, 7 / 6)],
)
def test_behind_a_bad_slot_only_blocks_care(second, token, block):
    """The frozen slot: the best second slot for blocks is no better for the token rule."""
    p = {(): np.array([1 / 3, 2 / 3]), (0,): np.array([1, 1e-30]), (1,): np.array([1e-30, 1])}
    q = np.array([[2 / 3, 1 / 3], second])
    assert expected("token", p, q) == pytest.approx(token, abs=1e-5)
    assert expected("bv_linear", p, q) == pytest.approx(block, abs=1e-5)


# ------------------------------------------------------------------ three interventions, weights
def test_the_chain_and_its_gradient():
    q = np.array([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5]])
    assert block("chain", np.log(q), np.full((3, 2), 0.5), [0, 0, 0]) == near(-0.66)

    def of_label(label):
        made = scores(np.log(q), np.full((3, 2), 0.5), [0, 0, 0])
        return LOSSES["chain"](Objective(), made._replace(label=label))[0, 0]

    gradient = jax.grad(of_label)(jnp.log(jnp.array([[0.9, 0.8, 0.5]])))
    np.testing.assert_allclose(-gradient[0], [0.66, 0.36, 0.12], atol=1e-6)


def test_the_first_error_counts_once_more():
    made = scores(np.log(np.full((5, 2), 0.5)), np.full((5, 2), 0.5), [0] * 5)
    made = made._replace(
        label=-jnp.array([[0.1, 0.2, 1.5, 0.3, 2.0]]),
        hit=jnp.array([[True, True, False, True, False]]),
    )
    both = LOSSES["ce"](Objective(), made) + 0.3 * LOSSES["focal"](Objective(), made)
    assert float(both.mean()) == near(1.27)
    right = LOSSES["focal"](Objective(), made._replace(hit=made.mask))
    assert (right == 0).all()


def weights(name, q, hit=None, mask=None, **settings):
    K = len(q)
    made = scores(np.zeros((K, 2)), np.full((K, 2), 0.5), [0] * K, mask)
    made = made._replace(label=jnp.log(jnp.asarray([q], jnp.float32)))
    if hit is not None:
        made = made._replace(hit=jnp.asarray([hit]))
    return WEIGHTS[name](Objective(weights=name, **settings), 8, made)[0]


def test_exponential_weights():
    np.testing.assert_allclose(
        weights("exponential", [0.5] * 3, gamma=7.0), [1, 0.8669, 0.7515], atol=5e-5
    )
    for size, gamma in {16: 7, 10: 5, 8: 4}.items():
        got = WEIGHTS["exponential"](
            Objective(), size, scores(np.zeros((3, 2)), np.full((3, 2), 0.5), [0] * 3)
        )
        np.testing.assert_allclose(got[0], np.exp(-np.arange(3) / gamma), rtol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "want"),
    [
        (0.5, [2.44625, 1.49625, 0.64125]),
        (1.0, [3, 2, 1]),
        (0.0, [0.9 + 0.72 + 0.36, 0.72 + 0.36, 0.36]),
    ],
)
def test_dpace_weights(alpha, want):
    np.testing.assert_allclose(weights("dpace", [0.9, 0.8, 0.5], alpha=alpha), want, rtol=1e-5)
    cut = weights("dpace", [0.9, 0.8, 0.5, 0.7, 0.1], mask=[True] * 3 + [False] * 2, alpha=alpha)
    np.testing.assert_allclose(cut, [*want, 0, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "want"),
    [
        (1, [1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542]),
        (3, [1, 1, 1, 0.866878, 0.751477, 0.651439]),
        (7, [1] * 6),
    ],
)
def test_vat_weights_begin_again_at_the_first_error(first, want):
    hit = [
        k < first or k == 5 for k in range(1, 7)
    ]  # what is right behind an error changes nothing
    got = weights("vat", [0.5] * 6, hit if first < 5 else [True] * 6, gamma=7.0)
    np.testing.assert_allclose(got, want, atol=1e-6)


# -------------------------------------------------------------------------------------- corners
@pytest.mark.parametrize("name", LOSSES)
def test_slots_without_a_label_change_nothing(name):
    mask = [True, True, False]
    one = slots(name, np.log(Q), P, X, mask=mask)
    other_q, other_p = Q.copy(), P.copy()
    other_q[2], other_p[2] = [0.1, 0.1, 0.8], [0.9, 0.05, 0.05]
    two = slots(name, np.log(other_q), other_p, [0, 1, 2], mask=mask)
    np.testing.assert_allclose(one[:2], two[:2], rtol=1e-6)
    gradient = jax.grad(lambda z: jnp.sum(slots(name, z, P, X, mask=[False] * 3)[:1] * 0))(
        jnp.log(jnp.asarray(Q))
    )
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_laws_give_finite_losses_and_gradients(name):
    z = jnp.array([[0.0, -200.0, -200.0], [-150.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    p = np.array([[1e-30, 1.0, 0.0], [0.2, 0.0, 0.8], [1.0, 0.0, 0.0]])
    if "kl" in name or "lk_hybrid" in name:
        p = np.maximum(p, 1e-30)  # a softmax of finite logits has no zeros
    value, gradient = jax.value_and_grad(lambda z: jnp.sum(slots(name, z, p, [1, 0, 0])))(z)
    assert bool(jnp.isfinite(value))
    assert bool(jnp.isfinite(gradient).all())
