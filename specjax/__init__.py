"""Block-diffusion speculative decoding in JAX."""

from typing import Any

from specjax.decoding.answers import Generation
from specjax.decoding.drafting import NGram
from specjax.decoding.generate import generate, started, warmup
from specjax.decoding.loop import prefill, run, run_rounds, step
from specjax.evaluation import evaluate
from specjax.models.hub import Drafter, Target, load_drafter, load_target, save_drafter, save_target
from specjax.models.reuse import ReAnchor

__all__ = [
    "Drafter",
    "Generation",
    "NGram",
    "ReAnchor",
    "Target",
    "TrainConfig",
    "evaluate",
    "fit",
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


def __getattr__(name: str) -> Any:
    """Training is imported when it is used: its packages take longer than all the others."""
    if name == "fit":
        from specjax.training.run import fit

        return fit
    if name == "TrainConfig":
        from specjax.training.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
