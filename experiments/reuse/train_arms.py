"""The comparison at equal training: what reuse gains where the control had as much.

    python experiments/reuse/train_arms.py stories260k           # everything
    python experiments/reuse/train_arms.py stories260k --table   # table and figure of what is known
    python experiments/reuse/train_arms.py smollm2               # the testbed with room
    python experiments/reuse/train_arms.py smollm2 --set block_size=16 objective.gamma=7 \
        --runs runs/reuse-smollm2-block16 --out experiments/reuse/arms-smollm2-block16.jsonl
    python experiments/reuse/train_arms.py smollm2 --prompts experiments/prompts/copying.jsonl \
        --limit 60 --out experiments/reuse/arms-smollm2-copying.jsonl   # the same on other prompts

From one base drafter, with each seed, it trains a drafter an arm: same texts, same steps, same
number of trained blocks. A control trains plain ones; Carryover and ReTrace spend half of them
behind a rejection, DFlow three quarters, in two rounds. The base of stories260k is trained first
(`reuse-base.json`: the shipped drafter leaves next to no room), that of SmolLM2 is the one in
`experiments/drafters`. Every drafter is measured with its reuse and with it switched off, base and
control with ReAnchor too (its shifted blocks, the verifier's choices, both), and the ceiling of
base and control.

What is in the file of lines is not done again; runs that were interrupted go on. `--set` changes
the config of every arm, as for `specjax train`: then give another `--runs` and `--out`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import attention
import ceiling
import compare
import numpy as np
import timings
from compare import gain, shown, tau

import specjax
from specjax import evaluation
from specjax.training import config as configs
from specjax.training.branches import Branches
from specjax.training.config import Reusing

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
# By testbed: the run of the base, the control's, and what command-line options are by default.
BEDS = {
    "stories260k": {
        "base": CONFIGS / "reuse-base.json",
        "control": CONFIGS / "reuse-control.json",
        "prompts": "experiments/prompts/stories-test.jsonl",
        "seeds": [0, 1, 2],
        "turns": 30,
        "runs": Path("runs"),
        "out": HERE / "arms.jsonl",
    },
    "smollm2": {
        "base": None,
        "control": CONFIGS / "reuse-smollm2.json",
        "prompts": "experiments/prompts/gsm8k-test.jsonl",
        "seeds": [0],
        "limit": 50,
        "turns": 0,  # they are in timings.jsonl
        "runs": Path("runs/reuse-smollm2"),
        "out": HERE / "arms-smollm2.jsonl",
    },
}
# Which share of the control's blocks an arm trains plainly; the rest are drafts behind a rejection.
TRAINED = {
    "control": (1, None, None),
    "carryover": (1 / 2, Reusing("carryover"), Branches()),
    "dflow": (1 / 4, Reusing("dflow"), Branches(rounds=2)),
    "retrace": (1 / 2, Reusing("retrace"), Branches(ramp=50)),
}
# What needs no training, as `compare` names it.
UNTRAINED = {"reanchor": "shifted blocks", "choices": "stale choices", "both": "both"}
GROUPS = {"of all rounds": "rounds", "behind a rejection": "after_rejection"}


# ------------------------------------------------------------------------------------ what is run
class Lines:
    """JSON lines by what they are about: (kind, arm, seed, reuse, temperature)."""

    KEYS = ("kind", "arm", "seed", "reuse", "temperature")

    def __init__(self, file):
        self.file, self.known = file, {}
        file.parent.mkdir(parents=True, exist_ok=True)
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            self._take(json.loads(text))

    def _take(self, line):
        self.known[tuple(line.get(key) for key in self.KEYS)] = line

    def get(self, *key):
        return self.known.get(key)

    def add(self, line):
        self._take(line)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print({key: value for key, value in line.items() if key != "counts"}, flush=True)


class Prompts:
    """The held-out prompts, and what the target alone says to them, made when first asked for."""

    def __init__(self, target, file, settings):
        self.target, self.settings, self.plain = target, settings, {}
        self.ids = ceiling.first_turns(target, file)

    def at(self, temperature):
        asked = self.settings | {"temperature": temperature}
        if temperature not in self.plain:
            self.plain[temperature] = specjax.generate(self.target, self.ids, **asked)
        return self.ids, self.plain[temperature], asked


def config_of(arm, seed, args):
    """The run of an arm; None where the testbed has its base from elsewhere."""
    if arm == "base":
        return configs.read(args.bed["base"]) if args.bed["base"] else None
    control = configs.read(args.bed["control"], args.set)
    if args.bed["base"]:
        control = replace(control, init_from=str(args.runs / "reuse-base" / "drafter"))
    share, reuse, branches = TRAINED[arm]
    plain = round(share * control.anchors)
    if branches:
        branches = replace(branches, anchors=(control.anchors - plain) // branches.rounds)
    name = f"reuse-{arm}-{seed}"
    return replace(control, name=name, seed=seed, anchors=plain, reuse=reuse, branches=branches)


def drafter_of(config, target, args):
    """A drafter, which is trained where it is missing."""
    if config:
        specjax.fit(config, runs=args.runs)
        return specjax.load_drafter(args.runs / config.name / "drafter", target)
    control = config_of("control", 0, args)
    drafter = specjax.load_drafter(control.init_from, target)
    size = control.block_size or drafter.config.block_size
    return replace(drafter, config=replace(drafter.config, block_size=size))


def do(arm, seed, target, prompts, lines, args):
    """Trains one drafter and measures it, as far as that has not been done."""
    config = config_of(arm, seed, args)
    uses = ["off", arm] if config and config.reuse else ["off", *UNTRAINED]
    kinds = [("arm", use) for use in uses]
    kinds += [("ceiling", None)] if arm in ("base", "control") else []
    kinds += [("attention", None)] if arm == "carryover" else []
    wanted = [("training", arm, seed, None, None)] if config else []
    wanted += [
        (kind, arm, seed, reuse, temperature)
        for temperature in args.temperatures
        for kind, reuse in kinds
    ]
    missing = [key for key in wanted if not lines.get(*key)]
    if not missing:
        return
    drafter = drafter_of(config, target, args)
    for key in missing:
        line = dict(zip(Lines.KEYS, key, strict=True))
        if line["kind"] == "training":
            lines.add(line | training(config, drafter, args.runs / config.name))
            continue
        ids, plain, asked = prompts.at(line["temperature"])
        if line["kind"] == "arm":
            given = drafter, line["reuse"], ids, plain, asked
            lines.add(line | compare.measured(target, *given, timed=args.turns > 0))
            continue
        how = {"ceiling": ceiling, "attention": attention}[line["kind"]]
        alone = {name: asked[name] for name in ("temperature", "max_new_tokens", "verify")}
        lines.add(line | how.measure(target, drafter, ids, alone, asked["batch_size"]))


def training(config, drafter, folder):
    """What a run trained on, and how long a step took."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    branches, tokens = config.branches, config.rows * config.row_length
    trained = branches.anchors * branches.rounds if branches else 0
    verified = branches.verified * drafter.config.num_drafts if branches else 0
    return {
        "steps": config.steps,
        "blocks_per_step": config.rows * (config.anchors + trained),
        "labels_per_step": round(float(np.mean([step["labels"] for step in steps])), 1),
        "target_rows_per_step": tokens + config.rows * verified,
        "seconds_per_step": round(float(np.median([tokens / s["tokens_per_s"] for s in steps])), 4),
    }


# --------------------------------------------------------------------------------- what is shown
def pairs(lines, args, temperature):
    """(name, base, arm) of every comparison, each side the lines of all seeds."""

    def of(arm, reuse):
        seeds = [0] if arm == "base" else args.seeds
        found = [lines.get("arm", arm, seed, reuse, temperature) for seed in seeds]
        return found if all(found) else None

    wanted = [
        (f"base with {name}, against base", ("base", "off"), ("base", use))
        for use, name in UNTRAINED.items()
    ]
    wanted += [("control, against base", ("base", "off"), ("control", "off"))]
    wanted += [
        (f"control with {name}, against control", ("control", "off"), ("control", use))
        for use, name in UNTRAINED.items()
    ]
    for arm in list(TRAINED)[1:]:
        wanted += [
            (f"{arm}, against control", ("control", "off"), (arm, arm)),
            (f"{arm}, against itself switched off", (arm, "off"), (arm, arm)),
            (f"{arm} switched off, against control", ("control", "off"), (arm, "off")),
        ]
    for name, base, arm in wanted:
        one, two = of(*base), of(*arm)
        if one and two:
            times = len(two) // len(one)  # there is one base for all seeds
            yield name, one * times, two


def room(lines, base, arm, temperature):
    """What the ceiling of the drafters of `base` is above them, as a gain; None where `arm` does
    not reuse anything."""
    found = [lines.get("ceiling", line["arm"], line["seed"], None, temperature) for line in base]
    if arm[0]["reuse"] == "off" or not all(found):
        return None
    return sum(f["tau_ceiling"] for f in found) / sum(f["tau"] for f in found) - 1


def by_seed(base, arm, group="rounds"):
    """The gain of every seed by itself."""
    return [gain([one], [two], group)[0] for one, two in zip(base, arm, strict=True)]


def table(lines, args):
    """Every comparison, for people."""
    rows = []
    for temperature in args.temperatures:
        rows.append(
            f"\nT = {temperature:g}{'':<44} tau  behind a rejection / else   "
            f"{'gain in tokens a round':<24} {'behind a rejection':<24} of the ceiling  identical"
        )
        for name, base, arm in pairs(lines, args, temperature):
            above, gained = room(lines, base, arm, temperature), gain(base, arm)
            share = f"{gained[0] / above:.0%}" if above else "-"
            same, answers = (sum(line[key] for line in arm) for key in ("identical", "answers"))
            rows.append(
                f"{name:<46} {tau(arm):>7.3f} {tau(arm, 'after_rejection'):>12.3f} / "
                f"{tau(arm, 'after_acceptance'):.3f}         {shown(gained):<24} "
                f"{shown(gain(base, arm, 'after_rejection')):<24} {share:>14}  {same}/{answers}"
            )
            if len(arm) > 1:
                each = ", ".join(f"{x:+.1%}" for x in by_seed(base, arm))
                rows.append(f"{'':<46} by seed: {each}")
    timed = lines.get("timings", None, None, None, None)
    if timed:
        rows.append("\nmilliseconds at batch 1, against DFlash\n" + timings.table(timed))
    rows += [
        f"\n{line['arm']} {line['seed']}, T = {line['temperature']:g}: attention mass on carried "
        f"rows {line['mass']:.1%}; by layer {line['by_layer']}; by number of rows {line['by_rows']}"
        for key, line in lines.known.items()
        if key[0] == "attention"
    ]
    rows.append("\nrows a round; tokens a second of the batch")
    rows += [
        f"{line['arm']:<10} {line['reuse']:<10} T = {line['temperature']:<4g} {line['rows']} "
        f"{line['tokens_per_s'] or '-'}"
        for key, line in lines.known.items()
        if key[0] == "arm" and key[2] == min(args.seeds)
    ]
    rows.append("\ntraining, each of its seeds alike")
    rows += [
        f"{line['arm']:<10} {line['steps']} steps of {line['blocks_per_step']} blocks, "
        f"{line['labels_per_step']} labels and {line['target_rows_per_step']} target rows, "
        f"{1e3 * line['seconds_per_step']:.0f} ms"
        for key, line in lines.known.items()
        if key[0] == "training" and key[2] == min(args.seeds)
    ]
    return "\n".join(rows)


def figure(lines, args, file):
    """Gains with their intervals, all rounds and those behind a rejection; dots are seeds."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 5), layout="constrained")
    axes = drawn.subplots(1, len(args.temperatures), sharey=True, squeeze=False)[0]
    for axis, temperature in zip(axes, args.temperatures, strict=True):
        found = list(pairs(lines, args, temperature))
        for number, (label, group) in enumerate(GROUPS.items()):
            at = np.arange(len(found)) + 0.3 * number
            gains = np.array([gain(base, arm, group) for _, base, arm in found]).T * 100
            error = np.abs(gains[1:] - gains[0])
            axis.errorbar(gains[0], at, xerr=error, fmt="o", color=f"C{number}", label=label)
            for y, (_, base, arm) in zip(at, found, strict=True):
                each = [100 * x for x in by_seed(base, arm, group)]
                axis.plot(each, [y] * len(each), ".", color=f"C{number}", alpha=0.4)
        for y, (_, base, arm) in enumerate(found):
            above = room(lines, base, arm, temperature)
            if above:
                axis.plot(100 * above, y, "|", color="black", markersize=12)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set(title=f"T = {temperature:g}", xlabel="gain in acceptance length, %")
        axis.set_yticks(range(len(found)), [name for name, _, _ in found])
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=8)
    drawn.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bed", choices=BEDS, help="the testbed")
    parser.add_argument("--table", action="store_true", help="only show what has been measured")
    parser.add_argument("--arms", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--turns", type=int, help="of the timings; 0: none")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path, help="the file of lines")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    args.bed = BEDS[args.bed]
    for name, value in args.bed.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    lines = Lines(args.out)
    if not args.table:
        target = specjax.load_target(config_of("control", 0, args).target)
        settings = {"max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size}
        settings["verify"] = "match"  # one text for all arms, at any temperature
        prompts = Prompts(target, evaluation.read_prompts(args.prompts, args.limit), settings)
        do("base", 0, target, prompts, lines, args)
        for seed in args.seeds:
            for arm in args.arms:
                do(arm, seed, target, prompts, lines, args)
        if args.turns and not lines.get("timings", None, None, None, None):
            base = drafter_of(config_of("base", 0, args), target, args)
            lines.add({"kind": "timings"} | timings.measure(target, base, args.turns))
    figure(lines, args, args.out.with_suffix(".png"))
    print(table(lines, args))


if __name__ == "__main__":
    main()
