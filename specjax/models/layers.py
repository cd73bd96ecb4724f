"""The decoder layer that targets and drafters share, and the pieces it is made of.

Attention goes through one op, blocks over a shared context: the rows of a pass are its tail, and
the committed (or clean) rows before them its context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention import block_attention
from specjax.models import cache
from specjax.models.params import Param, Table, matrix
from specjax.models.rope import Rope, rotate
from specjax.models.visibility import Visibility
from specjax.types import Array, KVCache, Params


@dataclass(frozen=True)
class LayerConfig:
    """Shapes and options of a stack of decoder layers.

    `windows` holds one entry per layer: how many positions back its attention reaches (the own
    position included), or None for all.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)


def layer_table(config: LayerConfig, prefix: str) -> Table:
    """The tensors of one layer under the published names `prefix...`."""
    E, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = {"heads": config.num_heads}, {"kv_heads": config.num_kv_heads}
    q, kv = config.num_heads * D, config.num_kv_heads * D

    def linear(
        name: str, out: tuple[int, str | None], into: tuple[int, str | None], bias: bool, units=None
    ) -> Table:
        weight = matrix(
            into[0], out[0], f"{prefix}{name}.weight", axes=(into[1], out[1]), units=units
        )
        if not bias:
            return {"weight": weight}
        return {
            "weight": weight,
            "bias": Param((out[0],), (out[1],), "zeros", f"{prefix}{name}.bias", units),
        }

    def norm(name: str, size: int) -> Param:
        return Param((size,), (None,), "ones", f"{prefix}{name}.weight")

    attention: Table = {
        "q": linear("self_attn.q_proj", (q, "heads"), (E, None), config.qkv_bias, heads),
        "k": linear("self_attn.k_proj", (kv, "kv_heads"), (E, None), config.qkv_bias, kv_heads),
        "v": linear("self_attn.v_proj", (kv, "kv_heads"), (E, None), config.qkv_bias, kv_heads),
        "o": linear("self_attn.o_proj", (E, None), (q, "heads"), config.output_bias, heads),
    }
    if config.qk_norm:
        attention |= {
            "q_norm": norm("self_attn.q_norm", D),
            "k_norm": norm("self_attn.k_norm", D),
        }
    return {
        "attention_norm": norm("input_layernorm", E),
        "attention": attention,
        "mlp_norm": norm("post_attention_layernorm", E),
        "mlp": {
            "gate": linear("mlp.gate_proj", (I, "mlp"), (E, None), config.mlp_bias),
            "up": linear("mlp.up_proj", (I, "mlp"), (E, None), config.mlp_bias),
            "down": linear("mlp.down_proj", (E, None), (I, "mlp"), config.mlp_bias),
        },
    }


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis; statistics in float32, cast back before the weight."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def linear(x: Array, params: Params) -> Array:
    """x [..., in] times weight [in, out], plus the bias when there is one."""
    y = jnp.einsum("...i,io->...o", x, params["weight"])
    if "bias" in params:
        y = y + params["bias"].reshape((1,) * (y.ndim - 1) + params["bias"].shape)
    return y


def swiglu(x: Array, params: Params) -> Array:
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""
    return linear(jax.nn.silu(linear(x, params["gate"])) * linear(x, params["up"]), params["down"])


def keys_values(
    config: LayerConfig, params: Params, x: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
    """Rotated keys and values [..., G, D] of rows x [..., E]; params are a layer's attention."""
    shape = (*x.shape[:-1], config.num_kv_heads, config.head_dim)
    k = linear(x, params["k"]).reshape(shape)
    if config.qk_norm:
        k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
    return rotate(k, cos, sin), linear(x, params["v"]).reshape(shape)


def decoder_layer(
    config: LayerConfig,
    params: Params,
    x: Array,  # [B, N, T, E]
    rotation: tuple[Array, Array],  # cos, sin [B, N, T, D / 2]
    context: tuple[Array, Array] | None,  # k, v [B, G, S, D]; None: the earlier blocks
    seen: Visibility,
    carried: tuple[Array, Array] | None = None,  # k, v [B, N, C, G, D]: tail rows before the own
    write_at: Array | None = None,  # [B]: keep the rows of the one block in the context, from here
) -> tuple[Array, tuple[Array, Array]]:
    """One pre-norm layer: attention over context and tail, then SwiGLU.

    Returns:
      The new residual stream [B, N, T, E] and the k, v [B, G, S, D] of the context: the one given,
      with the own rows in it where `write_at` says so, or all rows of the pass.
    """
    attention = params["attention"]
    y = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    q = linear(y, attention["q"]).reshape(*y.shape[:-1], config.num_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, attention["q_norm"], config.rms_norm_eps)
    k, v = keys_values(config, attention, y, *rotation)
    tail_k, tail_v = k, v
    if carried is not None:
        tail_k = jnp.concatenate([carried[0], k], axis=2)
        tail_v = jnp.concatenate([carried[1], v], axis=2)
    own = as_context(k), as_context(v)
    if context is None:
        context_k, context_v = own if x.shape[1] > 1 else (own[0][:, :, :0], own[1][:, :, :0])
    else:
        context_k, context_v = context
        if write_at is not None:
            context_k = cache.write(context_k, k[:, 0], write_at)
            context_v = cache.write(context_v, v[:, 0], write_at)
    out = block_attention(
        rotate(q, *rotation),
        context_k,
        context_v,
        seen.ctx_start,
        seen.ctx_end,
        tail_k,
        tail_v,
        seen.tail_mask,
        scale=config.head_dim**-0.5,
    )
    assert not isinstance(out, tuple)
    x = x + linear(out.reshape(*out.shape[:-2], -1), attention["o"])
    return x + swiglu(rms_norm(x, params["mlp_norm"], config.rms_norm_eps), params["mlp"]), (
        own if context is None else (context_k, context_v)
    )


def as_context(rows: Array) -> Array:
    """Rows [B, N, T, G, D] of consecutive blocks as one context [B, G, N * T, D]."""
    B, N, T, G, D = rows.shape
    return rows.reshape(B, N * T, G, D).transpose(0, 2, 1, 3)


def empty_cache(config: LayerConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """A cache for every layer of the stack."""
    return cache.init(
        config.num_layers, config.num_kv_heads, config.head_dim, batch, capacity, dtype
    )
