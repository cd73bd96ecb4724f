"""The TPU kernels under the interpreter that knows its memories and its asynchronous copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Floats, attend, dense, draw, worst_error
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where races are told
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import pallas_tpu, pallas_tpu_backward


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Memory that nobody wrote is NaN, and two accesses without an order between them are seen."""
    monkeypatch.setattr(pallas_tpu, "SIZES", pallas_tpu.Sizes(rows=16, keys=16))
    monkeypatch.setattr(pallas_tpu_backward, "SIZES", pallas_tpu_backward.Sizes(rows=16, keys=16))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "rows", "heads", "kv_heads", "capacity", "tail"),
    [
        (3, 4, 6, 2, 40, 5),
        (1, 7, 4, 1, 33, 7),
        (2, 20, 3, 3, 16, 3),
        (2, 1, 4, 2, 0, 2),
    ],
)
def test_no_races_and_no_unwritten_memory(blocks, rows, heads, kv_heads, capacity, tail):
    rng = np.random.default_rng(0)
    x, d_out, d_lse = draw(rng, 2, blocks, rows, heads, kv_heads, capacity, tail)
    start = rng.integers(0, capacity + 1, (2, blocks, 1)).astype(np.int32)
    end = rng.integers(0, capacity + 1, (2, blocks, 1)).astype(np.int32)
    mask = rng.random((2, blocks, rows, tail)) < 0.5
    slot = np.arange(capacity)
    sees = np.repeat((start[..., None] <= slot) & (slot < end[..., None]), rows, axis=2)
    floats = Floats(*(jnp.asarray(a, jnp.float32) for a in x))
    seen = jnp.asarray(start), jnp.asarray(end), jnp.asarray(mask)
    out, pull = jax.vjp(lambda x: attend(x, seen, "pallas_tpu"), floats)
    (gradient,) = pull((jnp.asarray(d_out, jnp.float32), jnp.asarray(d_lse, jnp.float32)))
    assert worst_error((*out, gradient), dense(x, sees, mask, d_out, d_lse)) < 1e-5
    assert not interpret_pallas_call.races.races_found
