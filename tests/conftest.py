"""Strict numerics for every test, and eight host devices for the tests of meshes."""

import gc

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module", autouse=True)
def no_programs_left_behind():
    """Let go of what a file compiled.

    A program on a CPU holds memory mappings, of which Linux grants a process 65,530; all tests
    together compile more than that, and then a worker dies.
    """
    yield
    jax.clear_caches()
    gc.collect()
