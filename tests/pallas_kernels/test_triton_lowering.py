"""The Triton kernel is lowered for CUDA, which needs no GPU; nothing is compiled or run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.block_attention import block_attention


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("capacity", "dim"), [(8192, 128), (1000, 96), (0, 8)])
def test_it_is_lowered(capacity, dim, dtype):
    q, tail = jnp.zeros((2, 3, 4, 8, dim), dtype), jnp.zeros((2, 3, 5, 2, dim), dtype)
    context, bound = jnp.zeros((2, 2, capacity, dim), dtype), jnp.zeros((2, 3, 1), jnp.int32)
    args = q, context, context, bound, bound, tail, tail, jnp.ones((1, 1, 4, 5), bool)
    attend = jax.jit(
        lambda *args: block_attention(*args, scale=0.1, implementation="pallas_triton")
    )
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        text = attend.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
