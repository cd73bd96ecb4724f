"""Block attention on the device at hand: `make bench-kernels`.

Every implementation that takes a problem, JAX's own attention over the same arrays with a dense
mask, and on a GPU cuDNN's. Each output is compared with the reference before it is timed. Arms
run in turn; figures are medians. Beside the times stand the bytes that the forward pass must read
and write over the measured rate of a copy, and its operations over the measured rate of a product.

parts: check     forward and gradient of every shape class against the reference; nothing is timed
       forward   one call
       backward  the gradient of all five arrays
       decode    generation with stories260k and its drafter, the kernels against XLA: the same text
       train     a training step of a drafter for stories260k, likewise: the same loss and gradient

A table on the screen, JSON lines in --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from pallas_kernels.block_attention import api, block_attention
from pallas_kernels.problems import PROBLEMS, Problem
from specjax.training import trainer
from specjax.training.config import from_json
from specjax.training.packing import Batch
from specjax.training.run import prepare

PARTS = ["check", "forward", "backward", "decode", "train"]
KERNELS = {"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu", "pallas_triton")}  # by platform
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
DENSE = 1 << 31  # bytes of a dense mask's scores that are still tried


def dense(backend: str | None, scale: float, *args: jax.Array) -> jax.Array:
    """JAX's own attention over context and tail in one array: blocks become batch rows."""
    q, ctx_k, ctx_v, start, end, tail_k, tail_v, mask = args
    B, N, T, _, D = q.shape
    S, R = ctx_k.shape[2], tail_k.shape[2]

    def rows(context: jax.Array, tail: jax.Array) -> jax.Array:
        context = jnp.broadcast_to(
            context.transpose(0, 2, 1, 3)[:, None], (B, N, S, *tail.shape[3:])
        )
        return jnp.concatenate([context, tail], axis=2).reshape(B * N, S + R, *tail.shape[3:])

    slot = jnp.arange(S, dtype=jnp.int32)[None, None, None]
    seen = jnp.broadcast_to((start[..., None] <= slot) & (slot < end[..., None]), (B, N, T, S))
    seen = jnp.concatenate([seen, jnp.broadcast_to(mask, (B, N, T, R))], axis=3)
    out = jax.nn.dot_product_attention(
        q.reshape(B * N, T, -1, D), rows(ctx_k, tail_k), rows(ctx_v, tail_v),
        mask=seen.reshape(B * N, 1, T, S + R), scale=scale, implementation=backend,
    )  # fmt: skip
    return out.reshape(q.shape)


def arms(problem: Problem, args: tuple[jax.Array, ...], scale: float) -> dict[str, Callable]:
    """Functions of the arguments that give `out`, by name."""
    found: dict[str, Callable] = {}
    for name in ("xla", *KERNELS.get(jax.devices()[0].platform, ())):
        if api.IMPLEMENTATIONS[name].supports(*args) is None:
            found[name] = partial(block_attention, scale=scale, implementation=name)
    scores = problem.batch * problem.blocks * problem.rows * problem.heads * problem.capacity
    copies = problem.batch * problem.blocks * problem.capacity * problem.kv_heads * problem.dim
    if 4 * max(scores, copies) <= DENSE:
        found["jax dense"] = partial(dense, "xla", scale)
        if jax.devices()[0].platform == "gpu":
            found["cudnn dense"] = partial(dense, "cudnn", scale)
    return found


def gradient(function: Callable) -> Callable:
    """The gradient of an arm in its five float arrays."""

    def loss(floats: tuple[jax.Array, ...], args: tuple[jax.Array, ...]) -> jax.Array:
        q, ctx_k, ctx_v, tail_k, tail_v = floats
        out = function(q, ctx_k, ctx_v, *args[3:5], tail_k, tail_v, args[7])
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return lambda *args: jax.grad(loss)((*args[:3], *args[5:7]), args)


def rates(size: int = 1 << 26, side: int = 4096) -> tuple[float, dict[str, float]]:
    """Bytes a second of a copy (read and written), and operations a second of a product."""
    if jax.devices()[0].platform == "cpu":
        side = 1024
    x = jnp.ones(size // 4, jnp.float32)
    copy = 2 * size / timed({"copy": partial(jax.jit(lambda x: x + 1), x)}, 10)["copy"]
    products = {}
    for dtype in TOLERANCE:
        a = jnp.ones((side, side), dtype)
        run = partial(jax.jit(lambda a: a @ a), a)
        products[dtype] = 2 * side**3 / timed({"product": run}, 10)["product"]
    return copy, products


def timed(runs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turn; all are compiled before."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def work(problem: Problem, args: tuple[jax.Array, ...]) -> tuple[int, int]:
    """Bytes that the forward pass must move, and operations on visible pairs."""
    start, end = np.asarray(args[3]), np.asarray(args[4])
    width = problem.dim * args[0].dtype.itemsize
    rows = int((end.max(axis=(1, 2)) - start.min(axis=(1, 2))).sum())
    moved = 2 * rows * problem.kv_heads * width + 2 * args[0].size * args[0].dtype.itemsize
    moved += 2 * args[5].size * args[5].dtype.itemsize
    pairs = int((end - start).sum()) * problem.rows * problem.heads
    pairs += problem.batch * problem.blocks * int(np.asarray(args[7]).sum()) * problem.heads
    return moved, 4 * pairs * problem.dim


def attention(
    part: str, asked: argparse.Namespace, copy: float, products: dict[str, float]
) -> list:
    """A row for each problem and dtype."""
    lines, scale = [], 0.1
    for problem in PROBLEMS:
        if asked.problems and not any(words in problem.name for words in asked.problems):
            continue
        for dtype in asked.dtypes:
            args = problem.arguments(jnp.dtype(dtype))
            runs, errors = {}, {}
            for name, function in arms(problem, args, scale).items():
                run = jax.jit(gradient(function) if part == "backward" else function)
                try:
                    jax.block_until_ready(run(*args))
                except Exception as error:
                    print(f"{problem.name}, {dtype}: {name}: {str(error).splitlines()[0][:100]}")
                    continue
                errors[name] = error_of(function, args, scale, problem)
                runs[name] = partial(run, *args)
            found = timed(runs, asked.rounds)
            moved, operations = work(problem, args)
            line = {"part": part, "problem": problem.name, "dtype": dtype, "error": errors}
            line |= {"ms": {name: 1e3 * value for name, value in found.items()}}
            line |= {"bytes": moved, "operations": operations}
            if part == "forward":  # what the fastest reaches of what the chip can do
                fastest = min(found.values())
                line |= {
                    "of the copy": moved / copy / fastest,
                    "of the product": operations / products[dtype] / fastest,
                }
            lines.append(line)
            print(text(line), flush=True)
    return lines


def classes(dtypes: list[str]) -> Iterator[tuple[str, str, tuple[jax.Array, ...]]]:
    """Small problems of every shape class: names, dtypes and random arguments.

    Numbers of rows with groups of 1, 3, 4 and 8 query heads; dtypes, head dims, capacities (also
    none) and tails (also none) in turn; ranges ragged, from above 0, full and empty; any mask of
    the tail.
    """
    rng, dims, capacities = np.random.default_rng(0), (8, 16, 64, 96, 128, 256), (300, 40, 0, 1100)
    kinds = itertools.product((1, 4, 5, 7, 8, 16, 32), ((2, 2), (6, 2), (8, 2), (8, 1)))
    for n, (T, (H, G)) in enumerate(kinds):
        dtype = dtypes[(n + n // 4) % len(dtypes)]
        D, S, R = dims[n // 2 % 6], capacities[(n + n // 4) % 4], (T, T + 3, 0)[n % 3]
        name = f"{T} rows, {H}/{G} heads of {D}, context {S}, tail {R}"
        args = list(
            Problem(name, 2, 3, T, H, G, S, R, D, 1.0, False).arguments(jnp.dtype(dtype), n)
        )
        bounds = np.sort(rng.integers(0, S + 1, (2, 2, 3, T)), axis=0)
        bounds[:, 0, 0], bounds[:, 0, 1] = [[0], [S]], S // 2  # a full block and an empty one
        args[3:5] = jnp.asarray(bounds, jnp.int32)
        args[7] = jnp.asarray(rng.random((2, 3, T, R)) < 0.5)
        yield name, dtype, tuple(args)


def check(asked: argparse.Namespace) -> list:
    """A line for each shape class, and the largest errors of all."""
    lines, worst = [], dict[tuple[str, str], float]()
    for name, dtype, args in classes(asked.dtypes):
        errors = {
            kernel: shape_error(kernel, args)
            for kernel in ("xla", *KERNELS.get(jax.devices()[0].platform, ()))
            if api.IMPLEMENTATIONS[kernel].supports(*args) is None
        }
        lines.append({"part": "check", "problem": name, "dtype": dtype, "error": errors})
        for kernel, error in errors.items():
            worst[kernel, dtype] = float(np.maximum(worst.get((kernel, dtype), 0.0), error))
            if not error <= TOLERANCE[dtype]:
                print(f"WRONG: {kernel} in {dtype} by {error:.1e}: {name}")
    for (kernel, dtype), error in worst.items():
        print(f"check    {kernel} in {dtype}: {error:.1e} at most", flush=True)
    return lines


def shape_error(kernel: str, args: tuple[jax.Array, ...]) -> float:
    """The largest error of output and gradients, each relative to its largest value."""

    def both(name: str, args: tuple[jax.Array, ...]) -> list[jax.Array]:
        attend = partial(block_attention, scale=args[0].shape[-1] ** -0.5, implementation=name)
        return jax.jit(lambda *args: [attend(*args), *gradient(attend)(*args)])(*args)

    exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    with jax.default_matmul_precision("highest"):  # float32 is TF32 on a GPU otherwise
        pairs = zip(both(kernel, args), both("reference", tuple(exact)), strict=True)
    errors = [
        jnp.max(jnp.abs(got.astype(jnp.float32) - expected))
        / jnp.maximum(jnp.max(jnp.abs(expected)), 1e-6)
        for got, expected in pairs
        if expected.size
    ]
    return float(np.max(errors))  # NaN stays NaN


def error_of(function: Callable, args: tuple, scale: float, problem: Problem) -> float | None:
    """Largest error against the reference, relative to its largest value, where that fits."""
    scores = problem.batch * problem.blocks * problem.rows * problem.heads * problem.capacity
    if 4 * scores * problem.dim > DENSE:
        return None
    exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    expected = block_attention(*exact, scale=scale, implementation="reference")
    got = jax.jit(function)(*args).astype(jnp.float32)
    worst = float(jnp.max(jnp.abs(got - expected)) / jnp.max(jnp.abs(expected)))
    if worst > TOLERANCE[args[0].dtype.name]:
        print(f"  WRONG by {worst:.1e}")
    return worst


def by_default(part: str, run: Callable[[], Any], rounds: int) -> tuple[list, list]:
    """Times and results of `run` with each implementation that it takes as the default."""
    lines, results = [], []
    for name in ("xla", *KERNELS.get(jax.devices()[0].platform, ())):
        api.default_order = lambda name=name: (name,)  # type: ignore[assignment]
        jax.clear_caches()
        try:
            results.append(run())
        except NotImplementedError as error:
            print(f"{part}: {error}")
            continue
        found = timed({name: run}, rounds)
        lines.append({"part": part, "ms": {name: 1e3 * found[name]}})
        print(text(lines[-1]), flush=True)
    return lines, results


def decode(asked: argparse.Namespace) -> list:
    """8 stories; in bfloat16 a near tie may be decided otherwise, and the text with it."""
    target = specjax.load_target("stories260k")
    drafter = specjax.load_drafter("stories260k-dflash", target)
    arguments = {"drafter": drafter, "max_new_tokens": 128, "temperature": 0.0}
    run = partial(specjax.generate, target, ["Once upon a time"] * 8, **arguments)
    lines, results = by_default("decode", lambda: run().text, max(3, asked.rounds // 3))
    if any(found != results[0] for found in results):
        print("DIFFERENT: the implementations tell different stories")
    return lines


def train(asked: argparse.Namespace) -> list:
    """A step on 16 rows of 512 random tokens, 128 blocks of 8 in each."""
    rows, length = 16, 512
    config = from_json(
        {
            "name": "bench",
            "target": "stories260k",
            "sources": [{"name": "any", "limit": 1}],
            "drafter": {"layers": 2, "block_size": 8, "taps": [0, 1, 3], "mask_token_id": 0},
            "objective": {"losses": {"kl": 1.0}},
            "row_length": length,
            "rows": rows,
            "anchors": 128,
            "steps": 10,
        }
    )
    setup = prepare(config)
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    zero = jnp.zeros((rows, length), jnp.int32)
    batch = Batch(
        tokens=jax.random.randint(jax.random.key(0), (rows, length), 3, 512, jnp.int32),
        positions=position,
        start=zero,
        document=zero + jnp.arange(rows, dtype=jnp.int32)[:, None],
        supervised=zero == 0,
        source=position,
    )

    @cache  # a step of its own for each default
    def step(default: tuple[str, ...]) -> Callable:
        return trainer.make_step(setup.plan, optimizer)

    def run() -> list[float]:
        state = trainer.fresh_state(setup.plan, optimizer)
        _, made = step(api.default_order())(state, setup.target.params, batch, None, None)
        return [float(made["loss"]), float(made["grad_norm"])]

    lines, results = by_default("train", run, asked.rounds)
    if not np.allclose(results, results[:1], rtol=TOLERANCE["bfloat16"]):
        print(f"WRONG: loss and norm of the gradient are {results}")
    return lines


def text(line: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {value:.3f}" for name, value in line["ms"].items())
    head = f"{line['part']:<9}{line.get('problem', ''):<28}{line.get('dtype', ''):<9} ms: {times}"
    if "of the copy" in line:
        head += f"  {line['of the copy']:.0%} of copy, {line['of the product']:.0%} of product"
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--problems", nargs="+", help="parts of names; default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON lines")
    asked = parser.parse_args()
    device, (copy, products) = jax.devices()[0], rates()
    print(
        f"{device.device_kind}: copy {copy / 1e9:.0f} GB/s, product "
        + ", ".join(f"{value / 1e12:.2f} Tops/s in {name}" for name, value in products.items())
    )
    lines: list[dict[str, Any]] = []
    for part in asked.part:
        whole = {"check": check, "decode": decode, "train": train}.get(part)
        lines += whole(asked) if whole else attention(part, asked, copy, products)
    if asked.out:
        asked.out.write_text(
            "".join(json.dumps({"device": device.device_kind} | line) + "\n" for line in lines)
        )


if __name__ == "__main__":
    main()
