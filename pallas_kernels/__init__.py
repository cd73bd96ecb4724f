"""Attention kernels for block-diffusion drafting, usable without the rest of specjax."""

from pallas_kernels.block_attention import block_attention

__all__ = ["block_attention"]
