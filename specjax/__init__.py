"""Block-diffusion speculative decoding in JAX."""

from specjax.decoding.generate import Generation, generate
from specjax.models.hub import Drafter, Target, load_drafter, load_target, save_drafter, save_target

__all__ = [
    "Drafter",
    "Generation",
    "Target",
    "generate",
    "load_drafter",
    "load_target",
    "save_drafter",
    "save_target",
]
