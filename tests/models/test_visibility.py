"""Who sees what: against a brute-force loop over every row and key, and by exact counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import PASSES, brute_force

from specjax.models.visibility import ancestors, visibility


def expand(seen, capacity):
    """Ranges and mask as bool [B, N, T, capacity] and [B, N, T, R]."""
    slot = np.arange(capacity)
    start, end = np.asarray(seen.ctx_start)[..., None], np.asarray(seen.ctx_end)[..., None]
    (rows, tail), blocks = seen.tail_mask.shape[2:], seen.ctx_start.shape[:2]
    context = np.broadcast_to((start <= slot) & (slot < end), (*blocks, rows, capacity))
    return context, np.broadcast_to(np.asarray(seen.tail_mask), (*blocks, rows, tail))


def ints(*values):
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_equals_brute_force(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    for _ in range(12):
        case = PASSES[name](rng)
        seen = visibility(**case.for_jax())
        context, tail = expand(seen, case.capacity)
        expected_context, expected_tail = brute_force(case.capacity, **case.args)
        np.testing.assert_array_equal(context, expected_context, err_msg=str(case))
        np.testing.assert_array_equal(tail, expected_tail, err_msg=str(case))
        assert seen.ctx_start.dtype == seen.ctx_end.dtype == jnp.int32
        assert seen.tail_mask.dtype == bool


def test_arbitrary_arguments_equal_brute_force():
    """Arguments in combinations that no pass uses, positions in any order."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        b, n, t, r = 2, 3, 4, 5

        def rows(high, *shape):
            return rng.integers(0, high, shape).astype(np.int32)

        start = rows(3, b, n, t) * 4
        args = {
            "positions": rows(12, b, n, t),
            "context_end": rows(14, b, n, t) if rng.random() < 0.5 else rows(14, b, n),
            "context_start": start if rng.random() < 0.7 else start[:, :, 0],
            "causal": bool(rng.random() < 0.5),
            "window": [None, 1, 3, 7][rng.integers(4)],
            "tail_positions": rows(12, b, n, r),
            "tail_start": rows(3, b, n, r) * 4 if rng.random() < 0.7 else rows(3, b, n) * 4,
            "tail_valid": rng.random((b, n, r)) < 0.8,
            "tail_allowed": rng.random((1, n, t, r)) < 0.8,
        }
        as_jax = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
        for got, expected in zip(
            expand(visibility(**as_jax), 14), brute_force(14, **args), strict=True
        ):
            np.testing.assert_array_equal(got, expected, err_msg=str(args))


@pytest.mark.parametrize(
    ("window", "causal", "context_keys", "tail_keys"),
    [
        # Five slots at positions 20..24 behind 20 context rows; a slot counts as one of its W.
        (3, True, [2, 1, 0, 0, 0], [1, 2, 3, 3, 3]),
        (3, False, [2, 1, 0, 0, 0], [3, 4, 5, 4, 3]),
        (7, True, [6, 5, 4, 3, 2], [1, 2, 3, 4, 5]),
        (7, False, [6, 5, 4, 3, 2], [5, 5, 5, 5, 5]),
        (None, True, [20] * 5, [1, 2, 3, 4, 5]),
        (None, False, [20] * 5, [5] * 5),
    ],
)
def test_keys_per_slot(window, causal, context_keys, tail_keys):
    seen = visibility(ints([range(20, 25)]), ints([20]), causal=causal, window=window)
    context, tail = expand(seen, 30)
    assert context[0, 0].sum(axis=-1).tolist() == context_keys
    assert tail[0, 0].sum(axis=-1).tolist() == tail_keys
    if window is not None:  # the nearest rows
        for slot, keys in enumerate(context_keys):
            assert np.flatnonzero(context[0, 0, slot]).tolist() == list(range(20 - keys, 20))


@pytest.mark.parametrize("window", [8, 2**31 - 1])
def test_window_at_the_start_of_a_document_reaches_no_row_of_the_one_before(window):
    seen = visibility(
        ints([[1, 2]]),
        ints([7]),
        context_start=ints([6]),
        causal=False,
        window=window,
    )
    assert expand(seen, 9)[0][0, 0].tolist() == [[s == 6 for s in range(9)]] * 2


def test_document_that_begins_inside_the_block():
    """Rows 4..7 of a text whose second document starts at row 6: nothing of the context for it."""
    seen = visibility(
        ints([[4, 5, 0, 1]]),
        ints([4]),
        context_start=ints([[0, 0, 6, 6]]),
        causal=True,
    )
    context, tail = expand(seen, 8)
    assert context[0, 0].sum(axis=-1).tolist() == [4, 4, 0, 0]
    assert tail[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


def test_ranges_stay_small_where_nothing_varies():
    positions, end = jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    seen = visibility(positions, end, causal=False)
    assert seen.ctx_start.shape == seen.ctx_end.shape == (2, 3, 1)
    assert seen.tail_mask.shape == (1, 1, 4, 4)
    seen = visibility(positions, end, causal=True, context_start=end)
    assert seen.ctx_start.shape == seen.ctx_end.shape == (2, 3, 1)
    assert visibility(positions, end, causal=True, window=5).ctx_end.shape == (2, 3, 1)


def test_runs_under_jit():
    positions, end = jnp.arange(4, dtype=jnp.int32)[None, None] + 9, ints([9])
    eager = visibility(positions, end, causal=True, window=3)
    jitted = jax.jit(lambda p, e: visibility(p, e, causal=True, window=3))(positions, end)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), eager, jitted))


def test_ancestors_of_a_chain_with_committed_rows():
    """Two committed rows and the anchor, then node 0 and its child."""
    related = ancestors(ints([-1, 0]))
    seen = visibility(ints([[2, 3, 4]]), ints([2]), causal=True, tail_allowed=related)
    context, tail = expand(seen, 2)
    both = np.concatenate([context, tail], axis=-1)[0, 0].astype(int)
    assert both[1:].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_ancestors_of_a_tree():
    parents = ints([-1, 0, 0, 1, 2], [-1, -1, -1, -1, -1], [-1, 0, 1, 2, 3])
    related = ancestors(parents)
    assert related.shape == (3, 1, 6, 6)
    assert related[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    star = np.eye(6, dtype=bool)
    star[:, 0] = True
    np.testing.assert_array_equal(related[1, 0], star)
    np.testing.assert_array_equal(related[2, 0], np.tril(np.ones((6, 6), bool)))


@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_ancestors_of_random_trees(count):
    rng = np.random.default_rng(count)
    parents = np.array([[rng.integers(-1, j) for j in range(count)]], np.int32).reshape(1, count)
    related = np.asarray(ancestors(jnp.asarray(parents)))[0, 0]
    for row in range(count + 1):
        path, node = {0, row}, row - 1
        while node >= 0:
            path.add(node + 1)
            node = parents[0, node]
        assert set(np.flatnonzero(related[row])) == path


P, E = jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ((P[0], E), {}, "positions"),
        ((P, E[:1]), {}, "context_end"),
        ((P, E), {"window": 0}, "window"),
        ((P, E), {"context_start": P[:, :, :2]}, "context_start"),
        ((P, E), {"tail_positions": P[:1]}, "tail_positions"),
        ((P, E), {"tail_start": P}, "tail_start"),
        ((P, E), {"tail_positions": P, "context_start": P}, "tail_start"),
        ((P, E), {"tail_valid": jnp.ones((2, 3, 5), bool)}, "tail_valid"),
        ((P, E), {"tail_allowed": jnp.ones((2, 2, 4, 4), bool)}, "tail_allowed"),
    ],
)
def test_bad_arguments_are_named(args, more, message):
    with pytest.raises(ValueError, match=message):
        visibility(*args, causal=False, **more)
