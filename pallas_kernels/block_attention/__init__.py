"""Attention of short blocks of queries over a long shared context and a short tail."""

from pallas_kernels.block_attention.api import block_attention

__all__ = ["block_attention"]
