"""The command line: specjax {generate, info, convert}."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input ends it with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="specjax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    make = commands.add_parser("generate", help="decode a prompt")
    make.add_argument(
        "--target", default="stories260k", help="packaged name, directory, .gguf or hub id"
    )
    make.add_argument("--prompt", default="Once upon a time")
    make.add_argument("--max-new-tokens", type=int, default=200)
    make.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    make.set_defaults(run=_generate)

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
    except (ValueError, OSError, ImportError) as error:
        print(f"specjax: {error}", file=sys.stderr)
        return 2
    return 0


def _generate(args: argparse.Namespace) -> None:
    import specjax

    target = specjax.load_target(args.target, dtype=args.dtype)
    print(f"{args.target}: compiling, once per shape ...", file=sys.stderr)
    out = specjax.generate(target, args.prompt, max_new_tokens=args.max_new_tokens)
    print(args.prompt + (out.text or str(out.tokens)))
    speed = out.stats["tokens_per_s"]
    rate = f", {speed:,.0f} tokens/s" if speed else ""
    print(f"\n{len(out.tokens)} tokens ({out.finish_reason}){rate}", file=sys.stderr)


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
