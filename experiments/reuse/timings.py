"""What each method of reuse costs a round, relative to plain DFlash.

    python experiments/reuse/timings.py --target smollm2-135m \
        --drafter experiments/drafters/smollm2-135m-dflash

Whole rounds and their stages at batch 1, all arms in turn in one process: medians over the turns,
and ratios to DFlash paired by turn, with 95% bootstrap intervals. A method's own weights are as at
the start of training: a round costs the same whatever they hold. Stages run with barriers and keep
their inputs, so they copy caches that a round updates in place: compare them with each other only.
One JSON line goes to `timings.jsonl` beside this file.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
from compare import TRUSTING

import specjax
from specjax.decoding import loop
from specjax.models import params
from specjax.models.reuse import Carryover, DFlow, ReAnchor, ReTrace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import PROMPT, interleaved, interval, rounds_arm

HERE = Path(__file__).parent
METHODS = {
    "dflash": None,
    "carryover": Carryover(),
    "dflow": DFlow(),
    "retrace": ReTrace(),
    "reanchor 1": ReAnchor((1,)),
    "reanchor 1,2,4": ReAnchor((1, 2, 4)),
    "reanchor, choices": TRUSTING["choices"],
}
STAGES = ("draft", "verify", "commit")


def with_method(drafter, method):
    """What `generate` is told to run a method with a drafter that was not trained for it."""
    if method is None or isinstance(method, ReAnchor):
        return {"drafter": drafter, "reuse": method or "off"}
    config = replace(drafter.config, reuse=method)
    own = params.init(method.table(config), jax.random.key(0))
    return {"drafter": replace(drafter, config=config, params=drafter.params | {"reuse": own})}


def stage_arms(target, asked):
    """An arm for each stage of one round behind a rejection; milliseconds."""
    decoder, weights, sampling, stops, state = specjax.started(target, PROMPT, **asked)
    jitted = {name: jax.jit(getattr(loop, name), static_argnums=0) for name in STAGES}
    while not int(state.rejected.count[0]) and not bool(state.done[0]) and decoder.drafter.keeps:
        state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 1)
    proposal, context = jitted["draft"](decoder, weights, sampling, state)
    verdict, verified = jitted["verify"](decoder, weights, sampling, stops, state, proposal)
    inputs = {
        "draft": (decoder, weights, sampling, state),
        "verify": (decoder, weights, sampling, stops, state, proposal),
        "commit": (decoder, stops, state, proposal, context, verdict, verified),
    }

    def arm(name):
        def run():
            begin = time.perf_counter()
            jax.block_until_ready(jitted[name](*inputs[name]))
            return (time.perf_counter() - begin) * 1e3

        return run

    return {name: arm(name) for name in STAGES}


def measure(target, drafter, turns, max_new_tokens=200, methods=METHODS):
    """Rounds and stages of every method: medians, and ratios to the first method."""
    arms = {}
    for name, method in methods.items():
        asked = with_method(drafter, method) | {"max_new_tokens": max_new_tokens}
        arms[name, "round"] = rounds_arm(target, **asked)
        for stage, arm in stage_arms(target, asked | {"eos_token_id": []}).items():
            arms[name, stage] = arm
    times = interleaved(arms, turns)
    first = next(iter(methods))
    found = {name: {} for name in methods}
    for (name, what), values in times.items():
        base = times[first, what]
        found[name][what] = {
            "ms": [round(x, 3) for x in interval(values)],
            "ratio": [round(x, 4) for x in interval(values / base)],
        }
    return {"turns": turns, "methods": found}


def table(found):
    """Medians in milliseconds and what they are of DFlash's."""
    lines = [f"{'':<20}" + "".join(f"{what:<32}" for what in ("round", *STAGES))]
    for name, row in found["methods"].items():
        cells = []
        for what in ("round", *STAGES):
            ms, (ratio, low, high) = row[what]["ms"][0], row[what]["ratio"]
            cells.append(f"{ms:8.2f} {ratio - 1:+7.1%} [{low - 1:+.1%}, {high - 1:+.1%}]")
        lines.append(f"{name:<20}" + "".join(f"{cell:<32}" for cell in cells))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="experiments/drafters/smollm2-135m-dflash")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    methods = {name: METHODS[name] for name in args.methods}
    target = specjax.load_target(args.target)
    drafter = specjax.load_drafter(args.drafter, target)
    found = {"target": args.target, "drafter": args.drafter}
    measured = measure(target, drafter, args.turns, methods=methods)
    found |= {"block": drafter.config.block_size, **measured}
    with (HERE / "timings.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
