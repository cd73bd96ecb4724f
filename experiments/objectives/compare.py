"""Objectives side by side: equal base, data, steps and seeds, then real decoding under every rule.

    python experiments/objectives/compare.py screen           # every arm, one seed, 400 steps
    python experiments/objectives/compare.py final            # the best five and D-PACE, 3 seeds
    python experiments/objectives/compare.py smollm2 --arms dpace ...   # SmolLM2-135M, 200 steps
    python experiments/objectives/compare.py screen --table   # nothing is run: table and figure

Run it from the repository root. `screen` lets stories260k tell openings and go on with each of
them, once greedily and once at temperature 1, trains the base with cross-entropy on both kinds of
text, and then every arm from that base on each kind. `final` does so longer, on the sampled texts
unless `--data` says otherwise, for the five arms with the best mean over the rules in `screen`
unless `--arms` names them, and for D-PACE. `smollm2` starts from the drafter in
`experiments/drafters`, as `configs/reuse-smollm2.json` says, and learns from answers to 320 GSM8K
questions. What is trained is in `runs/objectives/` or `runs/objectives-smollm2/`; what decoding
gave is in `screen.jsonl`, `final.jsonl` and `smollm2.jsonl` beside this file, a line per arm, seed,
text and rule. A command that was interrupted goes on: what is trained or in the file is not done
again. Two cores take about 30 minutes for `screen`, and 25 for `final` where two commands share its
arms. In a minute or two

    python experiments/objectives/compare.py screen --steps 5 --base-steps 5 --limit 4 \
        --openings 128 --arms ce bv --runs runs/try --out runs/try

proves the command. An arm is decoded at T = 0 under the rule match, and at T = 1 under match with
independent and with coupled drafts, the token rule and block verification; columns with a star are
closed forms of the same over one and the same text of the target. The gain over the arm `--against`
is the ratio of tokens a round, less one; its 95% interval is from a bootstrap over prompts, which
are the same in both arms.
"""

import argparse
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import table

import specjax
from specjax import evaluation
from specjax.training import config as configs
from specjax.training import data, expected
from specjax.training.objectives import Objective

HERE = Path(__file__).parent
PROMPTS = "experiments/prompts/stories-test.jsonl"
SMOLLM2 = "experiments/configs/reuse-smollm2.json"
OPENINGS_SEED = 77

FLAT = {"gamma": 1e9}  # exponential weights that are all alike
# The losses of every arm, and what else its objective has; slots weigh exp(-(k - 1) / 4).
ARMS = {
    "ce": ({"ce": 1.0}, {}),
    "ce_flat": ({"ce": 1.0}, FLAT),
    "dpace": ({"ce": 1.0}, {"weights": "dpace"}),
    "kl": ({"kl": 1.0}, {}),
    "tv": ({"ce": 0.1, "tv": 0.9}, {}),
    "lk": ({"lk": 1.0}, {}),
    "lk_hybrid": ({"lk_hybrid": 1.0}, {}),
    "weights": ({"ce": 1.0}, {"gamma": 10.0}),
    "focal": ({"ce": 1.0, "focal": 0.3}, FLAT),
    "chain": ({"ce": 1.0, "chain": 40.0}, FLAT),
    "interventions": ({"ce": 1.0, "focal": 0.3, "chain": 40.0}, {"gamma": 10.0}),
    "vat_weights": ({"ce": 1.0}, {"weights": "vat"}),
    "vat_losses": ({"ce": 1.0, "kl": 1.0}, {}),
    "vat_head": ({"ce": 1.0}, {"verification": 1.0}),
    "vat": ({"ce": 1.0, "kl": 1.0}, {"weights": "vat", "verification": 1.0}),
    "token": ({"ce": 0.1, "token": 0.9}, {}),
    "bv_linear": ({"ce": 0.1, "bv_linear": 0.9}, {}),
    "bv": ({"bv": 1.0}, {}),
}
# verify= and temperature= of every way of decoding
RULES = {
    "greedy": ("match", 0.0),
    "match": ("match-independent", 1.0),
    "coupled": ("match", 1.0),
    "token": ("token", 1.0),
    "block": ("block", 1.0),
}
# What the closed forms call the rules that sample; they are told from decoding by a star.
FORMS = {f"{rule}*": verify for rule, (verify, temperature) in RULES.items() if temperature}
TEXTS = {"greedy": 0.0, "sampled": 1.0}  # their temperatures
STAGES = {
    "screen": {"steps": 400, "seeds": 1, "limit": 60, "repeats": 1, "data": list(TEXTS)},
    "final": {"steps": 1200, "seeds": 3, "limit": 100, "repeats": 2, "data": ["sampled"]},
    "smollm2": {
        "steps": 200,
        "seeds": 1,
        "limit": 40,
        "repeats": 1,
        "data": ["sampled"],
        "prompts": "experiments/prompts/gsm8k-test.jsonl",
        "runs": Path("runs/objectives-smollm2"),
    },
}


# ------------------------------------------------------------------------------------- training
def openings(args, target):
    """The file of openings of two sentences that the target tells, none of them a test prompt."""
    file = args.runs / f"openings-{args.openings}.jsonl"
    if not file.exists():
        known = {turns[0] for turns in evaluation.read_prompts(PROMPTS)}
        settings = {"temperature": 1.0, "seed": OPENINGS_SEED, "batch_size": 128}
        told = specjax.generate(target, [""] * (2 * args.openings), max_new_tokens=96, **settings)
        found = [re.match(r"\s*((?:[^.!?]*[.!?]\"?){2})\s", text) for text in told.text]
        kept = list(dict.fromkeys(m[1] for m in found if m and m[1] not in known))[: args.openings]
        args.runs.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"prompt": opening}) + "\n" for opening in kept]
        file.write_text("".join(lines), encoding="utf-8")
    return file


def trained(args, name, texts, **settings):
    """The folder of a drafter, which is trained where it is missing."""
    drafter = args.runs / name / "drafter"
    if (drafter / "model.safetensors").exists():
        return drafter
    sources = [
        {
            "name": text,
            "prompts": str(args.runs / f"openings-{args.openings}.jsonl"),
            "answers": str(args.runs / f"{text}-{args.openings}"),
            "temperature": TEXTS[text],
            "max_new_tokens": 192,
            "batch_size": 128,
        }
        for text in texts
    ]
    common = {"row_length": 256, "anchors": 32, "checkpoint_every": 10**6, "keep": 1}
    config = {"name": name, "target": "stories260k", "sources": sources, **common, **settings}
    specjax.fit(configs.from_json(config), runs=args.runs, progress=False)
    return drafter


def base_of(args):
    """The drafter that every arm starts from."""
    if args.stage == "smollm2":
        return configs.read(SMOLLM2).init_from
    shape = {"layers": 2, "taps": [0, 1, 2, 3], "mask_token_id": 0, "block_size": 8}
    shape |= {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 256}
    return trained(
        args,
        f"base-{args.base_steps}",
        list(TEXTS),
        drafter=shape,
        objective={"losses": {"ce": 1.0}},
        optimizer={"learning_rate": 1e-2},
        steps=args.base_steps,
        rows=8,
    )


def arm_of(args, arm, text, seed):
    """The drafter of one arm."""
    if arm == "base":
        return base_of(args)
    losses, others = ARMS[arm]
    name = f"{arm}-{text}-{args.steps}-{seed}"
    if args.stage == "smollm2":
        objective = Objective(tuple(losses.items()), **others)
        source = configs.Source(
            "gsm8k-more",
            prompts="experiments/prompts/gsm8k-train-more.jsonl",
            limit=320,
            answers=str(args.runs / text),
            max_new_tokens=192,
            temperature=TEXTS[text],
        )
        run = replace(configs.read(SMOLLM2), name=name, steps=args.steps, seed=seed)
        specjax.fit(replace(run, sources=(source,), objective=objective), runs=args.runs)
        return args.runs / name / "drafter"
    return trained(
        args,
        name,
        [text],
        init_from=str(base_of(args)),
        objective={"losses": losses, **others},
        optimizer={"learning_rate": 3e-3},
        steps=args.steps,
        rows=4,
        head_chunk=128,
        seed=seed,
    )


# ------------------------------------------------------------------------------------- decoding
def decoded(args, target, drafter, prompts, rule):
    """Tokens and rounds of every prompt under one rule, all repeats together."""
    verify, temperature = RULES[rule]
    repeats = args.repeats if temperature else 1
    out = specjax.generate(
        target,
        prompts * repeats,  # every copy draws its own noise
        drafter=drafter,
        verify=verify,
        temperature=temperature,
        max_new_tokens=128,
        batch_size=len(prompts),
    )
    counts = [[0, 0] for _ in prompts]
    for i, one in enumerate(out.stats):
        counts[i % len(prompts)][0] += sum(one.emitted)
        counts[i % len(prompts)][1] += one.rounds
    return counts


def told(args, target, prompts):
    """What the target answers to the test prompts at T = 1: the text of the closed forms."""
    folder = args.runs / f"held-{args.limit}"
    turns = [[prompt] for prompt in prompts]  # messages too are one turn
    settings = {"temperature": 1.0, "batch_size": len(prompts), "progress": False}
    return data.answer(target, turns, folder, max_new_tokens=128, **settings)


def measure(args, target, prompts, held, arm, text, seed, missing):
    """Trains one arm and yields a line for each missing rule."""
    forms = None
    begin = time.perf_counter()
    folder = arm_of(args, arm, text, seed)
    seconds = {"training_s": round(time.perf_counter() - begin, 1)}
    drafter = specjax.load_drafter(str(folder), target)
    for rule in missing:
        begin = time.perf_counter()
        if rule not in FORMS:
            counts = decoded(args, target, drafter, prompts, rule)
        else:
            forms = forms or expected.rounds(target, drafter.config, drafter.params, held)
            tokens = np.diff(held.starts) - held.prompt_lengths - 1
            counts = np.column_stack([tokens, forms[FORMS[rule]].round(3)]).tolist()
        seconds["decoding_s"] = round(time.perf_counter() - begin, 1)
        objective = (
            {} if arm == "base" else dict(zip(("losses", "settings"), ARMS[arm], strict=True))
        )
        yield {
            **key(args, arm, text, seed, rule),
            **objective,
            "tau": round(sum(n for n, _ in counts) / sum(n for _, n in counts), 4),
            **seconds,
            "prompts": counts,  # of each [tokens, rounds]
        }


def key(args, arm, text, seed, rule):
    """What one line is about; lines with the same settings are comparable."""
    return {"arm": arm, "data": text, "seed": seed, "rule": rule, **settings_of(args)}


def settings_of(args):
    names = ("steps", "base_steps", "openings", "repeats", "limit")
    return {name: getattr(args, name) for name in names}


def run(args):
    """Everything of a stage that is not in its file yet."""
    target = specjax.load_target("smollm2-135m" if args.stage == "smollm2" else "stories260k")
    if args.stage != "smollm2":
        openings(args, target)
    prompts = [turns[0] for turns in evaluation.read_prompts(args.prompts, args.limit)]
    if target.tokenizer.chat_template:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    held = told(args, target, prompts)
    wanted = [("base", "both", 0)]
    wanted += [(a, t, s) for s in range(args.seeds) for t in args.data for a in args.arms]
    there = [
        {name: row[name] for name in key(args, "", "", 0, "")} for row in table.read(args.file)
    ]
    for number, one in enumerate(wanted, 1):
        missing = [rule for rule in [*args.rules, *FORMS] if key(args, *one, rule) not in there]
        if not missing:
            continue
        print(f"{number}/{len(wanted)}", *one, end=" ", flush=True)
        try:
            for line in measure(args, target, prompts, held, *one, missing):
                with args.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{line['rule']} {line['tau']:.3f}", end=" ", flush=True)
        except FloatingPointError as error:  # the other arms go on
            print(f"diverged: {error}", end="")
        print(flush=True)


def best_arms(args, count=5):
    """The arms with the best mean over the rules on sampled text in the screen, and D-PACE."""
    screen = parsed(["screen", "--base-steps", str(args.base_steps)])
    rows = table.chosen(table.read(args.out / "screen.jsonl"), settings_of(screen))
    ranked = table.ranked([row for row in rows if row["rule"] in RULES], "sampled")
    best = [arm for arm in ranked if arm != "dpace"][:count]
    if not best:
        raise SystemExit("there is no whole screen to choose from: run it, or give --arms")
    return ["dpace", *best]


# ------------------------------------------------------------------------------------- the call
def parsed(given=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--against", default="dpace", help="the arm that gains are over")
    parser.add_argument("--arms", nargs="+", choices=ARMS)
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES), help="to decode by"
    )
    parser.add_argument("--data", nargs="+", choices=TEXTS, help="texts that arms are trained on")
    parser.add_argument("--steps", type=int, help="of an arm")
    parser.add_argument("--seeds", type=int, help="runs of an arm, with seeds from 0 on")
    parser.add_argument("--repeats", type=int, help="answers per prompt at T = 1")
    parser.add_argument("--base-steps", type=int, default=1200)
    parser.add_argument("--openings", type=int, default=1536, help="texts of each kind")
    parser.add_argument("--limit", type=int, help="the first so many test prompts")
    parser.add_argument("--prompts", help="of the test")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path, default=HERE, help="of JSON lines and figures")
    args = parser.parse_args(given)
    common = {"prompts": PROMPTS, "runs": Path("runs/objectives")}
    for name, value in (common | STAGES[args.stage]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.file = args.out / f"{args.stage}.jsonl"
    return args


def main():
    args = parsed()
    if args.arms is None:
        args.arms = list(ARMS) if args.stage == "screen" else best_arms(args)
    if not args.table:
        run(args)
    rows = table.chosen(table.read(args.file), settings_of(args))
    forms = [row for row in rows if row["rule"] in FORMS]
    rows = [row for row in rows if row["rule"] in args.rules]
    print(table.text(rows, args.against), table.text(forms, args.against), sep="\n")
    table.figure(rows, args.against, args.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
