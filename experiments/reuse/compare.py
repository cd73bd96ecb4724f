"""Drafters side by side: rounds for the same text, paired by prompt.

    python experiments/reuse/compare.py --target stories260k \
        --prompts experiments/prompts/stories-test.jsonl \
        control=runs/reuse-control/drafter carryover=runs/reuse-carryover/drafter \
        off=runs/reuse-carryover/drafter@off reanchor=runs/reuse-control/drafter@reanchor

An arm is NAME=DRAFTER or NAME=DRAFTER@REUSE (as `generate(reuse=)`, or "choices" or "both" for
ReAnchor that trusts the verifier's choices, without and with its shifted blocks); the first one is
what the others are compared with. At temperature 0, and under the rule *match* at any temperature,
all arms emit the same text, so that the rounds they need for it are an exact paired quantity.
Intervals are 95%, from a bootstrap over prompts. One JSON line per arm and temperature goes to
`compare.jsonl`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from ceiling import first_turns

import specjax
from specjax import evaluation
from specjax.decoding.generate import compiles
from specjax.decoding.request import reuse_method
from specjax.models.reuse import Carryover, ReAnchor

HERE = Path(__file__).parent
RESAMPLES = 10_000
TRUSTING = {"choices": ReAnchor((), trust=0.25), "both": ReAnchor(trust=0.25)}
GROUPS = ("rounds", "after_rejection", "after_acceptance")


# ------------------------------------------------------------------------------- measuring an arm
def measured(target, drafter, reuse, prompts, plain, settings, timed=True):
    """One arm: rounds and tokens of every prompt, and how many rows a round runs.

    Tokens a second, where wanted, are those of a pass in which nothing was compiled.
    """
    method = TRUSTING.get(reuse, reuse)
    while True:
        before = compiles()
        answers = specjax.generate(target, prompts, drafter=drafter, reuse=method, **settings)
        if compiles() == before or not timed:
            break
    rest = sum(one.new_tokens - 1 for one in answers.stats)
    return {
        "reuse": reuse or answers.settings["reuse"] or "off",
        "temperature": settings["temperature"],
        "answers": len(prompts),
        "identical": sum(a == b for a, b in zip(answers.tokens, plain.tokens, strict=True)),
        "tokens_per_s": round(rest / answers.seconds, 1) if timed else None,
        "rows": rows_of_a_round(drafter, method),
        "counts": counts(answers),
    }


def counts(answers):
    """[rounds, tokens] of every prompt: of all its rounds, of those behind a round that rejected a
    draft, and of those behind one that did not."""
    found = {group: [] for group in GROUPS}
    for one in answers.stats:
        rejected = [a < d for a, d in zip(one.accepted, one.drafted, strict=True)]
        behind = [False, *rejected][: len(rejected)]
        pairs = list(zip(one.emitted, behind, strict=True))
        for group, emitted in {
            "rounds": one.emitted,
            "after_rejection": [n for n, rejection in pairs if rejection],
            "after_acceptance": [n for n, rejection in pairs if not rejection],
        }.items():
            found[group].append([len(emitted), sum(emitted)])
    return found


def rows_of_a_round(drafter, reuse):
    """Rows that a round runs: of draft blocks, of carried states, and of the target."""
    config, method = drafter.config, reuse_method(drafter, reuse)
    blocks = 1 + len(method.shifts) if isinstance(method, ReAnchor) else 1
    carries = isinstance(method, Carryover) or blocks > 1
    carried = blocks * config.num_drafts if carries else 0
    return {
        "draft": blocks * config.block_size,
        "carried": carried,
        "target": config.num_drafts + 1,
    }


# ------------------------------------------------------------------------------------- comparing
def totals(lines, group):
    """Rounds and tokens [2, prompts] of some lines of the same prompts, summed."""
    return np.sum([line["counts"][group] for line in lines], axis=0, dtype=float).T


def tau(lines, group="rounds"):
    """Tokens a round; NaN where there was none."""
    rounds, tokens = totals(lines, group).sum(axis=1)
    return tokens / rounds if rounds else float("nan")


def gain(base, arm, group="rounds", seed=0):
    """By how much an arm's acceptance length exceeds the base's: (share, low, high).

    The interval is over prompts; lines of several seeds are resampled together.
    """
    both = np.stack([totals(lines, group) for lines in (base, arm)])  # [2, 2, prompts]
    drawn = np.random.default_rng(seed).integers(0, both.shape[2], (RESAMPLES, both.shape[2]))
    times = np.stack([np.bincount(row, minlength=both.shape[2]) for row in drawn])
    sums = np.einsum("agp,rp->rag", both, times)
    lengths = sums[:, :, 1] / np.maximum(sums[:, :, 0], 1)
    low, high = np.quantile(lengths[:, 1] / lengths[:, 0] - 1, [0.025, 0.975])
    return tau(arm, group) / tau(base, group) - 1, low, high


def shown(found):
    """A gain with its interval."""
    return "{:+.1%} [{:+.1%}, {:+.1%}]".format(*found)


def line_of(name, lines, base):
    """One arm, for people."""
    same, answers = (sum(line[key] for line in lines) for key in ("identical", "answers"))
    return (
        f"T = {lines[0]['temperature']:<4g} {name:<20} tau {tau(lines):.3f} (after a rejection "
        f"{tau(lines, 'after_rejection'):.3f}, else {tau(lines, 'after_acceptance'):.3f})  "
        f"{shown(gain(base, lines)):<24}  after a rejection "
        f"{shown(gain(base, lines, 'after_rejection')):<24}  identical {same}/{answers}"
    )


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
    for temperature in args.temperatures:
        settings = {
            "temperature": temperature,
            "verify": "match",
            "max_new_tokens": args.max_new_tokens,
            "batch_size": args.batch_size,
        }
        plain = specjax.generate(target, prompts, **settings)
        base = None
        for arm in args.arms:
            name, spec = arm.split("=", 1)
            path, _, reuse = spec.partition("@")
            drafter = specjax.load_drafter(path, target)
            found = measured(target, drafter, reuse or None, prompts, plain, settings)
            base = base or found
            line = {"arm": name, "drafter": spec, "target": args.target}
            line |= {"prompts": Path(args.prompts).stem, **found}
            with (HERE / "compare.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line_of(name, [found], [base]), flush=True)


if __name__ == "__main__":
    main()
