"""Block-diffusion speculative decoding in JAX."""

from specjax.decoding.answers import Generation
from specjax.decoding.drafting import NGram
from specjax.decoding.generate import generate, started, warmup
from specjax.decoding.loop import prefill, run, run_rounds, step
from specjax.evaluation import evaluate
from specjax.models.hub import Drafter, Target, load_drafter, load_target, save_drafter, save_target

__all__ = [
    "Drafter",
    "Generation",
    "NGram",
    "Target",
    "evaluate",
    "generate",
    "load_drafter",
    "load_target",
    "prefill",
    "run",
    "run_rounds",
    "save_drafter",
    "save_target",
    "started",
    "step",
    "warmup",
]
