"""What bounds a step of SmolLM2-135M on this device: reading its weights, and its products alone.

    python experiments/products.py

One pass over as many bytes as the weights hold (numpy, two threads), then all products of a step,
head included, in one jitted loop: weights as [out, in] and as [in, out], and with q, k, v and gate,
up fused into one product each. Arms run in turn; medians in milliseconds, a JSON line a row count.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, E, KV, MLP, V = 30, 576, 192, 1536, 49152
SHAPES = {"q": (E, E), "k": (KV, E), "v": (KV, E), "o": (E, E), "gate": (MLP, E), "up": (MLP, E)}
SHAPES["down"] = (E, MLP)
FUSED = {"qkv": (E + 2 * KV, E), "o": (E, E), "gate_up": (2 * MLP, E), "down": (E, MLP)}
STEPS, REPEATS = 8, 5


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


def main() -> None:
    print(json.dumps({"read_weights_once_ms": round(read_ms(), 1)}))
    arms = {
        "out_in": (*weights(SHAPES, False), False),
        "in_out": (*weights(SHAPES, True), True),
        "fused": (*weights(FUSED, False), False),
    }
    for rows in (1, 8):
        x = jnp.full((rows, E), 0.1, jnp.float32)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(REPEATS + 1):
            for name, arm in arms.items():
                begin = time.perf_counter()
                jax.block_until_ready(steps(x, *arm))
                if repeat:  # the first one compiles
                    times[name].append((time.perf_counter() - begin) / STEPS * 1e3)
        medians = {name: round(statistics.median(each), 1) for name, each in times.items()}
        print(json.dumps({"rows": rows, **medians}), flush=True)


if __name__ == "__main__":
    main()
