"""The command line: specjax {generate, train, eval, export, info, convert}."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input ends it with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="specjax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    make = commands.add_parser("generate", help="decode a prompt")
    _add_models(make)
    make.add_argument("--prompt", default="Once upon a time")
    make.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    make.add_argument("--max-new-tokens", type=int, default=200)
    make.add_argument("--seed", type=int, default=0)
    make.set_defaults(run=_generate)

    train = commands.add_parser("train", help="train a drafter, or go on with a run")
    train.add_argument("--config", required=True, help="a JSON file, as in experiments/configs")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a value of the config, such as optimizer.learning_rate=1e-3",
    )
    train.add_argument("--runs", default="runs", help="folder of all runs")
    train.add_argument("--dry-run", action="store_true", help="only print memory, bytes and time")
    train.set_defaults(run=_train)

    measure = commands.add_parser("eval", help="measure a drafter: acceptance, speed-up, equality")
    _add_models(measure)
    measure.add_argument("--prompts", required=True, help="JSON lines of prompt, messages or turns")
    measure.add_argument("--limit", type=int, help="use the first so many prompts")
    measure.add_argument("--max-new-tokens", type=int, default=128)
    measure.add_argument("--repeats", type=int, default=1, help="timed passes over all prompts")
    measure.add_argument("--sweep", action="store_true", help="try draft lengths")
    measure.add_argument("--json", help="write the report here")
    measure.set_defaults(run=_eval)

    export = commands.add_parser("export", help="write a drafter in a published layout")
    export.add_argument("drafter", help="packaged name, directory or hub id")
    export.add_argument("directory", help="where to write")
    export.add_argument("--target", default="stories260k", help="the model it drafts for")
    export.add_argument("--layout", default="z-lab", choices=("z-lab", "speculators"))
    export.set_defaults(run=_export)

    info = commands.add_parser("info", help="say what checkpoints are and which fit together")
    info.add_argument("names", nargs="+", metavar="PATH", help="target or drafter, as for generate")
    info.set_defaults(run=_info)

    convert = commands.add_parser("convert", help="turn a GGUF file into a directory")
    convert.add_argument("source", help="a .gguf file, or smollm2-135m for the installed wheel")
    convert.add_argument("directory", nargs="?", help="where to write; not for smollm2-135m")
    convert.set_defaults(run=_convert)

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"specjax: {error}", file=sys.stderr)
        return 2
    return 0


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="stories260k", help="packaged name, directory, .gguf or hub id"
    )
    parser.add_argument("--drafter", help="directory, hub id, or ngram")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    parser.add_argument(
        "--num-draft",
        type=lambda word: word if word == "auto" else int(word),
        help="drafts verified per round, or auto",
    )
    parser.add_argument("--reuse", help="of rejected states: off, reanchor, or as it was trained")
    parser.add_argument(
        "--stop-below",
        type=float,
        default=0.0,
        help="drafts end where the drafter's verification head gives a lower probability",
    )
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument(
        "--verify", default="auto", help="auto, match, match-independent, token or block"
    )


def _models(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """Target, drafter and the settings that `generate` takes."""
    import specjax

    target = specjax.load_target(args.target, dtype=args.dtype)
    settings = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "verify": args.verify,
        "reuse": args.reuse,
        "stop_below": args.stop_below,
    }
    if args.drafter is None:
        if args.num_draft is not None:
            raise ValueError("--num-draft needs a --drafter")
        return target, None, settings
    if args.drafter != "ngram":
        drafter: Any = specjax.load_drafter(args.drafter, target)
        return target, drafter, settings | {"num_draft": args.num_draft}
    if isinstance(args.num_draft, int):
        return target, specjax.NGram(args.num_draft), settings
    return target, specjax.NGram(), settings | {"num_draft": args.num_draft}


def _generate(args: argparse.Namespace) -> None:
    import specjax

    target, drafter, settings = _models(args)
    arguments = {**settings, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
    prompt: Any = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
    specjax.warmup(target, prompt, drafter=drafter, **arguments)  # the clock starts behind it
    out = specjax.generate(target, prompt, drafter=drafter, **arguments)
    print(args.prompt, end="\n\n" if args.chat else "")
    print(out.text if out.text is not None else f" {out.tokens}")
    facts = [f"{out.stats.new_tokens} tokens ({out.finish_reason})"]
    if out.seconds:
        facts.append(f"{(out.stats.new_tokens - 1) / out.seconds:,.0f} tokens/s")
    if drafter is not None and out.stats.tau is not None:
        facts.append(f"{out.stats.rounds} rounds, {out.stats.tau:.2f} tokens a round")
    print("\n" + ", ".join(facts), file=sys.stderr)


def _train(args: argparse.Namespace) -> None:
    from specjax.training import config, dryrun, report, run

    wanted = config.read(args.config, args.set)
    if args.dry_run:
        print(dryrun.estimate(wanted))
        return
    print(report.table(run.fit(wanted, runs=args.runs)))
    print(f"everything is in {args.runs}/{wanted.name}")


def _export(args: argparse.Namespace) -> None:
    import specjax
    from specjax.training.export import export

    target = specjax.load_target(args.target)
    export(specjax.load_drafter(args.drafter, target), args.directory, layout=args.layout)
    print(args.directory)


def _eval(args: argparse.Namespace) -> None:
    import json
    from pathlib import Path

    from specjax import evaluation

    target, drafter, settings = _models(args)
    prompts = evaluation.read_prompts(args.prompts, args.limit)
    lengths: list[int | None] = [settings.get("num_draft")]
    if args.sweep:
        if drafter is None or args.drafter == "ngram":
            raise ValueError("--sweep needs a trained drafter")
        lengths = [*evaluation.draft_lengths(drafter.config.num_drafts)]
    reports = []
    for length in lengths:
        if length is not None:
            settings["num_draft"] = length
        reports.append(
            evaluation.evaluate(
                target,
                drafter,
                prompts,
                max_new_tokens=args.max_new_tokens,
                repeats=args.repeats,
                progress=_progress,
                **settings,
            )
        )
    print(evaluation.as_table(reports))
    best = max(reports, key=lambda report: report["tokens_per_s"])
    result = best | {"sweep": reports} if args.sweep else best
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps(result))


def _progress(done: int, total: int) -> None:
    width = 30 * done // total
    end = "\n" if done == total else ""
    bar = "#" * width + "." * (30 - width)
    print(f"\r[{bar}] {done}/{total} answers", end=end, file=sys.stderr, flush=True)


def _info(args: argparse.Namespace) -> None:
    from specjax.models.info import describe, fit

    found = [describe(name) for name in args.names]
    for description in found:
        print(description.name)
        for key, value in description.lines.items():
            print(f"  {key:<12} {value}")
    for one, other in itertools.combinations(found, 2):
        verdict = fit(one, other)
        if verdict is not None:
            print(verdict)


def _convert(args: argparse.Namespace) -> None:
    from specjax.models import packaged
    from specjax.models.gguf import convert_gguf

    if args.source == "smollm2-135m":
        print(packaged.convert_smollm2())
        return
    if args.directory is None:
        raise ValueError("convert needs a directory to write to")
    convert_gguf(args.source, args.directory)
    print(args.directory)
