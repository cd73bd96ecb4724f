"""Drawing: exact filters, laws without NaN, noise with the right law, keys that never meet."""

import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from specjax.decoding import sampling, verify
from specjax.decoding.sampling import make_sampling, row_keys

# Compiled once per shape and mode: op by op the same tests take several times as long.
filtered, law, choose = (jax.jit(f) for f in (sampling.filtered, sampling.law, sampling.choose))
position_noise = jax.jit(sampling.position_noise, static_argnums=2)
P = np.array([0.5, 0.3, 0.2])


def make(temperature=1.0, top_k=0, top_p=1.0, batch=1, V=3, drafting="independent"):
    return make_sampling(temperature, top_k, top_p, batch=batch, vocab_size=V, drafting=drafting)


def logits_of(p, rows=1):
    """log p as [1, rows, V]."""
    log = jnp.log(jnp.asarray(p, jnp.float32))
    return jnp.broadcast_to(log[None, None], (1, rows, len(p)))


@lru_cache(1)
def noise_table():
    """Noise [2, 400k, 8] of two rows; its columns are independent, so fewer may be used."""
    positions = jnp.arange(400_000, dtype=jnp.int32)[None]
    return position_noise(row_keys(0, [0, 1]), jnp.concatenate([positions] * 2), 8)


def draws(p, how, n, row=0):
    """n tokens from the law p [V], V at most 8, through the noise of a row."""
    noise = noise_table()[row : row + 1, :n, : len(p)]
    return np.asarray(choose(logits_of(p, n), how, noise))[0]


def fits(tokens, p, alarm=1e-9):
    """Whether tokens could come from the law p, by chi-square; no cell expects below 5."""
    p = np.asarray(p, float)
    counts, possible = np.bincount(tokens, minlength=len(p)), p > 0
    if counts[~possible].any():
        return False
    expected = len(tokens) * p[possible]
    assert expected.min() >= 5
    chi = np.sum((counts[possible] - expected) ** 2 / expected)
    return possible.sum() == 1 or chi < stats.chi2.isf(alarm, possible.sum() - 1)


# ------------------------------------------------------------------------------- make_sampling
def test_mode_is_decided_on_the_host():
    assert make(0.0, top_k=5, top_p=0.5, V=9).mode == "greedy"
    assert make([0.0, 1e-6], batch=2).mode == "greedy"
    assert make([0.0, 0.5], batch=2).mode == "sampled"
    assert make(1.0, top_k=2).mode == make(1.0, top_p=0.9).mode == "filtered"
    assert make(1.0, top_k=3).mode == "sampled"  # V tokens: nothing to cut
    assert make(1.0, top_p=1 - 1e-12).mode == "sampled"  # 1 in float32


def test_values_are_stored_per_row():
    how = make([0.0, 1e-5, 0.7], top_k=2, top_p=0.25, batch=3)
    np.testing.assert_array_equal(how.temperature, np.float32([0, 0, 0.7]))
    assert (int(how.top_k), float(how.top_p), how.drafting) == (2, 0.25, "independent")
    assert make(0.3, batch=4).temperature.shape == (4,)
    assert [x.dtype for x in jax.tree.leaves(how)] == [jnp.float32, jnp.int32, jnp.float32]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature .* not -0\.1: 0 is greedy"),
        ({"temperature": float("nan")}, "temperature .* not nan"),
        ({"temperature": float("inf")}, "temperature .* not inf"),
        ({"temperature": [1.0, -1.0], "batch": 2}, r"temperature .* not -1\.0"),
        ({"temperature": [1.0, 1.0, 1.0], "batch": 2}, r"shape \(3,\) for 2 prompts: give one"),
        ({"top_p": 0.0}, r"top_p must be above 0 .* not 0\.0: 1 keeps"),
        ({"top_p": 1.5}, r"top_p .* not 1\.5"),
        ({"top_p": float("nan")}, "top_p .* not nan"),
        ({"top_k": -2}, "top_k must be .* not -2: None, 0 or -1 keep"),
        ({"top_k": 2.5}, r"top_k must be a whole number .* not 2\.5"),
        ({"drafting": "shared"}, "drafting='shared' is unknown: choose from greedy, coupled"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make(**values)


# ----------------------------------------------------------------------------------- filtering
def reference_kept(logits, temperature, top_k, top_p):
    """Sort-based top-k, then top-p: which tokens stay, and how near the mass comes to top_p."""
    keep = np.ones(len(logits), bool)
    if temperature and top_k:
        keep &= logits >= np.sort(logits)[::-1][top_k - 1]
    if not temperature or top_p == 1:
        return keep, 1.0
    mass = np.where(keep, np.exp((logits - logits.max()) / temperature), 0)
    levels, group = np.unique(-logits, return_inverse=True)  # ties share a level, best first
    level_mass = np.bincount(group, mass / mass.sum(), len(levels))
    above = np.cumsum(level_mass) - level_mass
    return keep & (above < top_p)[group], np.abs(above - top_p).min()


def random_rows(rng, V, rows):
    """Flat, peaked and tied logits, some with -inf."""
    logits = rng.normal(size=(rows, V)) * rng.choice([0.3, 2.0, 6.0], (rows, 1))
    logits[::3] = np.round(logits[::3])  # many ties, negative zeros among them
    logits[1::5, rng.integers(V)] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize(
    ("V", "candidates"), [(7, 256), (97, 256), (1000, 256), (1000, 4)]
)  # few candidates: bisection decides
def test_filters_equal_a_sorted_reference(V, candidates, monkeypatch):
    monkeypatch.setattr(sampling, "_CANDIDATES", candidates)
    rng, traces = np.random.default_rng(V), []

    @jax.jit
    def run(logits, how):
        traces.append(1)
        return sampling.filtered(logits, how)

    checked = cut = near_ties = 0
    settings = [(0, 0.9), (5, 1.0), (40, 0.7), (2, 0.5), (300, 0.99), (0, 0.05), (1, 1.0)]
    for top_k, top_p in settings:
        heat = [*rng.uniform(0.3, 2.0, 2), 0]
        how = make(heat, top_k, top_p, batch=3, V=V)
        logits = random_rows(rng, V, 30).reshape(3, 10, V)
        out = np.asarray(run(jnp.asarray(logits), replace(how, mode="filtered")))
        for b, w in np.ndindex(3, 10):
            row = logits[b, w].astype(float)
            keep, gap = reference_kept(row, heat[b], top_k if top_k < V else 0, top_p)
            if gap > 1e-6:
                np.testing.assert_array_equal(out[b, w], np.where(keep, row, -np.inf))
            near_ties += gap <= 1e-6
            checked, cut = checked + 1, cut + bool((~keep).any())
    assert checked == 210
    assert cut >= 80
    assert near_ties < 5
    assert len(traces) == 1  # the values of a filter and the temperatures are no constants


def test_the_smallest_set_that_reaches_top_p():
    p = [0.4, 0.3, 0.2, 0.1]
    for top_p, kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4)):
        assert reference_kept(np.log(p), 1.0, 0, top_p)[0].sum() == kept
        assert int(jnp.isfinite(filtered(logits_of(p), make(1.0, 0, top_p, V=4))).sum()) == kept


def test_ties_at_the_threshold_stay_together_and_zeros_are_equal():
    logits = jnp.array([[[1.0, 0.0, -0.0, -1.0, 0.0]]])
    for how in (make(1.0, top_k=2, V=5), make(1.0, top_p=0.5, V=5)):
        kept = jnp.isfinite(filtered(logits, how))
        np.testing.assert_array_equal(kept[0, 0], [True, True, True, False, True])


def test_bisection_walks_all_floats_in_order():
    floats = np.array([-np.inf, -3e38, -1.5, -1e-30, 0.0, 1e-30, 1.0, 2.0, np.inf], np.float32)
    order = sampling._order_of(jnp.asarray(floats))
    assert (np.diff(np.asarray(order, np.int64)) > 0).all()
    np.testing.assert_array_equal(sampling._float_of(order), floats)
    assert sampling._order_of(jnp.float32(-0.0)) == 0


def test_no_filter_leaves_the_logits_alone():
    logits = jnp.asarray(random_rows(np.random.default_rng(1), 9, 2)[None])
    for how in (make(1.0, V=9), make(0.0, top_k=2, V=9), replace(make(V=9), mode="filtered")):
        np.testing.assert_array_equal(filtered(logits, how), logits)


# ------------------------------------------------------------------------------------ the law
def test_argmax_takes_the_first_of_equal_scores():
    scores = np.random.default_rng(0).integers(0, 4, (3, 5, 40)).astype(np.float32)
    scores[0, 0, 3:] = -np.inf
    got = sampling.argmax(jnp.asarray(scores))
    np.testing.assert_array_equal(got, scores.argmax(-1))
    assert got.dtype == jnp.int32


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-5])
def test_no_temperature_is_the_argmax(temperature):
    logits = jnp.array([[[1.0, 3.0, 3.0, 2.0], [9e4, -9e4, -jnp.inf, 0.0]]])
    how = make(temperature, top_k=2, top_p=0.5, V=4)
    for mode in ("greedy", "sampled", "filtered"):
        got = law(logits, replace(how, mode=mode))
        np.testing.assert_array_equal(got, np.eye(4)[[1, 0]][None])
    np.testing.assert_array_equal(choose(logits, how, None), [[1, 0]])


@pytest.mark.parametrize("mode", ["sampled", "filtered"])
def test_small_and_mixed_temperatures_stay_finite(mode):
    logits = np.array([[2.0, 1.999, -1e4, 1e4], [0.0, -np.inf, 5.0, 5.0]], np.float32)
    how = replace(make([0.0, 1.0, 1e-3, 1e-6], 3, 0.9, batch=4, V=4), mode=mode)
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (4, 2, 4))
    p = np.asarray(law(rows, how))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(p[[0, 3]], np.eye(4)[[[3, 2]] * 2])  # one-hot, ties and all
    np.testing.assert_allclose(p[1, 1, 2:], 0.5, atol=0.01)
    tokens = np.asarray(choose(rows, how, noise_table()[:1, :8, :4].reshape(4, 2, 4)))
    np.testing.assert_array_equal(tokens[[0, 3]], [[3, 2], [3, 2]])
    assert np.isnan(jax.nn.softmax(rows / how.temperature[:, None, None])).any()  # the bug


def test_the_law_is_the_softmax_of_what_is_kept():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    for temperature, top_k, top_p, expected in [
        (1.0, 2, 1.0, [4 / 7, 3 / 7, 0, 0]),
        (1.0, 0, 0.6, [4 / 7, 3 / 7, 0, 0]),
        (0.5, 0, 1.0, p**2 / (p**2).sum()),
        (0.5, 2, 0.6, [1, 0, 0, 0]),  # .64 of the two that top-k left reaches .6
        (0.5, 0, 0.6, [0.64, 0.36, 0, 0]),
    ]:
        got = law(logits_of(p), make(temperature, top_k, top_p, V=4))[0, 0]
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1), (0.7, 3, 1), (1.5, 0, 0.8)]
)
def test_choices_follow_the_law(temperature, top_k, top_p):
    raw, how = np.arange(1, 9) / 36, make(temperature, top_k, top_p, V=8)
    p = np.asarray(law(logits_of(raw), how))[0, 0]
    assert fits(draws(raw, how, 200_000), p)
    assert not fits(draws(raw, replace(how, temperature=jnp.ones((1,))), 200_000), p)
    if how.mode == "filtered":
        assert not fits(draws(raw, replace(how, mode="sampled"), 200_000), p)


def test_sampling_without_noise_is_refused():
    with pytest.raises(ValueError, match='mode "sampled" needs noise'):
        choose(logits_of(P), make(1.0), None)


@pytest.mark.parametrize("off", [None, 0, -1, 3, 8])
def test_every_spelling_of_no_top_k_keeps_the_law(off):
    tokens = draws(P, make(1.0, top_k=off), 10_000)
    assert fits(tokens, P)
    np.testing.assert_array_equal(tokens, draws(P, make(1.0), 10_000))


def test_top_k_of_one_is_deterministic():
    for how in (make(1.0, top_k=1), make(1.0, top_p=1e-60)):
        tokens = draws(P[::-1], how, 10_000)
        assert (tokens == 2).all()
        assert not fits(tokens, P[::-1])  # so an "off" that became 1 is seen above


PAIRS = [  # p, q, first slots accepted: coupled (400k draws of methods.md), independent
    ((0.4, 0.4, 0.2), (0.8, 0.1, 0.1), 0.590, 0.380),
    ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), 0.543, 0.200),
    ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 0.632, 0.290),
]


@pytest.mark.parametrize(("p", "q", "coupled", "independent"), PAIRS)
def test_coupled_drafts_keep_the_law_and_agree_often(p, q, coupled, independent):
    n, how = 400_000, make(1.0, V=len(p), drafting="coupled")
    choice, shared, own = draws(p, how, n), draws(q, how, n), draws(q, how, n, row=1)
    assert fits(choice, p)
    assert fits(shared, q)
    accept = jax.jit(jax.vmap(verify.match))
    both, one = np.stack([choice, choice], axis=1), np.ones(n, np.int32)
    rates = [float(accept(both, drafts[:, None], one).mean()) for drafts in (shared, own)]
    # Token v wins both races if no other comes first in either.
    ratios = [np.maximum(np.divide(p, p[v]), np.divide(q, q[v])) for v in range(len(p))]
    exact = sum(1 / ratio.sum() for ratio in ratios)
    deviation = np.sqrt(exact * (1 - exact) / n)
    assert exact == pytest.approx(coupled, abs=5 * deviation)
    assert rates == pytest.approx([exact, independent], abs=5 * deviation)


# -------------------------------------------------------------------------------- noise, keys
def test_noise_depends_on_key_and_position_only():
    positions = jnp.array([[4, 5, 6, 7], [0, 9, 4, 4], [3, 2, 1, 0]], jnp.int32)
    noise = np.asarray(position_noise(row_keys(5, [0, 1, 2]), positions, 11))
    assert noise.shape == (3, 4, 11)
    assert noise.dtype == np.float32
    for b, w in ((0, 0), (1, 1), (2, 3)):
        alone = position_noise(row_keys(5, [b]), positions[b : b + 1, w : w + 1], 11)
        np.testing.assert_allclose(alone[0, 0], noise[b, w], rtol=1e-6)
    np.testing.assert_array_equal(noise[1, 2], noise[1, 3])  # the same position
    rows = noise[[0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 3]].ravel()
    assert len(np.unique(rows)) == rows.size  # other keys and positions share nothing


@pytest.mark.parametrize("V", [5, 1000])
def test_noise_is_gumbel_along_tokens_and_positions(V):
    n = 200_000 // V
    noise = position_noise(row_keys(1, [0]), jnp.arange(n, dtype=jnp.int32)[None], V)[0]
    noise = np.asarray(noise)
    for part in (noise.ravel(), noise[:, 0], noise[:, -1], noise[0]):
        assert stats.kstest(part, "gumbel_r").pvalue > 1e-6
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_the_largest_noise_is_finite_and_fine_grained():
    bits = np.array([0, 1, 2, 100, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    got = np.asarray(sampling._gumbel(jnp.asarray(bits)))
    u = (bits[:5].astype(float) + 0.5) / 2**32
    np.testing.assert_allclose(got[:5], -np.log(-np.log1p(-u)), rtol=1e-6)
    assert np.isfinite(got).all()
    assert (np.diff(got) <= 0).all()


def test_keys_never_meet():
    """Rows, positions, rounds, the three streams of a round and their slots: all distinct."""
    rows, number = row_keys(0, range(5)), jnp.arange(20, dtype=jnp.int32)

    @jax.jit
    def all_keys(rows):
        bases = [sampling._fold(rows, use) for use in (sampling._POSITIONS, sampling._ROUNDS)]

        def at(number):
            data = jnp.full((5,), number)
            streams = sampling.round_keys(rows, data)
            slots = [sampling._fold(stream, slot) for stream in streams for slot in range(7)]
            return [*streams, *slots, *(sampling._fold(base, data) for base in bases)]

        return jax.tree.map(jax.random.key_data, [rows, bases, jax.lax.map(at, number)])

    seen = np.concatenate([x.reshape(-1, 2) for x in jax.tree.leaves(all_keys(rows))])
    assert len(np.unique(seen, axis=0)) == len(seen) == 5 * (3 + 20 * (3 + 21 + 2))
    # The key of a position is the one counted above.
    key = jax.random.fold_in(jax.random.fold_in(rows[2], sampling._POSITIONS), 9)
    bits = threefry_2x32(jax.random.key_data(key), jnp.arange(8, dtype=jnp.uint32))
    noise = position_noise(rows[2:3], jnp.full((1, 1), 9, jnp.int32), 8)
    np.testing.assert_allclose(noise[0, 0], sampling._gumbel(bits), rtol=1e-6)


def test_round_keys_of_a_row_do_not_depend_on_the_batch():
    rounds = jnp.array([3, 4, 3], jnp.int32)
    together = sampling.round_keys(row_keys(0, [0, 1, 2]), rounds)
    alone = sampling.round_keys(row_keys(0, [1]), rounds[1:2])
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(many)[1], jax.random.key_data(one)[0])


def text_of(seed, noise=position_noise, draw=choose):
    noise = noise(row_keys(seed, [0]), jnp.arange(40, dtype=jnp.int32)[None], 3)
    return draw(logits_of(P, 40), make(1.0), noise)[0].tolist()


def test_a_seed_is_obeyed_everywhere():
    seven = text_of(7)
    assert text_of(7) == seven
    assert text_of(7, sampling.position_noise, sampling.choose) == seven  # not compiled
    assert len({tuple(text_of(seed)) for seed in range(20)}) == 20


def test_a_seed_is_obeyed_by_a_new_process():
    code = f"""
import jax.numpy as jnp
from specjax.decoding.sampling import choose, make_sampling, position_noise, row_keys
noise = position_noise(row_keys(7, [0]), jnp.arange(40, dtype=jnp.int32)[None], 3)
how = make_sampling(1.0, 0, 1.0, batch=1, vocab_size=3, drafting="independent")
logits = jnp.broadcast_to(jnp.log(jnp.array({P.tolist()}))[None, None], (1, 40, 3))
print(choose(logits, how, noise)[0].tolist())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(text_of(7))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_would_wrap_around_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be between 0 and 4294967295"):
        row_keys(seed, [0])
