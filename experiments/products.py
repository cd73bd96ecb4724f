"""What bounds a step of SmolLM2-135M on this device: reading its weights, and its products alone.

    python experiments/products.py

One pass over as many bytes as the weights hold (numpy, two threads), then all products of a step,
head included, in one jitted loop: weights as [out, in] and as [in, out], and with q, k, v and gate,
up fused into one product each; beside them the rotation of queries and keys in all layers. Then
what a drafter of 3 layers makes of context rows, keys and values: a product each, and one for all.
Arms run in turn; medians in milliseconds, a JSON line a row count.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.rope import Rope, rotate, rotation

LAYERS, E, KV, MLP, V = 30, 576, 192, 1536, 49152
SHAPES = {"q": (E, E), "k": (KV, E), "v": (KV, E), "o": (E, E), "gate": (MLP, E), "up": (MLP, E)}
SHAPES["down"] = (E, MLP)
FUSED = {"qkv": (E + 2 * KV, E), "o": (E, E), "gate_up": (2 * MLP, E), "down": (E, MLP)}
STEPS, REPEATS = 8, 5
DRAFTER_LAYERS, HEADS, KV_HEADS, DIM = 3, 9, 3, 64


def read_ms() -> float:
    """Median time of one pass over 134.5 M float32 values by two threads."""
    halves = np.array_split(np.ones(134_500_000, np.float32), 2)

    def once() -> float:
        threads = [threading.Thread(target=np.dot, args=(half, half)) for half in halves]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - begin) * 1e3

    return statistics.median(once() for _ in range(REPEATS))


def product(x: jax.Array, w: jax.Array, transposed: bool) -> jax.Array:
    return jnp.einsum("bi,io->bo" if transposed else "bi,oi->bo", x, w)


@partial(jax.jit, static_argnums=3)
def steps(x: jax.Array, layers: list, head: jax.Array, transposed: bool) -> jax.Array:
    """Steps of nothing but products, each waiting for the one before it."""

    def body(_: int, x: jax.Array) -> jax.Array:
        for layer in layers:
            for name, w in layer.items():
                wide = x if name != "down" else jnp.tile(x, (1, 3))[:, :MLP]
                x = x + product(wide, w, transposed).sum(-1, keepdims=True) * 1e-9
        return x + product(x, head, transposed).max(-1, keepdims=True) * 1e-9

    return jax.lax.fori_loop(0, STEPS, body, x)


def weights(shapes: dict, transposed: bool) -> tuple[list, jax.Array]:
    def matrix(shape: tuple[int, int]) -> jax.Array:
        return jnp.full(shape[::-1] if transposed else shape, 0.01, jnp.float32)

    return [{n: matrix(s) for n, s in shapes.items()} for _ in range(LAYERS)], matrix((V, E))


@jax.jit
def rotations(x: jax.Array) -> jax.Array:
    """Steps of nothing but the rotation of x [rows, HEADS + KV_HEADS, DIM] in every layer."""
    cos, sin = rotation(Rope(1e5), jnp.arange(x.shape[0]), DIM)

    def body(_: int, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = jax.lax.optimization_barrier(rotate(x, cos, sin))
        return x

    return jax.lax.fori_loop(0, STEPS, body, x)


@jax.jit
def context(x: jax.Array, parts: list) -> jax.Array:
    """Steps of the products of x [rows, E] with parts [E, n], whose columns are the same in all."""

    def body(_: int, x: jax.Array) -> jax.Array:
        made = [product(x, part, True) for part in parts]
        rows = [piece for whole in made for piece in jnp.split(whole, whole.shape[1] // KV, 1)]
        rows = jax.lax.optimization_barrier(rows)  # arrays of their own, as the caches take them
        return x + sum(row.sum(-1, keepdims=True) for row in rows) * 1e-9

    return jax.lax.fori_loop(0, STEPS, body, x)


def medians(arms: dict[str, Callable[[], jax.Array]]) -> dict[str, float]:
    """Milliseconds a step of each, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(REPEATS + 1):
        for name, run in arms.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:  # the first one compiles
                times[name].append((time.perf_counter() - begin) / STEPS * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def main() -> None:
    print(json.dumps({"read_weights_once_ms": round(read_ms(), 1)}))
    arms = {
        "out_in": (*weights(SHAPES, False), False),
        "in_out": (*weights(SHAPES, True), True),
        "fused": (*weights(FUSED, False), False),
    }
    for rows in (1, 8):
        x = jnp.full((rows, E), 0.1, jnp.float32)
        heads = jnp.full((rows, HEADS + KV_HEADS, DIM), 0.1, jnp.float32)
        runs = {name: partial(steps, x, *arm) for name, arm in arms.items()}
        runs["rotation"] = partial(rotations, heads)
        print(json.dumps({"rows": rows, **medians(runs)}), flush=True)
    columns = 2 * DRAFTER_LAYERS
    parts = [jnp.full((E, KV), 0.01, jnp.float32) for _ in range(columns)]
    whole = [jnp.full((E, columns * KV), 0.01, jnp.float32)]
    for rows in (5, 8, 512):
        x = jnp.full((rows, E), 0.1, jnp.float32)
        runs = {"a product each": partial(context, x, parts), "one": partial(context, x, whole)}
        print(json.dumps({"context rows": rows, **medians(runs)}), flush=True)


if __name__ == "__main__":
    main()
