"""Compiled for TPUs by their own compiler, on a machine without one.

Needs libtpu (`make aot`); left out without it. What is asserted of the programs are the mistakes
that ruin decoding speed: a cache that is copied, a kernel that is not there.
"""

import dataclasses
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import api, block_attention
from pallas_kernels.block_attention.pallas_tpu import block_attention_pallas_tpu
from specjax.decoding import loop
from specjax.decoding.drafting import DFlash
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights
from specjax.models import drafter as drafters
from specjax.models import hub, params
from specjax.models import target as targets
from specjax.training import run, trainer
from specjax.training.config import from_json
from specjax.training.packing import Batch

pytest.importorskip("libtpu", reason="libtpu is not installed: make aot")
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v4": "v4:2x2x1"}

# B, N, T, H, G, S, R, D, and whether each block has a mask of its own
SHAPES = {
    "draft a block of 16, batch 8, 8k context": (8, 1, 16, 32, 8, 8192, 16, 128, False),
    "verify 8 rows at 32k": (1, 1, 8, 32, 8, 32768, 8, 128, False),
    "plain step": (4, 1, 1, 9, 3, 1024, 1, 64, False),
    "blocks of 5 with 4 carried rows": (2, 3, 5, 8, 1, 1000, 9, 96, True),
    "a tree of 7 nodes": (2, 1, 7, 8, 2, 4096, 7, 256, True),
    "prefill a chunk": (1, 1, 512, 8, 2, 4096, 512, 128, False),
    "branches of 4": (1, 6, 4, 8, 8, 2048, 4, 8, False),
    "train with 128 anchors": (2, 128, 8, 9, 3, 352, 8, 64, False),
    "train with 512 anchors and carried rows": (1, 512, 16, 32, 8, 4096, 32, 128, True),
    "no context": (1, 5, 32, 8, 8, 0, 32, 16, False),
}


@pytest.fixture(scope="module", params=CHIPS)
def chips(request):
    return topologies.get_topology_desc(CHIPS[request.param], "tpu")


def on(device, tree):
    """Shapes of `tree` as arrays of that device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def arguments(B, N, T, H, G, S, R, D, own_masks, dtype):
    shapes = [(B, N, T, H, D), (B, G, S, D), (B, G, S, D), (B, N, 1), (B, N, 1)]
    shapes += [(B, N, R, G, D), (B, N, R, G, D), (1, N if own_masks else 1, T, R)]
    kinds = [dtype] * 3 + [jnp.int32] * 2 + [dtype] * 2 + [bool]
    return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, kinds, strict=True)]


def kernels(compiled):
    return len(re.findall(r"custom_call_target=\"tpu_custom_call\"", compiled.as_text()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(chips, shape, dtype):
    attend = partial(block_attention, scale=0.1, implementation="pallas_tpu")
    compiled = jax.jit(attend).lower(*on(chips.devices[0], arguments(*shape, dtype))).compile()
    assert kernels(compiled) == 1


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


def wide(config):
    """The same network with heads of 128: narrower ones are padded, at the loop's entry."""
    return dataclasses.replace(config, layers=dataclasses.replace(config.layers, head_dim=128))


def test_a_decode_loop(chips, by_kernel):
    """Draft, verify, commit: the caches stay in place, and are neither copied nor sliced."""
    loaded = hub.load_target("stories260k")
    target, network = (
        wide(loaded.config),
        wide(hub.load_drafter("stories260k-dflash", loaded).config),
    )
    decoder, B, capacity = Decoder(target, DFlash(network, 7)), 8, 8192
    key = jax.random.key(0)
    weights = Weights(
        jax.eval_shape(partial(params.init, targets.table(target)), key),
        jax.eval_shape(partial(params.init, drafters.table(network)), key),
    )
    sampling = make_sampling(0.0, 0, 1.0, batch=B, vocab_size=target.vocab_size, drafting="greedy")
    counts, stops = jnp.ones(B, jnp.int32), jnp.array([-1], jnp.int32)
    state, _ = jax.eval_shape(
        lambda *args: loop.prefill(decoder, *args, capacity, 64),
        weights, sampling, stops, jnp.zeros((B, 64), jnp.int32), counts, counts,
        row_keys(0, jnp.arange(B)),
    )  # fmt: skip
    args = on(chips.devices[0], (weights, sampling, stops, state))
    compiled = loop.run.lower(decoder, *args).compile()
    caches = [x for x in jax.tree.leaves((state.target, state.draft)) if x.ndim == 4]
    layers = target.layers.num_layers + network.layers.num_layers
    assert len(caches) == 2 * layers
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in caches)
    assert memory.temp_size_in_bytes < caches[0].size * caches[0].dtype.itemsize
    assert kernels(compiled) == layers
    shapes = {",".join(map(str, x.shape)) for x in caches}
    for line in compiled.as_text().splitlines():
        made = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = f32\[([\d,]+)\]\S* (copy|dynamic-slice)\(", line)
        assert not (made and made[1] in shapes), line


def test_a_training_step(chips, by_kernel):
    config = from_json(
        {
            "name": "aot",
            "target": "stories260k",
            "sources": [{"name": "any", "limit": 1}],
            "drafter": {"layers": 2, "block_size": 8, "taps": [0, 1, 3], "mask_token_id": 0},
            "objective": {"losses": {"kl": 1.0}},
            "steps": 10,
            "row_length": 256,
            "rows": 4,
            "anchors": 16,
        }
    )
    setup = run.prepare(config)
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    state = trainer.fresh_state(setup.plan, optimizer)
    rows = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    names = dict.fromkeys((field.name for field in dataclasses.fields(Batch)), rows)
    batch = Batch(**names | {"supervised": rows.update(dtype=bool)})
    args = on(chips.devices[0], (state, setup.target.params, batch))
    compiled = trainer.make_step(setup.plan, optimizer).lower(*args, None, None).compile()
    layers = setup.plan.target.layers.num_layers + setup.plan.drafter.layers.num_layers
    assert kernels(compiled) >= layers
