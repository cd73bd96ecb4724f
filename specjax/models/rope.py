"""Rotary position embedding: frequencies from a published config, rotation in half-split form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Frequencies of rotary embeddings (Su et al., arXiv 2104.09864) and their scalings.

    Attributes:
      theta: base of the frequencies.
      kind: one of `KINDS`.
      factor: context extension (linear, llama3, yarn).
      original: positions the model was first trained for (llama3, yarn).
      low, high: wavelength bounds of llama3, as multiples of 1 / original.
      beta_fast, beta_slow: rotations over `original` between which yarn blends.
      attention_factor: multiplies cos and sin (yarn).
      truncate: yarn rounds its blending bounds to whole dimensions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angle per position of each of the head_dim / 2 planes, float32."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        plain = self.theta**-exponent
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            # Planes that turn less than `low` times over the original context are stretched,
            # those above `high` are left alone, those between are blended linearly.
            turns = self.original * plain / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            plain = kept * plain + (1 - kept) * plain / self.factor
        elif self.kind == "yarn":
            stretched = self._yarn_ramp(head_dim)
            plain = plain * (1 - stretched) + plain / self.factor * stretched
        return plain.astype(np.float32)

    def _yarn_ramp(self, head_dim: int) -> np.ndarray:
        """How far each plane is stretched, 0 to 1 (Peng et al., arXiv 2309.00071)."""

        def plane(rotations: float) -> float:  # the plane that turns so often over `original`
            wavelengths = self.original / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelengths) / (2 * math.log(self.theta))

        low, high = plane(self.beta_fast), plane(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low if high != low else 0.001
        return np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)


def from_hf(config: Mapping[str, Any], *, default_theta: float | None) -> Rope:
    """Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

    A key at the top level wins over the nested one. Without any theta `default_theta` holds; None
    makes that an error.

    Raises:
      ValueError: no theta, or a scaling that is not supported, named by its key and value.
    """
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    by_layer = [key for key, value in scaling.items() if isinstance(value, Mapping)]
    if by_layer:
        raise ValueError(f"rope parameters by layer type ({by_layer[0]}) are not supported")
    nested = (config.get("rope_parameters") or {}).get("rope_theta")
    theta = config.get("rope_theta")
    theta = nested if theta is None else theta
    theta = default_theta if theta is None else theta
    if theta is None:
        raise ValueError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    partial = config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported, only 1.0")
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind not in KINDS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if kind == "default":
        return Rope(float(theta))
    if "factor" not in scaling:
        raise ValueError(f"rope scaling {kind!r} needs a factor, got {scaling}")
    factor = float(scaling["factor"])
    original = config.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings", config.get("max_position_embeddings", 0)
    )
    if kind == "linear":
        return Rope(float(theta), kind, factor)
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
        return Rope(float(theta), kind, factor, int(original), low=float(low), high=float(high))
    return Rope(
        float(theta),
        kind,
        factor,
        int(original),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=_yarn_attention(scaling, factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def rotation(rope: Rope, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles, each [..., D / 2] float32, for positions [...]."""
    frequencies = jnp.asarray(rope.frequencies(head_dim))
    angles = jnp.einsum("...,d->...d", positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., heads, D]: channel i pairs with i + D / 2; cos and sin are [..., D / 2]."""
    cos = cos.astype(x.dtype)[..., None, :]
    sin = sin.astype(x.dtype)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1.0)
