"""Compiled for NVIDIA GPUs by their own compiler, on a machine without one.

Needs JAX's CUDA plugin and `ptxas` (`make aot`); left out without them.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from aot_programs import SHAPES, arguments, copies, decode_loop, on, training_step
from jax._src import lib
from jax.experimental import topologies

from pallas_kernels.block_attention import api, block_attention
from specjax.decoding import loop

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: make aot")
OPTIONS = {"xla_gpu_cuda_data_dir": lib.cuda_path, "xla_gpu_autotune_level": 0}

# What the plugin would ask a device: OpenXLA's `GpuTargetConfigProto`.
CHIP = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  core_count: {cores} fpus_per_core: {units} threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  clock_rate_ghz: 1.5 device_memory_size: 84929347584
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
HOPPER = CHIP.format(
    name="NVIDIA H100 80GB HBM3", major=9, cores=132, units=128, shared=232448,
    bandwidth=3352320000000, cache=52428800,
)  # fmt: skip
AMPERE = CHIP.format(
    name="NVIDIA A100-SXM4-80GB", major=8, cores=108, units=64, shared=166912,
    bandwidth=2039000000000, cache=41943040,
)  # fmt: skip


def device(chip):
    return topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=chip
    ).devices[0]


def compile_for(chip, name, shape, dtype):
    attend = partial(block_attention, scale=0.1, implementation=name)
    lowered = jax.jit(attend).lower(*on(device(chip), arguments(*shape, dtype)))
    return lowered.compile(compiler_options=OPTIONS)


def kernels(compiled):
    return len(re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_for_hopper(shape, dtype, tmp_path, monkeypatch):
    """Machine code comes out, and the values of the loop stay in registers."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    assert kernels(compile_for(HOPPER, "pallas_gpu", shape, dtype)) == 1
    (made,) = (file.read_text() for file in tmp_path.glob("*.ptxas"))
    assert "for 'sm_90a'" in made
    spilled = re.findall(r"(\d+) bytes spill", made)
    assert spilled
    assert all(int(n) <= (1024 if shape[7] > 128 else 0) for n in spilled)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_by_triton_for_ampere(shape, dtype):
    if shape[6] > 128:
        pytest.skip("the tail is longer than the kernel takes")
    assert "triton" in compile_for(AMPERE, "pallas_triton", shape, dtype).as_text()


@pytest.fixture
def by_kernel(monkeypatch):
    """Every attention by the kernel for Hopper."""
    monkeypatch.setattr(api, "default_order", lambda: ("pallas_gpu",))
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_decode_loop(by_kernel):
    """Draft, verify, commit: the caches stay in place, and are neither copied nor sliced."""
    made = decode_loop(jnp.bfloat16)
    args = on(device(HOPPER), made.args)
    compiled = loop.run.lower(made.decoder, *args).compile(compiler_options=OPTIONS)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in made.caches)
    assert memory.temp_size_in_bytes < made.caches[0].size * made.caches[0].dtype.itemsize
    assert kernels(compiled) == made.layers
    assert not copies(compiled, made.caches)


def test_a_training_step(by_kernel):
    step, args, layers = training_step("bfloat16")
    args = on(device(HOPPER), args)
    compiled = step.lower(*args, None, None).compile(compiler_options=OPTIONS)
    assert kernels(compiled) >= layers
