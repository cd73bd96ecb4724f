"""The Mosaic GPU kernel: lowered for CUDA, and under the interpreter that knows its memories."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Floats, attend, dense, draw, worst_error
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.block_attention import block_attention, pallas_gpu


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("tile", "rows", "capacity", "dim"),
    [(64, 4, 8192, 128), (128, 40, 1001, 96), (64, 4, 0, 8), (64, 4, 40, 256)],
)
def test_it_is_lowered(tile, rows, capacity, dim, dtype, monkeypatch):
    """Which needs no GPU; nothing is run. Shared memory and layouts are checked by it."""
    monkeypatch.setattr(pallas_gpu, "SIZES", pallas_gpu.Sizes(rows=tile))
    q, tail = jnp.zeros((2, 3, rows, 8, dim), dtype), jnp.zeros((2, 3, 5, 2, dim), dtype)
    context, bound = jnp.zeros((2, 2, capacity, dim), dtype), jnp.zeros((2, 3, 1), jnp.int32)
    args = q, context, context, bound, bound, tail, tail, jnp.ones((1, 1, rows, 5), bool)
    attend = jax.jit(lambda *args: block_attention(*args, scale=0.1, implementation="pallas_gpu"))
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        text = attend.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_it_asks_for_hopper(capability, monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    context, bound = jnp.zeros((1, 1, 8, 16), jnp.bfloat16), jnp.zeros((1, 1, 1), jnp.int32)
    q = tail = jnp.zeros((1, 1, 2, 1, 16), jnp.bfloat16)
    args = q, context, context, bound, bound, tail, tail, jnp.ones((1, 1, 2, 2), bool)
    with pytest.raises(NotImplementedError, match=f"not {capability}"):
        block_attention(*args, scale=0.1, implementation="pallas_gpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX interprets the kernel from 0.12 on")
@pytest.mark.parametrize(
    ("blocks", "rows", "heads", "kv_heads", "capacity", "tail", "dim", "sizes"),
    [
        (3, 4, 6, 2, 40, 5, 8, {}),  # three blocks side by side
        (1, 5, 4, 1, 333, 7, 16, {"stages": 3}),  # six splits of the context
        (1, 70, 2, 1, 70, 40, 16, {"rows": 128}),  # two parts of a block, two warpgroups each
        (2, 1, 4, 2, 0, 2, 96, {}),  # no context
        (2, 9, 4, 1, 130, 0, 128, {"stages": 1}),  # no tail, two parts of the head dimension
    ],
)
def test_no_races_and_no_unwritten_memory(
    blocks, rows, heads, kv_heads, capacity, tail, dim, sizes, monkeypatch
):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # where races are told

    sizes = pallas_gpu.Sizes(keys=16, programs=16)._replace(**sizes)
    monkeypatch.setattr(pallas_gpu, "SIZES", sizes)
    simulated = plgpu.InterpretGPUParams(detect_races=True)  # unwritten memory is NaN
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=simulated))
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 2, blocks, rows, heads, kv_heads, capacity, tail, dim)
    x = Floats(*(jnp.asarray(a, jnp.bfloat16) for a in x))
    start = rng.integers(0, capacity // 3 + 1, (2, blocks, 1)).astype(np.int32)
    end = rng.integers(capacity // 2, capacity + 1, (2, blocks, 1)).astype(np.int32)
    mask = rng.random((2, blocks, rows, tail)) < 0.5
    slot = np.arange(capacity)
    sees = np.repeat((start[..., None] <= slot) & (slot < end[..., None]), rows, axis=2)
    got = attend(x, (jnp.asarray(start), jnp.asarray(end), jnp.asarray(mask)), "pallas_gpu")
    expected = dense(x, sees, mask, d_out, d_lse)[:2]
    assert worst_error(got[0], expected[0]) < 1e-2
    assert worst_error(got[1], expected[1]) < 1e-5
    assert not gpu_callbacks.get_races().races_found
