"""Compiled for TPUs by their own compiler, on a machine without one.

Needs libtpu (`make aot`); left out without it. What is asserted of the programs are the mistakes
that ruin decoding speed: a cache that is copied, a kernel that is not there.
"""

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot_programs import SHAPES, arguments, copies, decode_loop, on, training_step
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import api, block_attention
from pallas_kernels.block_attention.pallas_tpu import block_attention_pallas_tpu
from specjax.decoding import loop

pytest.importorskip("libtpu", reason="libtpu is not installed: make aot")
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

TRAINED = ["blocks of 5 with 4 carried rows", "branches of 4", "train with 128 anchors"]
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v4": "v4:2x2x1"}


@pytest.fixture(scope="module", params=CHIPS)
def chips(request):
    return topologies.get_topology_desc(CHIPS[request.param], "tpu")


def kernels(compiled):
    return len(re.findall(r"custom_call_target=\"tpu_custom_call\"", compiled.as_text()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(chips, shape, dtype):
    attend = partial(block_attention, scale=0.1, implementation="pallas_tpu")
    compiled = jax.jit(attend).lower(*on(chips.devices[0], arguments(*shape, dtype))).compile()
    assert kernels(compiled) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [SHAPES[name] for name in TRAINED], ids=TRAINED)
def test_gradients(chips, shape, dtype):
    """A kernel forward and two backward."""

    def gradient(q, ctx_k, ctx_v, start, end, tail_k, tail_v, mask, d_out):
        def attend(*x):
            args = *x[:3], start, end, *x[3:], mask
            return block_attention(*args, scale=0.1, implementation="pallas_tpu")

        return jax.vjp(attend, q, ctx_k, ctx_v, tail_k, tail_v)[1](d_out)

    args = arguments(*shape, dtype)
    args = on(chips.devices[0], [*args, args[0]])
    assert kernels(jax.jit(gradient).lower(*args).compile()) == 3


def test_tiles_beyond_the_memory_are_refused(chips):
    """That every shape above compiles says that it fits: the compiler does look."""
    attend = partial(block_attention_pallas_tpu, scale=0.1, sizes={"keys": 1 << 17})
    args = on(chips.devices[0], arguments(1, 1, 16, 32, 8, 1 << 17, 16, 128, False, jnp.bfloat16))
    with pytest.raises(Exception, match=r"RESOURCE_EXHAUSTED|memory"):
        jax.jit(attend).lower(*args).compile()


def test_a_kernel_on_several_devices(chips):
    """Batch and heads are divided, and no array travels."""
    mesh = Mesh(np.reshape(chips.devices, (-1, 2)), ("data", "model"))
    heads, context, tail = P("data", None, None, "model"), P("data", "model"), P("data")
    specs = [heads, context, context, tail, tail, heads, heads, P()]
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(
            arguments(4, 2, 8, 8, 2, 1024, 8, 128, False, jnp.bfloat16), specs, strict=True
        )
    ]
    attend = partial(block_attention, scale=0.1, implementation="pallas_tpu")
    text = jax.jit(attend).lower(*args).compile().as_text()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text


@pytest.fixture
def by_kernel(monkeypatch):
    """Every attention by the TPU kernel, as on a TPU."""
    monkeypatch.setattr(api, "default_order", lambda: ("pallas_tpu",))
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_decode_loop(chips, by_kernel):
    """Draft, verify, commit: the caches stay in place, and are neither copied nor sliced."""
    made = decode_loop(jnp.float32)
    compiled = loop.run.lower(made.decoder, *on(chips.devices[0], made.args)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in made.caches)
    assert memory.temp_size_in_bytes < made.caches[0].size * made.caches[0].dtype.itemsize
    assert kernels(compiled) == made.layers
    assert not copies(compiled, made.caches)


def test_a_training_step(chips, by_kernel):
    step, args, layers = training_step("float32")
    compiled = step.lower(*on(chips.devices[0], args), None, None).compile()
    assert kernels(compiled) >= layers
