"""Block attention against a dense float64 computation with gradients written by hand."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    PASSES,
    Floats,
    attend,
    brute_force,
    dense,
    draw,
    worst_error,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_attention import (
    api,
    block_attention,
    pallas_gpu,
    pallas_tpu,
    pallas_tpu_backward,
    pallas_triton,
    tiles,
    xla,
)
from specjax.models.visibility import visibility

# JAX can interpret the Mosaic GPU kernel from 0.12 on.
INTERPRETED = jax.__version_info__ >= (0, 12)
IMPLEMENTATIONS = sorted(
    name for name in api.IMPLEMENTATIONS if INTERPRETED or name != "pallas_gpu"
)
# No platform has the Triton kernel as its default: its cases are among the slow tests.
ALL = [
    pytest.param(name, marks=pytest.mark.slow) if name == "pallas_triton" else name
    for name in IMPLEMENTATIONS
]
FAST = [name for name in IMPLEMENTATIONS if name != "pallas_triton"]
CHUNKED = [name for name in ALL if name != "reference"]
# What an implementation takes and how near it comes, if not float32 and 1e-5.
TAKES = {"pallas_gpu": (jnp.bfloat16, 1e-2)}
HEADS = {"clean_target_packed": (3, 3), "draft_carried": (8, 1)}  # H, G
HEADS |= dict.fromkeys(("prefill", "draft", "verify_chain", "verify_tree"), (6, 2))


@pytest.fixture(autouse=True)
def small_and_interpreted(monkeypatch):
    """Chunks and tiles so small that there are several, and kernels as ordinary XLA operations."""
    monkeypatch.setattr(xla, "CHUNK", 8)
    monkeypatch.setattr(pallas_tpu, "SIZES", pallas_tpu.Sizes(rows=16, keys=8))
    monkeypatch.setattr(pallas_tpu_backward, "SIZES", pallas_tpu_backward.Sizes(rows=16, keys=8))
    monkeypatch.setattr(pallas_triton, "SIZES", pallas_triton.Sizes(rows=16, keys=16, programs=16))
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(pallas_gpu, "SIZES", pallas_gpu.Sizes(keys=16, programs=16))
    simulated = plgpu.InterpretGPUParams() if INTERPRETED else None
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=simulated))


# Compiling is most of the time here, so LLVM's optimiser is off; XLA's passes are not.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def forward_and_gradient(name, x, seen, d_out, d_lse):
    (out, lse), pull = jax.vjp(lambda x: attend(x, seen, name), Floats(*x))
    return out, lse, pull((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))[0]


def run(name, x, seen, d_out, d_lse, dtype=None):
    dtype = dtype or TAKES.get(name, [jnp.float32])[0]
    arrays = Floats(*(jnp.asarray(a, dtype) for a in x))
    return forward_and_gradient(name, arrays, tuple(seen), jnp.asarray(d_out), jnp.asarray(d_lse))


def check(name, x, seen, sees, d_out, d_lse):
    """Out, lse and gradients against the definition, on the floats that the implementation sees."""
    dtype, tolerance = TAKES.get(name, (jnp.float32, 1e-5))
    x, d_out = (jax.tree.map(lambda a: np.asarray(jnp.asarray(a, dtype)), v) for v in (x, d_out))
    expected = dense(x, *sees, np.asarray(d_out, np.float64), d_lse)
    assert worst_error(run(name, x, seen, d_out, d_lse), expected) < tolerance, name


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


def check_pass(name, implementations):
    rng = np.random.default_rng(sum(map(ord, name)))
    for n in range(6):
        x, seen, sees, d_out, d_lse = problem(name, rng)
        for implementation in implementations:
            if n == 0 or implementation != "pallas_gpu":  # whose interpreter takes its time
                check(implementation, x, spread(seen), sees, d_out, d_lse)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_forward_and_gradient(name):
    check_pass(name, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_every_pass_by_triton(name):
    check_pass(name, ["pallas_triton"])


def check_float64(implementation, x, seen, sees, d_out, d_lse):
    with jax.enable_x64(True):
        out, lse, _ = got = run(implementation, x, seen, d_out, d_lse, jnp.float64)
        assert out.dtype == lse.dtype == jnp.float64
        assert worst_error(got, dense(x, *sees, d_out, d_lse)) < 1e-13


@pytest.mark.parametrize("implementation", ALL)
def test_float64_and_bfloat16(implementation):
    x, seen, sees, d_out, d_lse = problem("train_drafter", np.random.default_rng(1))
    if not implementation.startswith("pallas"):
        check_float64(implementation, x, seen, sees, d_out, d_lse)
    rounded, d_out = (jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), v) for v in (x, d_out))
    out, lse, grads = got = run(implementation, rounded, seen, d_out, d_lse, jnp.bfloat16)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert {g.dtype for g in grads} == {jnp.dtype("bfloat16")}
    expected = dense(rounded, *sees, np.asarray(d_out, np.float64), d_lse)
    assert worst_error(got, expected) < 1e-2
    assert worst_error(lse, expected[1]) < 1e-5  # scores and softmax in float32


def ranges(rng, batch, blocks, rows, capacity):
    """Ragged ranges, some empty, inverted or beyond the context, as they come out of windows."""
    start = rng.integers(-4, capacity + 3, (batch, blocks, rows))
    end = start + rng.integers(-3, 1 + capacity // 2, (batch, blocks, rows))
    return start.astype(np.int32), end.astype(np.int32)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize(
    ("capacity", "tail"), [(0, 4), (37, 0), (0, 0), (8, 3), (9, 3), (31, 5), (150, 3)]
)
def test_sizes_and_ragged_ranges(implementation, capacity, tail):
    """No context, no tail, one chunk exactly, a last chunk that overlaps the one before, and a
    context that is split over programs; blocks whose rows fill more than one tile."""
    rng = np.random.default_rng(capacity)
    x, d_out, d_lse = draw(rng, 2, 3, 7, 6, 2, capacity, tail)
    start, end = ranges(rng, 2, 3, 7, capacity)
    end = end[:, :, :1]  # one end for a block, a start for every row
    mask = rng.random((1, 3, 7, tail)) < 0.5
    slot = np.arange(capacity)
    sees = (start[..., None] <= slot) & (slot < end[..., None]), np.repeat(mask, 2, axis=0)
    seen = jnp.asarray(start), jnp.asarray(end), jnp.asarray(mask)
    check(implementation, x, seen, sees, d_out, d_lse)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("capacity", [0, 20, 150])
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


@pytest.mark.parametrize("implementation", ALL)
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


@pytest.mark.parametrize("implementation", CHUNKED)
def test_tiles_that_nobody_sees_are_not_computed(implementation):
    """NaN there would show. Rows with empty ranges do not widen the range."""
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 1, 3, 1, 4, 2, 88, 2)
    start, end = jnp.asarray([[[33], [0], [70]]], jnp.int32), jnp.asarray([[[47], [0], [2]]])
    seen = start, end.astype(jnp.int32), jnp.ones((1, 1, 1, 2), bool)
    clean = run(implementation, x, seen, d_out, d_lse)
    hidden = (np.arange(88) < 32) | (np.arange(88) >= 48)  # all tiles of 8 or 16 but these
    poisoned = x._replace(
        ctx_k=np.where(hidden[:, None], np.nan, x.ctx_k),
        ctx_v=np.where(hidden[:, None], np.nan, x.ctx_v),
    )
    got = run(implementation, poisoned, seen, d_out, d_lse)
    jax.tree.map(np.testing.assert_array_equal, got, clean)


@pytest.mark.parametrize("implementation", CHUNKED)
def test_a_row_does_not_depend_on_its_neighbours_ranges(implementation):
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 1, 3, 1, 4, 2, 40, 2)
    mask = jnp.ones((1, 1, 1, 2), bool)
    rows = []
    for other in ((0, 0), (0, 40), (30, 40)):
        seen = jnp.asarray([[[11], [other[0]], [0]]]), jnp.asarray([[[21], [other[1]], [0]]]), mask
        seen = *(bound.astype(jnp.int32) for bound in seen[:2]), mask
        out, _, grads = run(implementation, x, seen, d_out, d_lse)
        rows.append((np.asarray(out)[:, 0], np.asarray(grads.q)[:, 0]))
    for got in rows[1:]:
        np.testing.assert_array_equal(got, rows[0])


@pytest.mark.parametrize("implementation", ALL)
def test_overlapping_anchors_do_not_leak(implementation):
    """Block j's gradient: exactly 0 at context rows >= anchor j and at other blocks' rows."""
    anchors, rows = [10, 12, 13, 30], 8
    rng = np.random.default_rng(0)
    x, _, _ = draw(rng, 1, 4, rows, 4, 2, 40, rows)
    x = Floats(*(jnp.asarray(a, TAKES.get(implementation, [jnp.float32])[0]) for a in x))
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


def test_choice_of_implementation(monkeypatch, caplog, capsys):
    exotic = api.Implementation(None, lambda *args: "needs a device that is not here")
    monkeypatch.setitem(api.IMPLEMENTATIONS, "exotic", exotic)
    assert {order[-1] for order in api.DEFAULT_ORDER.values()} == {"xla"}
    assert api.default_order() == ("xla",)
    with pytest.raises(ValueError, match="'fast'"):
        block_attention(**small(), scale=1.0, implementation="fast")
    with pytest.raises(ValueError, match="choose from"):
        block_attention(**small(), scale=1.0, implementation=())
    with pytest.raises(NotImplementedError, match="exotic needs a device"):
        block_attention(**small(), scale=1.0, implementation="exotic")
    plain = api.Implementation(lambda q, *args, scale: (q * scale, None), lambda *args: None)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "plain", plain)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = block_attention(**small(), scale=1.0, implementation=("exotic", "plain"))
    assert out.shape == small()["q"].shape
    assert caplog.text.count("needs a device that is not here") == 1
    block_attention(**small(), scale=1.0, implementation=("exotic", "plain"), explain=True)
    assert capsys.readouterr().out == (
        "block_attention runs as 'plain'; exotic needs a device that is not here\n"
    )


def test_a_kernel_whose_part_of_jax_is_gone():
    gone = api._kernel("pallas_abacus")
    assert f"is not for JAX {jax.__version__}" in gone.supports()


def test_only_tiles_in_the_range_are_fetched():
    low, high = jnp.int32(3), jnp.int32(6)
    assert [int(tiles.nth(low, high, n)) for n in range(5)] == [3, 4, 5, 5, 5]
    assert int(tiles.nth(jnp.int32(0), jnp.int32(0), 0)) == 0


def test_what_kernels_refuse():
    with jax.enable_x64(True):
        wide = {
            k: v.astype(jnp.float64) if v.dtype == jnp.float32 else v for k, v in small().items()
        }
        for name in ("pallas_tpu", "pallas_gpu", "pallas_triton"):
            with pytest.raises(NotImplementedError, match="not float64"):
                block_attention(**wide, scale=1.0, implementation=name)
