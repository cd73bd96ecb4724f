"""Plain decoding of SmolLM2-135M: ours against transformers' greedy generate (torch), interleaved.

Run by `make bench-peers`, in the environment that has torch too. One process, one thread pool per
framework on the same cores, the two arms in turn; medians over the repeats and the ratio of each
pair. Both decode the same number of tokens from the same prompt ids in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import specjax

PROMPT = "Gravity is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()

    target = specjax.load_target("smollm2-135m", dtype="float32")
    ids = target.tokenizer(PROMPT).input_ids
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])

    def ours() -> tuple[float, list[int]]:
        start = time.perf_counter()
        out = specjax.generate(target, ids, max_new_tokens=args.tokens)
        return time.perf_counter() - start, out.tokens

    @torch.inference_mode()
    def theirs() -> tuple[float, list[int]]:
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.tokens,
            min_new_tokens=args.tokens,
            do_sample=False,
        )
        return time.perf_counter() - start, out[0, len(ids) :].tolist()

    if ours()[1] != theirs()[1]:  # also the warm-up
        raise SystemExit("the two decoders disagree: nothing is timed")
    pairs = [(ours()[0], theirs()[0]) for _ in range(args.pairs)]
    mine, other = (
        statistics.median(times) / args.tokens * 1e3 for times in zip(*pairs, strict=True)
    )
    ratios = np.array([b / a for a, b in pairs])
    print(f"{'':14}{'ms a token':>12}{'tokens/s':>10}")
    print(f"{'specjax':14}{mine:12.1f}{1e3 / mine:10.1f}")
    print(f"{'transformers':14}{other:12.1f}{1e3 / other:10.1f}")
    row = {
        "tokens": args.tokens,
        "pairs": args.pairs,
        "threads": torch.get_num_threads(),
        "specjax_ms": round(mine, 2),
        "transformers_ms": round(other, 2),
        "ratio_median": round(float(np.median(ratios)), 3),
        "ratio_range": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
