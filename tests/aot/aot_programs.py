"""What is compiled for devices that are not here: shapes of attention, and two whole programs."""

import dataclasses
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

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


def on(device, tree):
    """Shapes of `tree` as arrays of that device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def arguments(B, N, T, H, G, S, R, D, own_masks, dtype):
    shapes = [(B, N, T, H, D), (B, G, S, D), (B, G, S, D), (B, N, 1), (B, N, 1)]
    shapes += [(B, N, R, G, D), (B, N, R, G, D), (1, N if own_masks else 1, T, R)]
    kinds = [dtype] * 3 + [jnp.int32] * 2 + [dtype] * 2 + [bool]
    return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, kinds, strict=True)]


def _wide(config):
    """The same network with heads of 128: narrower ones are padded, at the loop's entry."""
    return dataclasses.replace(config, layers=dataclasses.replace(config.layers, head_dim=128))


class Loop(NamedTuple):
    """A decoding loop: its static argument, the shapes of the others, its caches and layers."""

    decoder: Decoder
    args: Any
    caches: list[Any]
    layers: int


def decode_loop(dtype) -> Loop:
    """Eight rows of up to 8192 tokens, by stories260k and its drafter with wide heads."""
    loaded = hub.load_target("stories260k")
    target = _wide(loaded.config)
    network = _wide(hub.load_drafter("stories260k-dflash", loaded).config)
    decoder, B, capacity = Decoder(target, DFlash(network, 7)), 8, 8192
    weights = jax.tree.map(
        lambda x: x.update(dtype=dtype),
        Weights(
            jax.eval_shape(partial(params.init, targets.table(target)), jax.random.key(0)),
            jax.eval_shape(partial(params.init, drafters.table(network)), jax.random.key(0)),
        ),
    )
    sampling = make_sampling(0.0, 0, 1.0, batch=B, vocab_size=target.vocab_size, drafting="greedy")
    counts, stops = jnp.ones(B, jnp.int32), jnp.array([-1], jnp.int32)
    state, _ = jax.eval_shape(
        lambda *args: loop.prefill(decoder, *args, capacity, 64),
        weights, sampling, stops, jnp.zeros((B, 64), jnp.int32), counts, counts,
        row_keys(0, jnp.arange(B)),
    )  # fmt: skip
    caches = [x for x in jax.tree.leaves((state.target, state.draft)) if x.ndim == 4]
    layers = target.layers.num_layers + network.layers.num_layers
    assert len(caches) == 2 * layers
    return Loop(decoder, (weights, sampling, stops, state), caches, layers)


def training_step(compute: str) -> tuple[Any, Any, int]:
    """A jitted step, the shapes of its arguments but the last two, and layers of attention."""
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
            "compute": compute,
        }
    )
    setup = run.prepare(config)
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    state = trainer.fresh_state(setup.plan, optimizer)
    rows = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    names = dict.fromkeys((field.name for field in dataclasses.fields(Batch)), rows)
    batch = Batch(**names | {"supervised": rows.update(dtype=bool)})
    layers = setup.plan.target.layers.num_layers + setup.plan.drafter.layers.num_layers
    step = trainer.make_step(setup.plan, optimizer)
    return step, (state, setup.target.params, batch), layers


def copies(compiled, caches) -> list[str]:
    """Instructions that copy or cut out something of the shape of a cache."""
    shapes = {",".join(map(str, x.shape)) for x in caches}
    pattern = r"\s*(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]+)\]\S* (?:copy|dynamic-slice)\("
    found = [(re.match(pattern, line), line) for line in compiled.as_text().splitlines()]
    return [line for made, line in found if made and made[1] in shapes]
