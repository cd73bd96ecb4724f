"""Losses, weights and sums against numpy: cases H2, H3, H4, and numbers of the papers."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import drafter_hf
from specjax.training import objectives
from specjax.training.blocks import Labels
from specjax.training.losses import LOSSES
from specjax.training.objectives import Objective, loss_sums
from specjax.types import Vocabulary

B, A, K, E, V = 2, 5, 7, 48, tiny.VOCAB
CONFIG = drafter_hf.config_from_hf(tiny.drafter_config())
HEAD = jnp.asarray(tiny.tensor("lm_head.weight", (V, E)))
HIDDEN = jnp.asarray(tiny.tensor("hidden", (B, A, K, E))) * 30
TEACHER = jnp.asarray(tiny.tensor("teacher", (B, A, K, E))) * 30
BOTH = (("ce", 0.7), ("kl", 0.3))


def labels(lengths, seed=0):
    """Random labels of blocks that have `lengths` [B, A] of them."""
    shape = (*np.shape(lengths), K)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)
    mask = jnp.arange(K)[None, None] < jnp.asarray(lengths)[:, :, None]
    return Labels(tokens, mask, jnp.ones(shape, jnp.int32))


LABELS = labels([[7, 3, 0, 1, 7], [0, 7, 6, 2, 5]])


@partial(jax.jit, static_argnums=(0,), static_argnames=("chunk", "config"))
def run(objective, hidden, labels, teacher=None, *, chunk=4, rows=None, config=CONFIG, progress=1):
    """The sums, and the gradient of the loss in the hidden states."""

    def of(hidden):
        given = config, {}, Vocabulary(HEAD, HEAD), hidden, labels, teacher
        sums = loss_sums(objective, *given, chunk=chunk, rows=rows, progress=progress)
        return sums.loss, sums

    gradient, sums = jax.grad(of, has_aux=True)(hidden)
    return sums, gradient


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def by_hand(objective, hidden, labels, teacher, ids=None):
    """Loss, weight and weights [B, A, K] in float64, slot by slot."""
    head = np.asarray(HEAD, np.float64)
    logits, target = (np.asarray(x, np.float64) @ head.T for x in (hidden, teacher))
    if ids is not None:
        lacking = np.setdiff1d(np.arange(V), ids)
        logits[..., lacking] = target[..., lacking] = -np.inf
    log_q, log_p = log_softmax(logits), log_softmax(target)
    weights, total = np.zeros(hidden.shape[:3]), 0.0
    for b, a in np.ndindex(hidden.shape[:2]):
        count = int(labels.mask[b, a].sum())
        own = [log_q[b, a, k, labels.tokens[b, a, k]] for k in range(count)]
        alive = np.cumprod([(1 - objective.alpha) * np.exp(x) + objective.alpha for x in own])
        for k in range(count):
            dpace = objective.weights == "dpace"
            weights[b, a, k] = alive[k:].sum() if dpace else np.exp(-k / 4)
            p, seen = np.exp(log_p[b, a, k]), log_p[b, a, k] > -np.inf
            kl = (p[seen] * (log_p[b, a, k, seen] - log_q[b, a, k, seen])).sum()
            one = dict(objective.losses)
            total += weights[b, a, k] * (one.get("ce", 0) * -own[k] + one.get("kl", 0) * kl)
    return total, weights.sum(), weights


@pytest.mark.parametrize("losses", [(("ce", 1.0),), (("kl", 1.0),), BOTH])
@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_sums_equal_numpy(losses, weights):  # cases H2, H3
    objective = Objective(losses, weights)
    sums, _ = run(objective, HIDDEN, LABELS, TEACHER)
    total, weight, _ = by_hand(objective, HIDDEN, LABELS, TEACHER)
    np.testing.assert_allclose(sums.loss, total, rtol=1e-5)
    np.testing.assert_allclose(sums.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(sums.mean, total / weight, rtol=1e-5)
    assert sums.blocks == 8
    np.testing.assert_array_equal(sums.seen, LABELS.mask.sum(axis=(0, 1)))


@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_the_gradient_is_that_of_the_plain_formula(weights):
    objective = Objective(BOTH, weights)
    _, gradient = run(objective, HIDDEN, LABELS, TEACHER)
    detached = jnp.asarray(by_hand(objective, HIDDEN, LABELS, TEACHER)[2], jnp.float32)

    def plain(hidden):
        log_q = jax.nn.log_softmax(hidden @ HEAD.T, axis=-1)
        log_p = jax.nn.log_softmax(TEACHER @ HEAD.T, axis=-1)
        ce = -jnp.take_along_axis(log_q, LABELS.tokens[..., None], axis=-1)[..., 0]
        return jnp.sum(detached * (0.7 * ce + 0.3 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)))

    np.testing.assert_allclose(gradient, jax.grad(plain)(HIDDEN), atol=1e-5, rtol=1e-5)


def test_the_gradient_is_scaled_and_goes_through_the_loss_alone():
    def of(hidden, scale):
        sums = loss_sums(
            Objective(weights="dpace"), CONFIG, {}, Vocabulary(HEAD, HEAD), hidden, LABELS, chunk=4
        )
        return scale * sums.loss / sums.weight, sums.weight

    (_, weight), got = jax.value_and_grad(of, has_aux=True)(HIDDEN, 3.0)
    _, want = run(Objective(weights="dpace"), HIDDEN, LABELS)
    np.testing.assert_allclose(got, 3.0 * want / weight, rtol=1e-5, atol=1e-8)
    of_weight = jax.grad(lambda hidden: of(hidden, 1.0)[1])(HIDDEN)
    assert (of_weight == 0).all()


@pytest.mark.parametrize("chunk", [1, 2, 4, 6, 7, 8, 10, 1000])
def test_every_chunk_gives_the_same(chunk):
    objective = Objective(BOTH, "dpace")
    whole = run(objective, HIDDEN, LABELS, TEACHER, chunk=B * A)
    for got, want in zip(
        jax.tree.leaves(run(objective, HIDDEN, LABELS, TEACHER, chunk=chunk)),
        jax.tree.leaves(whole),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_micro_batches_add_up_to_the_whole(weights):  # case H4
    lengths = np.zeros((2, 20), int)
    lengths[0, :2] = 7, 3  # 10 labels
    lengths[1, :15] = [7] * 14 + [2]  # 100 labels
    both = labels(lengths)
    hidden = jnp.asarray(tiny.tensor("hidden", (2, 20, K, E))) * 30
    objective = Objective(weights=weights)
    whole, gradient = run(objective, hidden, both)
    parts = [
        run(objective, hidden[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], both))
        for i in range(2)
    ]
    assert [int(sums.seen.sum()) for sums, _ in parts] == [10, 100]
    added = parts[0][0] + parts[1][0]
    for got, want in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    pieces = jnp.concatenate([piece for _, piece in parts]) / added.weight
    np.testing.assert_allclose(pieces, gradient / whole.weight, rtol=1e-5, atol=1e-9)
    mean_of_means = (parts[0][0].mean + parts[1][0].mean) / 2
    assert abs(mean_of_means - whole.mean) > 1e-3


def test_no_label_at_all_is_zero():  # case H3
    sums, gradient = run(Objective(BOTH, "dpace"), HIDDEN, labels(np.zeros((B, A), int)), TEACHER)
    assert sums.mean == 0
    assert all((x == 0).all() for x in jax.tree.leaves((sums, gradient)))


def test_counts_are_those_of_greedy_verification():
    hidden = HIDDEN / 30  # logits close to each other
    second, right = jnp.moveaxis(jnp.argsort(hidden @ HEAD.T, axis=-1)[..., -2:], -1, 0)
    hits = np.ones((B, A, K), bool)
    hits[0, 0, 2] = hits[0, 1, 0] = hits[1, 1, 6] = False
    known = LABELS._replace(tokens=jnp.where(hits, right, second))
    sums, _ = run(Objective(), hidden, known)
    good = hits & np.asarray(LABELS.mask)
    np.testing.assert_array_equal(sums.correct, good.sum(axis=(0, 1)))
    by_hand = (2 + 0 + 0 + 1 + 7) + (0 + 6 + 6 + 2 + 5)
    assert int(sums.expected) == np.cumprod(good, axis=-1).sum() == by_hand


def test_exponential_weights_have_a_default_for_known_blocks():
    with pytest.raises(ValueError, match=r"blocks of 12 .*16, 10, 8.*objective\.gamma"):
        run(Objective(), HIDDEN, LABELS, config=replace(CONFIG, block_size=12))
    run(Objective(weights="dpace"), HIDDEN, LABELS, config=replace(CONFIG, block_size=12))


# The restricted vocabulary, and the head's options.


def test_rows_are_the_vocabulary():
    labelled = np.asarray(LABELS.tokens[LABELS.mask])
    ids = np.setdiff1d([*labelled, 0, 3, V - 1], 40).astype(np.int32)
    assert np.setdiff1d(LABELS.tokens, ids).size > 1  # of masked slots: they do not matter
    known = LABELS._replace(tokens=jnp.where(LABELS.tokens == 40, 3, LABELS.tokens))
    objective = Objective(BOTH, "dpace")
    sums, gradient = run(objective, HIDDEN, known, TEACHER, rows=jnp.asarray(ids))
    assert bool(jnp.isfinite(gradient).all())
    total, weight, _ = by_hand(objective, HIDDEN, known, TEACHER, ids)
    np.testing.assert_allclose(sums.loss, total, rtol=1e-5)
    np.testing.assert_allclose(sums.weight, weight, rtol=1e-5)
    logits = np.full((B, A, K, V), -np.inf)
    logits[..., ids] = np.asarray(HIDDEN @ HEAD[ids].T)
    hits = (logits.argmax(axis=-1) == np.asarray(known.tokens)) & np.asarray(known.mask)
    np.testing.assert_array_equal(sums.correct, hits.sum(axis=(0, 1)))
    full, of_full = run(objective, HIDDEN, known, TEACHER, rows=jnp.arange(V, dtype=jnp.int32))
    want, of_want = run(objective, HIDDEN, known, TEACHER)
    np.testing.assert_allclose(full.loss, want.loss, rtol=1e-6)
    np.testing.assert_allclose(of_full, of_want, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(gradient - of_want).max()) > 1e-3


def test_a_label_outside_the_rows_shows():
    ids = np.setdiff1d(np.arange(V), LABELS.tokens[0, 0, 0]).astype(np.int32)
    sums, _ = run(Objective(), HIDDEN, LABELS, rows=jnp.asarray(ids))
    assert sums.loss == jnp.inf


def test_multiplier_and_cap_are_those_of_decoding():
    config = replace(CONFIG, output_multiplier=0.5, logit_softcap=3.0)
    sums, _ = run(Objective(), HIDDEN, LABELS, config=config)
    log_q = log_softmax(3 * np.tanh(np.asarray(HIDDEN @ HEAD.T, np.float64) * 0.5 / 3))
    ce = -np.take_along_axis(log_q, np.asarray(LABELS.tokens)[..., None], axis=-1)[..., 0]
    want = (ce * np.exp(-np.arange(K) / 4) * np.asarray(LABELS.mask)).sum()
    np.testing.assert_allclose(sums.loss, want, rtol=1e-5)


def test_statistics_are_float32_whatever_the_networks_are():
    half = jnp.bfloat16

    def of(hidden):
        vocabulary = Vocabulary(HEAD.astype(half), HEAD.astype(half))
        sums = loss_sums(
            Objective(BOTH, "dpace"),
            CONFIG,
            {},
            vocabulary,
            hidden,
            LABELS,
            TEACHER.astype(half),
            chunk=4,
        )
        return sums.loss, sums

    gradient, sums = jax.grad(of, has_aux=True)(HIDDEN.astype(half))
    assert gradient.dtype == half
    assert {x.dtype for x in jax.tree.leaves(sums)} == {jnp.dtype(jnp.float32)}
    exact, _ = run(Objective(BOTH, "dpace"), HIDDEN, LABELS, TEACHER)
    np.testing.assert_allclose(sums.mean, exact.mean, rtol=0.02)


def test_a_mesh_changes_nothing():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    head = put(jnp.pad(HEAD, ((0, 3), (0, 0)), constant_values=-1.0), "model")

    @partial(jax.jit, static_argnums=0)
    def step(objective, hidden, head, labels, teacher):
        def of(hidden):
            vocabulary = Vocabulary(head, head)
            sums = loss_sums(objective, CONFIG, {}, vocabulary, hidden, labels, teacher, chunk=4)
            return sums.mean, sums

        return jax.grad(of, has_aux=True)(hidden)

    objective = Objective(BOTH, "dpace")
    alone = step(objective, HIDDEN, np.asarray(head), LABELS, TEACHER)
    rows = jax.tree.map(lambda x: put(x, "data"), (HIDDEN, LABELS, TEACHER))
    split = step(objective, rows[0], head, rows[1], rows[2])
    for got, want in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@partial(jax.jit, static_argnames="chunk")
def every_loss(hidden, labels, teacher, chunk):
    """The sum of every loss by itself."""
    of_all = {}
    for name in LOSSES:
        objective = Objective(((name, 1.0),), "vat")
        vocabulary = Vocabulary(HEAD, HEAD)
        sums = loss_sums(
            objective, CONFIG, {}, vocabulary, hidden, labels, teacher, chunk=chunk, progress=0.25
        )
        of_all[name] = sums.loss
    return of_all


def test_chunks_micro_batches_and_devices_change_no_loss():
    """By a millionth, of every loss there is."""
    hidden, teacher = 0.3 * HIDDEN, 0.3 * TEACHER  # laws far apart: nothing cancels
    everything = (hidden, LABELS, teacher)
    whole = jax.device_get(every_loss(*everything, chunk=B * A))
    halves = [
        jax.device_get(every_loss(*jax.tree.map(lambda x, b=b: x[b : b + 1], everything), chunk=A))
        for b in range(B)
    ]
    mesh = Mesh(np.array(jax.devices()[:B]), ("data",))
    rows = jax.device_put(everything, NamedSharding(mesh, PartitionSpec("data")))
    for other in (
        every_loss(*everything, chunk=4),
        every_loss(*rows, chunk=4),
        jax.tree.map(np.add, *halves),
    ):
        for name, value in jax.device_get(other).items():
            assert value == pytest.approx(whole[name], rel=3e-6), (
                name
            )  # float32 sums in another order: up to 1.2e-6
            assert abs(value) > 0.01


def test_laws_are_those_of_the_temperature():
    """As if the logits had been divided: both networks' heads are linear."""
    both = (("ce", 0.5), ("kl", 0.2), ("bv", 0.3))
    got = run(Objective(both, temperature=0.5), HIDDEN / 10, LABELS, TEACHER / 10)
    want = run(Objective(both), HIDDEN / 5, LABELS, TEACHER / 5)
    np.testing.assert_allclose(got[0].loss, want[0].loss, rtol=1e-5)
    np.testing.assert_allclose(got[1], 2 * want[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("progress", "part", "own"), [(0, 0, 0), (0.3, 0, 0.5), (0.6, 1, 0), (0.7, 1, 0.25), (1, 1, 1)]
)
def test_a_run_of_two_parts(progress, part, own):
    """Each part is a run of its own: its losses, from nothing done to all done."""
    parts = (("ce", 0.5), ("bv", 0.3)), (("kl", 0.2), ("bv", 1.0))
    both = Objective(parts[0], finish=parts[1], finish_share=0.4)
    got = run(both, HIDDEN, LABELS, TEACHER, progress=progress)
    want = run(Objective(parts[part]), HIDDEN, LABELS, TEACHER, progress=own)
    np.testing.assert_allclose(got[0].loss, want[0].loss, rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)
    assert both.names == ("ce", "bv", "kl")


def test_the_verification_head_learns_which_slots_are_kept():
    """Its cross-entropy by hand, with gradients in its weights and in the states alike."""
    objective = Objective(weights="vat", verification=0.7)
    own = {"weight": jnp.asarray(tiny.tensor("own", (E,))) * 3, "bias": jnp.full((1,), 0.2)}

    @partial(jax.jit, static_argnums=0)
    def both(objective, hidden, own):
        def of(hidden, own):
            params, vocabulary = {"verification_head": own}, Vocabulary(HEAD, HEAD)
            sums = loss_sums(objective, CONFIG, params, vocabulary, hidden, known, chunk=4)
            return sums.loss, sums

        return jax.value_and_grad(of, (0, 1), has_aux=True)(hidden, own)

    best = jnp.argmax(HIDDEN @ HEAD.T, axis=-1).astype(jnp.int32)
    known = LABELS._replace(tokens=best.at[0, 0, 3].set(0).at[1, 1, 0].set(0))
    (_, sums), (of_hidden, of_own) = both(objective, HIDDEN, own)
    (_, less), (of_less, _) = both(replace(objective, verification=0.0), HIDDEN, own)
    right = jnp.cumprod((known.tokens == best).astype(jnp.float32), axis=-1)
    slot = jnp.arange(K)[None, None]
    behind = jnp.array([[3, K, K, K, K], [K, 0, K, K, K]])[..., None]  # the first error
    weight = jnp.exp(-jnp.maximum(slot - behind, 0) / 4) * known.mask.astype(jnp.float32)

    def by_hand(hidden, own):
        sure = jax.nn.sigmoid(hidden @ own["weight"] + own["bias"][0])
        loss = -(right * jnp.log(sure) + (1 - right) * jnp.log(1 - sure))
        return 0.7 * jnp.sum(weight * loss)

    np.testing.assert_allclose(sums.loss - less.loss, by_hand(HIDDEN, own), rtol=1e-4)
    of_states, of_weights = jax.grad(by_hand, (0, 1))(HIDDEN, own)
    np.testing.assert_allclose(of_hidden - of_less, of_states, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), of_own, of_weights)


def test_the_head_s_cross_entropy_has_the_numbers_of_the_paper():
    hidden = jax.scipy.special.logit(jnp.array([[[[0.9, 0.8, 0.4, 0.7]]]]))[..., None]
    params = {"verification_head": {"weight": jnp.ones(1), "bias": jnp.zeros(1)}}
    hit = jnp.array([[[True, True, False, True]]])
    verdicts = objectives.Verdicts(hit, jnp.full((1, 1, 4), 0.25))
    assert float(objectives._verification(params, hidden[:, 0], verdicts)) == pytest.approx(
        0.510826, abs=1e-6
    )


@pytest.mark.parametrize(
    ("losses", "recorded", "message"),
    [
        ((("bv", 1.0),), (1.0, 0, 1.0), None),
        ((("ce", 1.0), ("kl", 1.0), ("chain", 40.0)), (0.0, 0, 1.0), None),
        ((("ce", 0.1), ("bv", 0.9)), (0.0, 0, 1.0), "recorded greedily, and bv takes text as"),
        ((("token", 0.5), ("bv_cheap", 1.0)), (0.0, 0, 1.0), "take it, or record the text at temp"),
        ((("bv", 1.0),), (0.8, 0, 1.0), "temperature 0.8, and bv takes text as drawn at temp.* 1 "),
        ((("bv", 1.0),), (1.0, 0, 0.9), "top_k 0, top_p 0.9, and bv"),
        ((("bv", 1.0),), (1.0, 20, 1.0), "top_k 20, top_p 1, and bv"),
    ],
)
def test_text_of_another_law_is_found(losses, recorded, message):
    found = Objective(losses).misread(*recorded)
    assert (found is None) == (message is None)
    assert message is None or re.search(message, found)
    assert Objective((("kl", 1.0),), finish=losses).misread(*recorded) == found
    if recorded[0] == 0.8:
        assert Objective(losses, temperature=0.8).misread(*recorded) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "positive and finite, not 0.0: for verification at 0 take the loss"),
        ({"losses": (("mse", 1.0),)}, "loss 'mse' is unknown; choose from ce, kl"),
        ({"losses": ()}, "at least one loss"),
        ({"losses": (("ce", 1.0), ("ce", 2.0))}, "each once"),
        ({"finish": (("mse", 1.0),)}, "loss 'mse' is unknown"),
        ({"finish": (("bv", 1.0), ("bv", 2.0))}, "finish .* each loss once"),
        ({"finish_share": 1.0}, "finish_share must be between 0 and 1, not 1.0"),
        ({"weights": "linear"}, "weights 'linear' are unknown; choose from exponential, dpace"),
        ({"gamma": 0.0}, "gamma must be positive, not 0.0"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1, not 1.5"),
    ],
)
def test_wrong_objectives_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(**arguments)


def test_what_cannot_be_computed_is_refused():
    args = (CONFIG, {}, Vocabulary(HEAD, HEAD), HIDDEN, LABELS)
    with pytest.raises(ValueError, match="need the target's final hidden states"):
        loss_sums(Objective(BOTH), *args, chunk=4)
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        loss_sums(Objective(), *args, chunk=0)
    own = (CONFIG, {"head": HEAD}, *args[2:])
    with pytest.raises(ValueError, match="reduced vocabulary"):
        loss_sums(Objective(), *own, chunk=4)
    assert Objective(BOTH).needs_target
    assert not Objective().needs_target
    assert hash(Objective()) == hash(Objective(gamma=None))
