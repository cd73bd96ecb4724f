"""Block attention against a dense float64 computation with gradients written by hand."""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import PASSES, brute_force
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import api, block_attention, xla
from pallas_kernels.block_attention.reference import block_attention_reference
from specjax.models.visibility import visibility

SCALE = 0.3
IMPLEMENTATIONS = sorted(api.IMPLEMENTATIONS)
HEADS = {"clean_target_packed": (3, 3), "draft_carried": (8, 1)}  # H, G
HEADS |= dict.fromkeys(("prefill", "draft", "verify_chain", "verify_tree"), (6, 2))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK", 8)


class Floats(NamedTuple):
    q: np.ndarray
    ctx_k: np.ndarray
    ctx_v: np.ndarray
    tail_k: np.ndarray
    tail_v: np.ndarray


def draw(rng, batch, blocks, rows, heads, kv_heads, capacity, tail, dim=8):
    """Random float64 inputs and cotangents of out and lse."""
    shapes = Floats(
        q=(batch, blocks, rows, heads, dim),
        ctx_k=(batch, kv_heads, capacity, dim),
        ctx_v=(batch, kv_heads, capacity, dim),
        tail_k=(batch, blocks, tail, kv_heads, dim),
        tail_v=(batch, blocks, tail, kv_heads, dim),
    )
    x = Floats(*(rng.normal(size=shape) for shape in shapes))
    return x, rng.normal(size=shapes.q), rng.normal(size=shapes.q[:-1])


def dense(x, context_sees, tail_sees, d_out, d_lse):
    """(out, lse, gradients), all keys side by side and one query head at a time."""
    x = Floats(*(np.asarray(a, np.float64) for a in x))
    group, capacity = x.q.shape[3] // x.ctx_k.shape[1], x.ctx_k.shape[2]
    out, lse = np.zeros_like(x.q), np.zeros(x.q.shape[:-1])
    grads = Floats(*(np.zeros_like(a) for a in x))
    sees = np.concatenate([context_sees, tail_sees], axis=-1)
    for b, n, h in np.ndindex(x.q.shape[0], x.q.shape[1], x.q.shape[3]):
        g = h // group
        keys = np.concatenate([x.ctx_k[b, g], x.tail_k[b, n, :, g]])
        values = np.concatenate([x.ctx_v[b, g], x.tail_v[b, n, :, g]])
        query, d_o = x.q[b, n, :, h], d_out[b, n, :, h]
        weights = np.where(sees[b, n], np.exp(SCALE * query @ keys.T), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        probs = weights / np.where(total > 0, total, 1.0)
        out[b, n, :, h] = probs @ values
        with np.errstate(divide="ignore"):
            lse[b, n, :, h] = np.log(total[:, 0])
        d_probs = d_o @ values.T
        mean = (probs * d_probs).sum(axis=-1, keepdims=True)
        d_scores = SCALE * probs * (d_probs - mean + d_lse[b, n, :, h, None])
        grads.q[b, n, :, h] += d_scores @ keys
        grads.ctx_k[b, g] += (d_scores.T @ query)[:capacity]
        grads.tail_k[b, n, :, g] += (d_scores.T @ query)[capacity:]
        grads.ctx_v[b, g] += (probs.T @ d_o)[:capacity]
        grads.tail_v[b, n, :, g] += (probs.T @ d_o)[capacity:]
    return out, lse, grads


def attend(x, seen, name, **more):
    x = Floats(*map(jnp.asarray, x))
    return block_attention(
        x.q, x.ctx_k, x.ctx_v, *seen[:2], x.tail_k, x.tail_v, seen[2],
        scale=SCALE, implementation=name, return_lse=True, **more,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def forward_and_gradient(name, x, seen, d_out, d_lse):
    (out, lse), pull = jax.vjp(lambda x: attend(x, seen, name), Floats(*x))
    return out, lse, pull((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))[0]


def run(name, x, seen, d_out, d_lse, dtype=jnp.float32):
    arrays = Floats(*(jnp.asarray(a, dtype) for a in x))
    return forward_and_gradient(name, arrays, tuple(seen), jnp.asarray(d_out), jnp.asarray(d_lse))


def worst_error(got, expected):
    """Largest error of out, lse and gradients, each relative to its own largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a = np.asarray(a, np.float64)
        assert np.array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        assert np.isfinite(a[finite]).all()
        if finite.any():
            error = np.abs(a[finite] - b[finite]).max()
            worst = max(worst, error / max(np.abs(b[finite]).max(), 1e-3))
    return worst


def problem(name, rng):
    """A pass with random floats: floats, visibility, who sees what, cotangents."""
    case = PASSES[name](rng)
    seen = visibility(**case.for_jax())
    sees = brute_force(case.capacity, **case.args)
    batch, blocks, rows, tail = sees[1].shape
    x, d_out, d_lse = draw(rng, batch, blocks, rows, *HEADS.get(name, (8, 2)), case.capacity, tail)
    return x, seen, sees, d_out, d_lse


def spread(seen):
    """Ranges and mask in their largest shapes: one compilation for all draws of a pass."""
    shape = (*seen.ctx_start.shape[:2], *seen.tail_mask.shape[2:])
    bounds = (jnp.broadcast_to(bound, shape[:3]) for bound in seen[:2])
    return (*bounds, jnp.broadcast_to(seen.tail_mask, shape))


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_forward_and_gradient(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    for _ in range(6):
        x, seen, sees, d_out, d_lse = problem(name, rng)
        seen = spread(seen)
        expected = dense(x, *sees, d_out, d_lse)
        for implementation in IMPLEMENTATIONS:
            got = run(implementation, x, seen, d_out, d_lse)
            assert worst_error(got, expected) < 1e-5, implementation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64_and_bfloat16(implementation):
    x, seen, sees, d_out, d_lse = problem("train_drafter", np.random.default_rng(1))
    with jax.enable_x64(True):
        out, lse, _ = got = run(implementation, x, seen, d_out, d_lse, jnp.float64)
        assert out.dtype == lse.dtype == jnp.float64
        assert worst_error(got, dense(x, *sees, d_out, d_lse)) < 1e-13
    rounded, d_out = (jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), v) for v in (x, d_out))
    out, lse, grads = got = run(implementation, rounded, seen, d_out, d_lse, jnp.bfloat16)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert {g.dtype for g in grads} == {jnp.dtype("bfloat16")}
    expected = dense(rounded, *sees, np.asarray(d_out, np.float64), d_lse)
    assert worst_error(got, expected) < 1e-2


def ranges(rng, batch, blocks, rows, capacity):
    """Ragged ranges, some empty, inverted or beyond the context, as they come out of windows."""
    start = rng.integers(-4, capacity + 3, (batch, blocks, rows))
    end = start + rng.integers(-3, 1 + capacity // 2, (batch, blocks, rows))
    return start.astype(np.int32), end.astype(np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("capacity", "tail"), [(0, 4), (37, 0), (0, 0), (8, 3), (9, 3), (31, 5)])
def test_sizes_and_ragged_ranges(implementation, capacity, tail):
    """No context, no tail, one chunk exactly, a last chunk that overlaps the one before."""
    rng = np.random.default_rng(capacity)
    x, d_out, d_lse = draw(rng, 2, 3, 4, 6, 2, capacity, tail)
    start, end = ranges(rng, 2, 3, 4, capacity)
    end = end[:, :, :1]  # one end for a block, a start for every row
    mask = rng.random((1, 3, 4, tail)) < 0.5
    slot = np.arange(capacity)
    sees = (start[..., None] <= slot) & (slot < end[..., None]), np.repeat(mask, 2, axis=0)
    seen = jnp.asarray(start), jnp.asarray(end), jnp.asarray(mask)
    got = run(implementation, x, seen, d_out, d_lse)
    assert worst_error(got, dense(x, *sees, d_out, d_lse)) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("capacity", [0, 20])
def test_rows_that_see_nothing(implementation, capacity):
    rng = np.random.default_rng(0)
    x, d_out, _ = draw(rng, 1, 2, 3, 4, 2, capacity, 3)
    bound = jnp.asarray([[[4], [9]]], jnp.int32)
    seen = bound, bound, jnp.zeros((1, 1, 3, 3), bool)
    bad = np.full((1, 2, 3, 4), np.nan)  # what d/dlse of logaddexp(-inf, -inf) may hand down
    out, lse, grads = run(implementation, x, seen, d_out, bad)
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(lse).all()
    assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["draft_carried", "train_drafter", "clean_target_packed"])
def test_dead_rows_have_no_influence(name, implementation):
    x, seen, (context, tail), d_out, d_lse = problem(name, np.random.default_rng(3))
    seen = spread(seen)
    dead_context = ~context.any(axis=(1, 2))[:, None, :, None]  # [B, 1, S, 1]
    dead_tail = ~tail.any(axis=2)[:, :, :, None, None]  # [B, N, R, 1, 1]
    assert dead_context.any()
    results = []
    for poison in (0.0, 1e4, -1e4):
        poisoned = x._replace(
            ctx_k=np.where(dead_context, poison, x.ctx_k),
            ctx_v=np.where(dead_context, poison, x.ctx_v),
            tail_k=np.where(dead_tail, poison, x.tail_k),
            tail_v=np.where(dead_tail, poison, x.tail_v),
        )
        results.append(jax.tree.map(np.asarray, run(implementation, poisoned, seen, d_out, d_lse)))
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])
    jax.tree.map(np.testing.assert_array_equal, results[0], results[2])
    grads = results[1][2]
    assert (np.where(dead_context, grads.ctx_v, 0) == 0).all()
    assert (np.where(dead_tail, grads.tail_v, 0) == 0).all()


def test_chunks_that_nobody_sees_are_not_computed():
    """NaN there would show. Rows with empty ranges do not widen the range."""
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 1, 3, 1, 4, 2, 40, 2)
    start, end = jnp.asarray([[[17], [0], [35]]], jnp.int32), jnp.asarray([[[23], [0], [2]]])
    seen = start, end.astype(jnp.int32), jnp.ones((1, 1, 1, 2), bool)
    clean = run("xla", x, seen, d_out, d_lse)
    hidden = (np.arange(40) < 16) | (np.arange(40) >= 24)  # all chunks but 16..23
    x = x._replace(ctx_k=np.where(hidden[:, None], np.nan, x.ctx_k))
    jax.tree.map(np.testing.assert_array_equal, run("xla", x, seen, d_out, d_lse), clean)


def test_a_row_does_not_depend_on_its_neighbours_ranges():
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 1, 3, 1, 4, 2, 40, 2)
    mask = jnp.ones((1, 1, 1, 2), bool)
    rows = []
    for other in ((0, 0), (0, 40), (30, 40)):
        seen = jnp.asarray([[[11], [other[0]], [0]]]), jnp.asarray([[[21], [other[1]], [0]]]), mask
        seen = *(bound.astype(jnp.int32) for bound in seen[:2]), mask
        out, _, grads = run("xla", x, seen, d_out, d_lse)
        rows.append((np.asarray(out)[:, 0], np.asarray(grads.q)[:, 0]))
    for got in rows[1:]:
        np.testing.assert_array_equal(got, rows[0])


def test_two_calls_merge_by_lse():
    """A context cut in two, merged through lse, gives the whole; so do its gradients."""
    rng = np.random.default_rng(0)
    x, d_out, _ = draw(rng, 2, 2, 3, 4, 2, 30, 3)
    x = Floats(*(jnp.asarray(a, jnp.float32) for a in x))
    at = lambda s: jnp.full((2, 2, 1), s, jnp.int32)  # noqa: E731
    mask = jnp.ones((1, 1, 3, 3), bool)

    def whole(x):
        return attend(x, (at(2), at(29), mask), "xla")[0]

    def merged(x):
        left, left_lse = attend(x, (at(2), at(13), mask), "xla")
        right, right_lse = attend(x, (at(13), at(29), jnp.zeros_like(mask)), "xla")
        total = jnp.logaddexp(left_lse, right_lse)
        weights = jnp.exp(left_lse - total)[..., None], jnp.exp(right_lse - total)[..., None]
        return left * weights[0] + right * weights[1]

    d_out = jnp.asarray(d_out, jnp.float32)

    def value_and_gradient(f):
        return jax.jit(lambda x: (f(x), jax.vjp(f, x)[1](d_out)[0]))(x)

    assert worst_error(value_and_gradient(merged), value_and_gradient(whole)) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_overlapping_anchors_do_not_leak(implementation):
    """Block j's gradient: exactly 0 at context rows >= anchor j and at other blocks' rows."""
    anchors, rows = [10, 12, 13, 30], 8
    rng = np.random.default_rng(0)
    x, _, _ = draw(rng, 1, 4, rows, 4, 2, 40, rows)
    x = Floats(*(jnp.asarray(a, jnp.float32) for a in x))
    start = jnp.asarray([anchors], jnp.int32)
    positions = start[:, :, None] + jnp.arange(rows, dtype=jnp.int32)[None, None]
    seen = visibility(positions, start, causal=False)
    gradient = jax.jit(
        jax.grad(lambda x, j: jnp.sum(jnp.sin(attend(x, seen, implementation)[0][:, j])))
    )
    for j, anchor in enumerate(anchors):
        grads = gradient(x, j)
        for context in (grads.ctx_k, grads.ctx_v):
            assert (context[:, :, anchor:] == 0).all()
            assert (context[:, :, :anchor] != 0).any(axis=-1).all()
        for own in (grads.q, grads.tail_k, grads.tail_v):
            touched = np.asarray((own != 0).any(axis=(0, 2, 3, 4)))
            assert touched.tolist() == [block == j for block in range(4)]


def test_vmap_and_remat():
    rng = np.random.default_rng(0)
    problems = [draw(rng, 2, 2, 3, 4, 2, 20, 3) for _ in range(3)]
    stacked = jax.tree.map(
        lambda *a: jnp.asarray(np.stack(a), jnp.float32), *(p[0] for p in problems)
    )
    end = jnp.asarray(rng.integers(0, 20, (3, 2, 2, 1)), jnp.int32)
    mask = jnp.ones((1, 1, 3, 3), bool)

    def loss(x, end):
        return jnp.sum(jnp.sin(attend(x, (jnp.zeros_like(end), end, mask), "xla")[0]))

    gradient = jax.jit(jax.grad(jax.checkpoint(loss)))
    mapped = jax.vmap(gradient)(stacked, end)
    for i in range(3):
        single = gradient(Floats(*(a[i] for a in stacked)), end[i])
        assert worst_error(Floats(*(a[i] for a in mapped)), single) < 1e-5


def gradient_of_a_loss(x, seen):
    return jax.grad(lambda x: jnp.sum(jnp.sin(attend(x, seen, "xla")[0])))(x)


@functools.cache
def one_device_problem():
    rng = np.random.default_rng(0)
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw(rng, 8, 2, 3, 16, 8, 20, 3)[0])
    end = jnp.asarray(rng.integers(0, 21, (8, 2, 1)), jnp.int32)
    seen = jnp.zeros_like(end), end, jnp.ones((1, 1, 3, 3), bool)
    return x, seen, jax.jit(gradient_of_a_loss)(x, seen)


@pytest.mark.parametrize("axis", ["batch", "heads"])
@pytest.mark.parametrize("manual", [False, True])
def test_sharded_over_devices(axis, manual):
    """Batch or heads over eight devices, by the compiler and inside shard_map."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, seen, expected = one_device_problem()
    if axis == "batch":
        specs, bounds = Floats(*[P("x")] * 5), P("x")
    else:
        head, context, bounds = P(None, None, None, "x"), P(None, "x"), P()
        specs = Floats(head, context, context, head, head)
    function = gradient_of_a_loss
    if manual:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=(specs, (bounds, bounds, P())), out_specs=specs
        )
    placed = jax.device_put(x, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs))
    got = jax.jit(function)(placed, seen)
    assert got.ctx_k.sharding.is_equivalent_to(placed.ctx_k.sharding, 4)
    assert worst_error(got, expected) < 1e-5


def test_decoding_does_not_copy_the_cache():
    """Temporaries of a loop that writes, then attends, stay far below one layer's cache."""
    capacity, kv_heads, heads, dim = 4096, 3, 9, 64

    def step(_, carry):
        cache, q, length = carry
        cache = jax.lax.dynamic_update_slice(
            cache, q[:, 0, :, :3].swapaxes(1, 2), (0, 0, length, 0)
        )
        end = jnp.full((1, 1, 1), 0, jnp.int32) + length
        new = q[:, :, :, :3]
        q = block_attention(
            q, cache, cache, jnp.zeros_like(end), end, new, new, jnp.ones((1, 1, 1, 1), bool),
            scale=0.1,
        )  # fmt: skip
        return cache, q, length + 1

    loop = jax.jit(lambda *carry: jax.lax.fori_loop(0, 9, step, carry), donate_argnums=0)
    cache = jax.ShapeDtypeStruct((1, kv_heads, capacity, dim), jnp.float32)
    q = jax.ShapeDtypeStruct((1, 1, 1, heads, dim), jnp.float32)
    memory = loop.lower(cache, q, jax.ShapeDtypeStruct((), jnp.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * cache.size
    assert memory.temp_size_in_bytes < cache.size  # a quarter of the cache


def test_backward_holds_rows_by_chunk(monkeypatch):
    """Three arrays of rows x chunk scores (scores, probabilities, their gradient) and six of the
    size of q (q, out and their gradients, accumulators): less than one array of all scores."""
    monkeypatch.setattr(xla, "CHUNK", 128)
    anchors, rows, heads, kv_heads, dim = 128, 16, 8, 4, 64
    queries = anchors * rows * heads
    bound = 4 * queries * (3 * xla.CHUNK + 6 * dim)

    def temporaries(function, capacity):
        def shape(*s, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(s, dtype)

        context, bounds = (
            shape(1, kv_heads, capacity, dim),
            shape(1, anchors, 1, dtype=jnp.int32),
        )
        tail = shape(1, anchors, rows, kv_heads, dim)
        mask = shape(1, 1, rows, rows, dtype=bool)

        def loss(q, ctx_k, ctx_v, tail_k, tail_v, start, end, mask):
            args = q, ctx_k, ctx_v, start, end, tail_k, tail_v, mask
            return jnp.sum(function(*args, scale=0.1)[0] ** 2)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
        q = shape(1, anchors, rows, heads, dim)
        args = q, context, context, tail, tail, bounds, bounds, mask
        return gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert bound < 4 * queries * 1024  # one array of all scores at capacity 1024
    assert temporaries(xla.block_attention_xla, 1024) < bound
    assert temporaries(block_attention_reference, 1024) > 4 * bound


def small(**changes):
    names = ("q", "ctx_k", "ctx_v", "ctx_start", "ctx_end", "tail_k", "tail_v", "tail_mask")
    context, tail = jnp.zeros((2, 2, 5, 8)), jnp.zeros((2, 3, 6, 2, 8))
    bounds = jnp.zeros((2, 3, 1), jnp.int32)
    values = (
        jnp.zeros((2, 3, 4, 4, 8)), context, context, bounds, bounds, tail, tail,
        jnp.ones((1, 1, 4, 6), bool),
    )  # fmt: skip
    return {**dict(zip(names, values, strict=True)), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": jnp.zeros((2, 3, 4, 8))}, ValueError, "expected q"),
        ({"q": jnp.zeros((2, 3, 4, 5, 8))}, ValueError, "5 query heads"),
        ({"ctx_k": jnp.zeros((2, 2, 5, 4))}, ValueError, "ctx_k"),
        ({"ctx_v": jnp.zeros((2, 2, 6, 8))}, ValueError, "ctx_v"),
        ({"tail_v": jnp.zeros((2, 3, 5, 2, 8))}, ValueError, "tail_v"),
        ({"ctx_start": jnp.zeros((2, 3), jnp.int32)}, ValueError, "ctx_start"),
        ({"ctx_end": jnp.zeros((2, 3, 5), jnp.int32)}, ValueError, "ctx_end"),
        ({"ctx_end": jnp.zeros((2, 3, 1))}, TypeError, "ctx_end"),
        ({"tail_mask": jnp.ones((1, 1, 4, 5), bool)}, ValueError, "tail_mask"),
        ({"tail_mask": jnp.ones((1, 1, 4, 6))}, TypeError, "tail_mask"),
        ({"q": jnp.zeros((2, 3, 4, 4, 8), jnp.int32)}, TypeError, "q must be"),
        ({"ctx_k": jnp.zeros((2, 2, 5, 8), jnp.bfloat16)}, TypeError, "ctx_k"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        block_attention(**small(**changes), scale=1.0)


def test_choice_of_implementation(monkeypatch, caplog):
    def refuses(*args, scale):
        raise NotImplementedError("needs a device that is not here")

    monkeypatch.setitem(api.IMPLEMENTATIONS, "exotic", refuses)
    assert api.DEFAULT_ORDER[-1] == "xla"
    with pytest.raises(ValueError, match="'fast'"):
        block_attention(**small(), scale=1.0, implementation="fast")
    with pytest.raises(ValueError, match="choose from"):
        block_attention(**small(), scale=1.0, implementation=())
    with pytest.raises(NotImplementedError, match="exotic: needs a device"):
        block_attention(**small(), scale=1.0, implementation="exotic")
    monkeypatch.setitem(api.IMPLEMENTATIONS, "plain", lambda q, *args, scale: (q * scale, None))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = block_attention(**small(), scale=1.0, implementation=("exotic", "plain"))
    assert out.shape == small()["q"].shape
    assert caplog.text.count("needs a device that is not here") == 1
