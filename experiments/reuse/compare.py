"""Drafters side by side: rounds for the same text, paired by prompt.

    python experiments/reuse/compare.py --target stories260k \
        --prompts experiments/prompts/stories-test.jsonl \
        control=runs/reuse-control/drafter carryover=runs/reuse-carryover/drafter \
        off=runs/reuse-carryover/drafter@off reanchor=runs/reuse-control/drafter@reanchor

An arm is NAME=DRAFTER or NAME=DRAFTER@REUSE (as `generate(reuse=)`); the first one is what the
others are compared with. At temperature 0, and under the rule *match* at any temperature, all arms
emit the same text, so that the rounds they need for it are an exact paired quantity. Intervals are
95%, from a bootstrap over prompts. One JSON line per arm and temperature goes to `compare.jsonl`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from ceiling import first_turns

import specjax
from specjax import evaluation
from specjax.decoding.stats import acceptance_length

HERE = Path(__file__).parent
RESAMPLES = 10_000


def decoded(target, spec, prompts, settings):
    """Answers of one arm."""
    path, _, reuse = spec.partition("@")
    drafter = specjax.load_drafter(path, target)
    return specjax.generate(target, prompts, drafter=drafter, reuse=reuse or None, **settings)


def by_history(answers):
    """Tokens a round behind a round that rejected something, and behind one that did not."""
    groups = {"after_rejection": [], "after_acceptance": []}
    for one in answers.stats:
        for i, emitted in enumerate(one.emitted):
            rejected = i > 0 and one.accepted[i - 1] < one.drafted[i - 1]
            groups["after_rejection" if rejected else "after_acceptance"].append(emitted)
    return {f"tau_{name}": acceptance_length(group) for name, group in groups.items()}


def saved(base, arm, seed=0):
    """Rounds of the base for those of the arm, less one, with its interval over prompts."""
    rounds = np.array([[one.rounds for one in answers.stats] for answers in (base, arm)], float)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, rounds.shape[1], (RESAMPLES, rounds.shape[1]))
    sums = rounds[:, drawn].sum(axis=2)
    low, high = np.quantile(sums[0] / sums[1] - 1, [0.025, 0.975])
    whole = rounds.sum(axis=1)
    return {"gain": whole[0] / whole[1] - 1, "low": low, "high": high}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arms", nargs="+", metavar="NAME=DRAFTER[@REUSE]")
    parser.add_argument("--target", default="stories260k")
    parser.add_argument("--prompts", default="experiments/prompts/stories-test.jsonl")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, default=20)
    args = parser.parse_args()
    target = specjax.load_target(args.target)
    prompts = first_turns(target, evaluation.read_prompts(args.prompts, args.limit))
    arms = dict(arm.split("=", 1) for arm in args.arms)
    found = []
    for temperature in args.temperatures:
        settings = {
            "temperature": temperature,
            "verify": "match",
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
        }
        plain = specjax.generate(target, prompts, **settings)
        base = None
        for name, spec in arms.items():
            answers = decoded(target, spec, prompts, settings)
            base = base or answers
            equal = sum(a == b for a, b in zip(answers.tokens, plain.tokens, strict=True))
            found.append(
                {
                    "arm": name,
                    "drafter": spec,
                    "target": args.target,
                    "prompts": Path(args.prompts).stem,
                    "temperature": temperature,
                    "reuse": answers.settings["reuse"],
                    "answers": len(prompts),
                    "identical": equal,
                    "rounds": sum(one.rounds for one in answers.stats),
                    "tau": acceptance_length([n for one in answers.stats for n in one.emitted]),
                    **by_history(answers),
                    **saved(base, answers),
                }
            )
            print(line(found[-1]), flush=True)
    with (HERE / "compare.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)


def line(row):
    """One arm, for people."""
    behind, fresh = (row[f"tau_after_{x}"] or float("nan") for x in ("rejection", "acceptance"))
    return (
        f"T = {row['temperature']:<4g} {row['arm']:<12} tau {row['tau']:.3f} (after a rejection "
        f"{behind:.3f}, else {fresh:.3f})  rounds {row['gain']:+.1%} [{row['low']:+.1%}, "
        f"{row['high']:+.1%}]  identical {row['identical']}/{row['answers']}"
    )


if __name__ == "__main__":
    main()
