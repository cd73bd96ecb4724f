"""The package `speculators` 0.9.0, imported without its data pipeline.

Its models import that pipeline, which asks servers for training text through `openai`, `datasets`
and `hs_connectors` (with pyarrow and more behind them). Nothing of it runs here, so empty modules
stand in where these are not installed. Of its other requirements only `loguru` and `pydantic` are
needed beyond torch and transformers.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

PIPELINE = ("openai", "openai.types", "openai.types.chat", "openai.types.completion")
PIPELINE += ("datasets", "hs_connectors")


class _Empty(ModuleType):
    """A module of empty classes: enough for annotations and imports by name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def speculators():
    """The imported package."""
    import transformers  # before optional packages seem to exist, which it looks for

    absent = [n for n in PIPELINE if importlib.util.find_spec(n.split(".")[0]) is None]
    for name in absent:
        module = sys.modules[name] = _Empty(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
    import speculators
    from loguru import logger

    logger.disable("speculators")
    transformers.logging.disable_progress_bar()
    return speculators


def load_speculator(directory, attention="eager"):
    """A drafter as the package itself loads it, in float32, with "eager" or "sdpa" attention.

    Its default attention is one that is compiled for GPUs.
    """
    import torch
    from safetensors.torch import load_file

    package = speculators()
    config = package.SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = attention
    model = package.SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32)
    loaded = model.state_dict()
    for name, tensor in load_file(f"{directory}/model.safetensors").items():
        if name not in loaded or not torch.equal(loaded.pop(name), tensor.float()):
            raise ValueError(f"speculators does not load {name} of {directory}")
    # What is left is the target's, which the package fetches by the name in the config.
    owned = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
    if set(loaded) - {*owned, "verifier_norm.weight"} or any(
        not tensor.isfinite().all() for tensor in loaded.values()
    ):
        raise ValueError(f"speculators finds no values for {sorted(loaded)} of {directory}")
    return model.eval()
