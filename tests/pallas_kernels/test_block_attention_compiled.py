"""Block attention under transformations, on several devices, and what its programs hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Floats, attend, draw, worst_error
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import (
    block_attention,
    pallas_tpu,
    pallas_tpu_backward,
    pallas_triton,
    xla,
)
from pallas_kernels.block_attention.reference import block_attention_reference

CHUNKED = ["xla", "pallas_tpu", pytest.param("pallas_triton", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def small_and_interpreted(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK", 8)
    monkeypatch.setattr(pallas_tpu, "SIZES", pallas_tpu.Sizes(rows=16, keys=8))
    monkeypatch.setattr(pallas_tpu_backward, "SIZES", pallas_tpu_backward.Sizes(rows=16, keys=8))
    monkeypatch.setattr(pallas_triton, "SIZES", pallas_triton.Sizes(rows=16, keys=16, programs=16))
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


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


@pytest.mark.parametrize("implementation", CHUNKED)
def test_vmap_and_remat(implementation):
    rng = np.random.default_rng(0)
    problems = [draw(rng, 2, 2, 3, 4, 2, 20, 3) for _ in range(3)]
    stacked = jax.tree.map(
        lambda *a: jnp.asarray(np.stack(a), jnp.float32), *(p[0] for p in problems)
    )
    end = jnp.asarray(rng.integers(0, 20, (3, 2, 2, 1)), jnp.int32)
    mask = jnp.ones((1, 1, 3, 3), bool)

    def loss(x, end):
        return jnp.sum(jnp.sin(attend(x, (jnp.zeros_like(end), end, mask), implementation)[0]))

    gradient = jax.jit(jax.grad(jax.checkpoint(loss)))
    mapped = jax.vmap(gradient)(stacked, end)
    for i in range(3):
        single = gradient(Floats(*(a[i] for a in stacked)), end[i])
        assert worst_error(Floats(*(a[i] for a in mapped)), single) < 1e-5


def gradient_of_a_loss(x, seen, implementation="xla"):
    return jax.grad(lambda x: jnp.sum(jnp.sin(attend(x, seen, implementation)[0])))(x)


@functools.cache
def one_device_problem():
    rng = np.random.default_rng(0)
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw(rng, 8, 2, 3, 16, 8, 20, 3)[0])
    end = jnp.asarray(rng.integers(0, 21, (8, 2, 1)), jnp.int32)
    seen = jnp.zeros_like(end), end, jnp.ones((1, 1, 3, 3), bool)
    return x, seen, jax.jit(gradient_of_a_loss)(x, seen)


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("axis", ["batch", "heads"])
@pytest.mark.parametrize("manual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sharded_over_devices(axis, manual, implementation):
    """Batch or heads over eight devices, by the compiler and inside shard_map."""
    name = {"batch": "data", "heads": "model"}[axis]
    mesh = jax.make_mesh((8,), (name,), axis_types=(jax.sharding.AxisType.Auto,))
    x, seen, expected = one_device_problem()
    if axis == "batch":
        specs, bounds = Floats(*[P(name)] * 5), P(name)
    else:
        head, context, bounds = P(None, None, None, name), P(None, name), P()
        specs = Floats(head, context, context, head, head)
    function = functools.partial(gradient_of_a_loss, implementation=implementation)
    if manual:
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(specs, (bounds, bounds, P())),
            out_specs=specs,
            check_vma=implementation == "xla",  # a kernel does not say over what it varies
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
