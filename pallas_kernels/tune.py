"""Measures tile sizes on the device at hand: `python -m pallas_kernels.tune`.

Times the forward pass of every implementation that has sizes, for the problems of
`pallas_kernels.problems`, over a grid of sizes, and writes the fastest into the table of the
device's kind. Sizes that do not compile are left out.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention import sizes
from pallas_kernels.block_attention.api import IMPLEMENTATIONS
from pallas_kernels.problems import PROBLEMS

# By platform: implementations and the values of each of their sizes.
GRIDS: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "cpu": {"xla": {"chunk": (64, 128, 256, 512)}},
    "tpu": {"pallas_tpu": {"rows": (64, 128, 256, 512), "keys": (128, 256, 512, 1024)}},
    "gpu": {
        "pallas_gpu": {
            "rows": (64, 128),
            "keys": (64, 128),
            "stages": (2, 3, 4),
            "programs": (132, 264, 528),
        },
        "pallas_triton": {
            "rows": (16, 32, 64, 128),
            "keys": (32, 64, 128),
            "warps": (4, 8),
            "stages": (2, 3),
        },
    },
}


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a call that is compiled already."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def best(function: Callable, grid: dict[str, tuple[int, ...]], args: Any, repeats: int) -> dict:
    """The fastest sizes of a grid; each size is a keyword of `function` or of its `Sizes`."""
    found: dict[float, dict[str, int]] = {}
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        run = jax.jit(partial(function, scale=0.1, sizes=chosen))
        try:
            found[seconds(partial(run, *args), repeats)] = chosen
        except Exception as error:
            print(f"  {chosen}: {str(error).splitlines()[0][:100]}")
    return found[min(found)] if found else {}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--problems", nargs="+", help="parts of names; default: all")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    asked = parser.parse_args(arguments)
    device = jax.devices()[0]
    file = sizes.file(device.device_kind)
    table = json.loads(file.read_text()) if file.exists() else {}
    for problem in PROBLEMS:
        if asked.problems and not any(part in problem.name for part in asked.problems):
            continue
        for dtype in asked.dtypes:
            args = problem.arguments(jnp.dtype(dtype))
            for name, grid in GRIDS[device.platform].items():
                reason = IMPLEMENTATIONS[name].supports(*args)
                found = {} if reason else best(IMPLEMENTATIONS[name].run, grid, args, asked.repeats)
                print(f"{problem.name}, {dtype}: {name} {reason or found}", flush=True)
                if found:
                    table.setdefault(name, {})[sizes.problem(args[0], args[1])] = found
    if not asked.dry_run:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
