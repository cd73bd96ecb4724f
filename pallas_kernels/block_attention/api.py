"""The public attention op: checks its arguments and picks an implementation."""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention import xla
from pallas_kernels.block_attention.reference import block_attention_reference


class Implementation(NamedTuple):
    """One way to compute block attention."""

    run: Callable  # (q, ..., tail_mask, *, scale) -> (out, lse)
    supports: Callable[..., str | None]  # (q, ..., tail_mask) -> why not, or None


def _kernel(name: str) -> Implementation:
    """The kernel of a file of that name; without JAX's part for it, one that tells so."""
    try:
        module = importlib.import_module(f"pallas_kernels.block_attention.{name}")
    except (ImportError, AttributeError) as error:
        reason = f"is not for JAX {jax.__version__}: {error}"
        return Implementation(lambda *_, scale: None, lambda *_: reason)
    return Implementation(getattr(module, f"block_attention_{name}"), module.supports)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(block_attention_reference, lambda *_: None),
    "xla": Implementation(xla.block_attention_xla, lambda *_: None),
    "pallas_tpu": _kernel("pallas_tpu"),
    "pallas_gpu": _kernel("pallas_gpu"),
    "pallas_triton": _kernel("pallas_triton"),
}

# By platform, the fastest first; XLA runs everywhere and ends each. The kernels for GPUs are not
# among them: neither has run on one yet.
DEFAULT_ORDER: dict[str, tuple[str, ...]] = {"tpu": ("pallas_tpu", "xla")}


def default_order() -> tuple[str, ...]:
    """The implementations tried on the first device when none is named."""
    return DEFAULT_ORDER.get(jax.devices()[0].platform, ("xla",))


_FLOATS = ("bfloat16", "float16", "float32", "float64")


@overload
def block_attention(
    q: jax.Array,
    ctx_k: jax.Array,
    ctx_v: jax.Array,
    ctx_start: jax.Array,
    ctx_end: jax.Array,
    tail_k: jax.Array,
    tail_v: jax.Array,
    tail_mask: jax.Array,
    *,
    scale: float,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[False] = False,
    explain: bool = False,
) -> jax.Array: ...


@overload
def block_attention(
    q: jax.Array,
    ctx_k: jax.Array,
    ctx_v: jax.Array,
    ctx_start: jax.Array,
    ctx_end: jax.Array,
    tail_k: jax.Array,
    tail_v: jax.Array,
    tail_mask: jax.Array,
    *,
    scale: float,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[True],
    explain: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


def block_attention(
    q: jax.Array,  # [B, N, T, H, D]
    ctx_k: jax.Array,  # [B, G, S, D]
    ctx_v: jax.Array,  # [B, G, S, D]
    ctx_start: jax.Array,  # [B, N, T or 1] int32
    ctx_end: jax.Array,  # [B, N, T or 1] int32
    tail_k: jax.Array,  # [B, N, R, G, D]
    tail_v: jax.Array,  # [B, N, R, G, D]
    tail_mask: jax.Array,  # [B or 1, N or 1, T, R] bool
    *,
    scale: float,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
    explain: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention of N blocks of T query rows over a shared context and a tail of their own.

    A query row sees the context rows `ctx_start <= s < ctx_end` and the tail rows where
    `tail_mask` is true; one softmax runs over both. Query head h uses key/value head
    h // (H // G). S and R may be 0. A row that sees nothing gives zeros and lse = -inf. Rows that
    are not visible must be finite and have no influence. Differentiable (reverse mode) in q,
    context and tail; the gradient of the context sums over blocks.

    Scores are `scale * q @ k`, in float32 (float64 for float64 inputs). Returns `out`
    [B, N, T, H, D] in the dtype of q, and with `return_lse` also the log-sum-exp of each row's
    scores, [B, N, T, H] in float32 (float64).

    `implementation` is a name, which raises NotImplementedError with the reason where it cannot
    take these arguments; a sequence of names, of which the first that can is taken, with one
    warning that tells why the others cannot; or None, the default order of the platform, which
    ends in "xla". `explain` prints the choice. Kernels divide batch and heads over a mesh with the
    axes "data" and "model". Raises ValueError or TypeError for shapes and dtypes that do not
    fit, before any compute.
    """
    args = (q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask)
    _check(*args)
    names = default_order() if implementation is None else implementation
    names = (names,) if isinstance(names, str) else tuple(names)
    out, lse = _first_that_runs(names, args, float(scale), explain)
    return (out, lse) if return_lse else out


def _first_that_runs(names, args, scale, explain):
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(
            f"implementation {unknown or names!r} is not known; choose from "
            f"{sorted(IMPLEMENTATIONS)}, or None for the default order {default_order()}"
        )
    reasons = []
    for name in names:
        reason = IMPLEMENTATIONS[name].supports(*args)
        if reason:
            reasons.append(f"{name} {reason}")
            continue
        message = "; ".join([f"block_attention runs as {name!r}", *reasons])
        if explain:
            print(message)
        elif reasons:
            _warn_once(message)
        return IMPLEMENTATIONS[name].run(*args, scale=scale)
    raise NotImplementedError("block_attention cannot run here: " + "; ".join(reasons))


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


def _check(q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, tail_mask):
    if q.ndim != 5 or ctx_k.ndim != 4 or tail_k.ndim != 5:
        raise ValueError(
            "expected q [B, N, T, H, D], ctx_k [B, G, S, D] and tail_k [B, N, R, G, D], "
            f"got {q.shape}, {ctx_k.shape} and {tail_k.shape}"
        )
    batch, blocks, rows, heads, dim = q.shape
    kv_heads, capacity = ctx_k.shape[1:3]
    tail = tail_k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    context = (batch, kv_heads, capacity, dim)
    tail_shape = (batch, blocks, tail, kv_heads, dim)
    _check_shape("ctx_k", ctx_k, [context])
    _check_shape("ctx_v", ctx_v, [context])
    _check_shape("tail_k", tail_k, [tail_shape])
    _check_shape("tail_v", tail_v, [tail_shape])
    for name, x in (("ctx_start", ctx_start), ("ctx_end", ctx_end)):
        _check_shape(name, x, [(batch, blocks, rows), (batch, blocks, 1)])
        _check_dtype(name, x, ("int32",))
    masks = [(b, n, rows, tail) for b in (batch, 1) for n in (blocks, 1)]
    _check_shape("tail_mask", tail_mask, masks)
    _check_dtype("tail_mask", tail_mask, ("bool",))
    _check_dtype("q", q, _FLOATS)
    for name, x in (("ctx_k", ctx_k), ("ctx_v", ctx_v), ("tail_k", tail_k), ("tail_v", tail_v)):
        _check_dtype(name, x, (q.dtype.name,))


def _check_shape(name, x, allowed):
    if x.shape not in allowed:
        choices = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name} must have shape {choices}, got {x.shape}")


def _check_dtype(name, x, allowed):
    if jnp.dtype(x.dtype).name not in allowed:
        raise TypeError(f"{name} must be {' or '.join(allowed)}, got {x.dtype}; cast it first")
