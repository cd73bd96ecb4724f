"""Tile sizes that were measured: a JSON file per kind of device, written by `pallas_kernels.tune`.

{"<implementation>": {"<problem>": {"<size>": value, ...}}}; what is not in it has the defaults of
the implementation.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "measured"


def problem(q: Any, ctx_k: Any) -> str:
    """The class of problems that share their sizes, from q [B, N, T, H, D] and ctx_k [B, G, S, D].

    Rows of a key/value head and of the context count in powers of two.
    """
    _, blocks, rows, heads, dim = q.shape
    kv_heads, capacity = ctx_k.shape[1:3]
    queries = blocks * rows * heads // kv_heads
    return f"{q.dtype.name} dim {dim} rows {_bucket(queries)} context {_bucket(capacity)}"


def measured(implementation: str, q: Any, ctx_k: Any) -> dict[str, int]:
    """The sizes found for such a problem on the first device, or nothing."""
    table = _table(jax.devices()[0].device_kind)
    return table.get(implementation, {}).get(problem(q, ctx_k), {})


def file(kind: str) -> Path:
    """Where the sizes of a kind of device are kept."""
    return FOLDER / f"{kind.lower().replace(' ', '-')}.json"


@cache
def _table(kind: str) -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(file(kind).read_text()) if file(kind).exists() else {}


def _bucket(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
