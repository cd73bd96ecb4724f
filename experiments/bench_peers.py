"""SmolLM2-135M on this machine: ours against the PyTorch packages, in interleaved pairs.

Run by `make bench-peers`, in the environment that has torch too. One process, one thread pool per
framework on the same cores, the two arms in turn; medians over the pairs, and the ratio of a pair
with its 95% bootstrap interval. Everything is float32, batch 1, greedy, from the same prompt ids,
and nothing is timed unless both arms give the same tokens.

plain   milliseconds a token: `generate` without a drafter against transformers' `generate`
round   milliseconds of a speculative round (draft a block of 8, verify, commit), prefill excluded:
        ours against `dflash_generate`, with one drafter of random weights, so that a round makes
        about one token
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import dflash.model
import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import specjax
from specjax.models import drafter as backbone
from specjax.models import drafter_hf, params

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import interval

PROMPT = "Gravity is"
LAYERS, BLOCK, TAPS, MASK = 3, 8, (1, 8, 14, 20, 27), 16

# An arm decodes once and returns milliseconds per unit, the new tokens and the number of units.
Arm = Callable[[], tuple[float, list[int], int]]


def plain_arms(target: specjax.Target, model: Any, count: int) -> tuple[Arm, Arm]:
    """Per token, the prefill included."""
    ids = target.tokenizer(PROMPT).input_ids
    prompt = torch.tensor([ids])

    def ours() -> tuple[float, list[int], int]:
        start = time.perf_counter()
        out = specjax.generate(target, ids, max_new_tokens=count, eos_token_id=())
        return (time.perf_counter() - start) * 1e3 / count, out.tokens, count

    @torch.inference_mode()
    def theirs() -> tuple[float, list[int], int]:
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            eos_token_id=None,
            do_sample=False,
        )
        return (time.perf_counter() - start) * 1e3 / count, out[0, len(ids) :].tolist(), count

    return ours, theirs


def round_arms(target: specjax.Target, model: Any, count: int) -> tuple[Arm, Arm]:
    """Per round, by the clock of each side behind its prefill."""
    ids = target.tokenizer(PROMPT).input_ids
    prompt = torch.tensor([ids])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "drafter")
        write_drafter(directory, target)
        drafter = specjax.load_drafter(directory, target)
        cls = dflash.model.DFlashDraftModel
        draft_model = cls.from_pretrained(directory, dtype=torch.float32).eval()

    def ours() -> tuple[float, list[int], int]:
        out = specjax.generate(target, ids, drafter=drafter, max_new_tokens=count, eos_token_id=())
        rounds = len(out.stats.emitted)
        return out.seconds * 1e3 / rounds, out.tokens, rounds

    def theirs() -> tuple[float, list[int], int]:
        # Its clock waits for a CUDA device; on a CPU there is nothing to wait for.
        with mock.patch.object(dflash.model, "_cuda_time", time.perf_counter):
            out = dflash.model.dflash_generate(
                draft_model, model, prompt, count, None, return_stats=True
            )
        rounds = len(out.acceptance_lengths)
        seconds = out.time_per_output_token * out.num_output_tokens
        return seconds * 1e3 / rounds, out.output_ids[0, len(ids) :].tolist(), rounds

    return ours, theirs


def write_drafter(directory: Path, target: specjax.Target) -> None:
    """A drafter of random layers in the target's shapes."""
    shapes = json.loads((target.directory / "config.json").read_text(encoding="utf-8"))
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": shapes["hidden_size"] // shapes["num_attention_heads"],
        "num_hidden_layers": LAYERS,
        "num_target_layers": shapes["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    }
    config = drafter_hf.config_from_hf(shapes | own)
    weights = params.init(backbone.table(config), jax.random.key(0))
    made = specjax.Drafter("random", directory, config, weights)
    specjax.save_drafter(directory, made, dtype="float32")


def compare(part: str, arms: tuple[Arm, Arm], peer: str, pairs: int) -> None:
    """Times the arms in turn; prints a table and a JSON line."""
    ours, theirs = arms
    (_, mine, units), (_, others, other_units) = ours(), theirs()  # also the warm-up
    if mine != others:
        raise SystemExit(f"{part}: the two decoders disagree: nothing is timed")
    times = np.array([(ours()[0], theirs()[0]) for _ in range(pairs)])
    ratios = times[:, 1] / times[:, 0]
    medians = [statistics.median(column) for column in times.T]
    print(f"{part:14}{'ms':>10}")
    for name, median in zip(("specjax", peer), medians, strict=True):
        print(f"{name:14}{median:10.1f}")
    row = {
        "part": part,
        "pairs": pairs,
        "tokens": len(mine),
        "units": [units, other_units],
        "load_average": round(os.getloadavg()[0], 1),  # torch suffers far more from a busy core
        "threads": torch.get_num_threads(),
        "specjax_ms": round(medians[0], 2),
        f"{peer}_ms": round(medians[1], 2),
        "ratio": [round(value, 3) for value in interval(ratios)],
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("plain", "round", "all"), default="all")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()

    warnings.filterwarnings("ignore", "acceptance length")  # what random weights are meant to do
    target = specjax.load_target("smollm2-135m", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()
    if args.part in ("plain", "all"):
        arms = plain_arms(target, model, args.tokens)
        compare("plain", arms, "transformers", args.pairs)
    if args.part in ("round", "all"):
        arms = round_arms(target, model, args.tokens)
        compare("round", arms, "dflash", args.pairs)


if __name__ == "__main__":
    main()
