"""What a trained drafter is worth: held-out figures, their table, and the words of its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specjax import evaluation
from specjax.decoding import request
from specjax.models.hub import Drafter, Target
from specjax.training import expected, heldout
from specjax.training.config import HeldOut, TrainConfig, to_json
from specjax.training.data import Documents, answer


def measured(
    target: Target, made: Drafter, wanted: HeldOut, held: Documents, folder: Path, progress: bool
) -> dict[str, Any]:
    """The walk over all greedy answers, closed forms over sampled ones to the prompts that are
    decoded, and decoding at each temperature and draft length.

    A drafter that was trained to reuse rejected states is walked without them, which a walk does
    not have, and decoded with and without them. Sampled answers are kept in `folder`.

    Returns:
      The keys of `evaluation.evaluate` for the fastest greedy run (or the fastest one), with all
      of them as `runs`, the figures of `heldout.walk` as `walk`, and those of
      `expected.expected` with all drafts as `expected`.
    """
    params = heldout.in_dtype_of(target, made.params)
    drafter = Drafter(made.name, made.directory, made.config, params)
    alone = replace(made.config, reuse=None)
    walked = heldout.walk(target, alone, params, held, progress=_bar("walking", progress))
    prompts = evaluation.read_prompts(wanted.prompts, wanted.limit)[: wanted.decoded]
    forms = [
        expected.expected(
            target,
            alone,
            params,
            _sampled(target, prompts, temperature, wanted, folder, progress),
            progress=_bar(f"closed forms, temperature {temperature:g}", progress),
        )
        for temperature in wanted.temperatures
        if temperature > 0
    ]
    runs = [
        evaluation.evaluate(
            target,
            drafter,
            prompts,
            max_new_tokens=wanted.max_new_tokens,
            temperature=temperature,
            num_draft=length,
            reuse=reuse,
            repeats=wanted.repeats,
            progress=_bar(f"decoding, temperature {temperature:g}, {length} drafts", progress),
        )
        for temperature in wanted.temperatures
        for length in wanted.drafts or (made.config.num_drafts,)
        for reuse in ((None,) if made.config.reuse is None else (None, "off"))
    ]
    best = max(runs, key=lambda run: (run["asked"]["temperature"] == 0, run["speedup"] or 0))
    return best | {"walk": walked, "expected": forms, "runs": runs}


def _sampled(
    target: Target,
    prompts: list[list[Any]],
    temperature: float,
    wanted: HeldOut,
    folder: Path,
    progress: bool,
) -> Documents:
    """The target's answers at a temperature, with the filters that decoding has there."""
    values = request.sampling_values(target, temperature, None, None, 1)
    return answer(
        target,
        prompts,
        folder / f"heldout-{temperature:g}",
        max_new_tokens=wanted.max_new_tokens,
        temperature=temperature,
        top_k=values["top_k"],
        top_p=values["top_p"],
        batch_size=wanted.batch_size,
        progress=progress,
    )


def table(report: dict[str, Any]) -> str:
    """What a person wants to know at the end of a run."""
    lines = [f"{report['name']}, {report['steps']} steps"]
    if "walk" not in report:
        return lines[0]
    walk = report["walk"]
    slots = " ".join(f"{share:.2f}" for share in walk["acceptance_per_position"])
    spread = walk["standard_error"]
    around = "" if spread is None else f" +- {spread:.3f}"
    head, *rows = evaluation.as_table(report["runs"]).splitlines()
    lines += [
        f"held-out, greedy, teacher-forced: acceptance length {walk['tau']:.3f} "
        f"(mean of {walk['answers']} answers {walk['tau_macro']:.3f}{around})",
        f"accepted by slot: {slots}",
        *(_forms(one) for one in report["expected"]),
        "",
        f"{'temperature':>11} {'rule':>6} {'reuse':>10} {head}",
    ]
    for run, row in zip(report["runs"], rows, strict=True):
        lines.append(
            f"{run['asked']['temperature']:>11} {run['settings']['rule']:>6} "
            f"{run['settings']['reuse'] or '-':>10} {row}"
        )
    return "\n".join(lines)


def _forms(one: dict[str, Any]) -> str:
    """The closed forms of one temperature in a line."""
    rules = ", ".join(
        f"{rule} {_rounded(found['tau'])} +- {_rounded(found['standard_error'])}"
        for rule, found in one["rules"].items()
    )
    return (
        f"held-out, temperature {one['temperature']:g}, in closed form over {one['answers']} "
        f"answers: {rules}"
    )


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def card(config: TrainConfig, report: dict[str, Any]) -> dict[str, Any]:
    """What the model card of a run's drafter tells, for `export`."""
    texts = [
        f"{source.name} ({Path(source.prompts).name if source.prompts else 'no prompts'}"
        f"{f', {source.limit:,}' if source.limit else ''}, temperature {source.temperature:g})"
        for source in config.sources
    ]
    return {
        "report": report,
        "command": "specjax train --config training.json",
        "config": to_json(config),
        "license": config.license,
        "data": f"Trained on the target's own answers: {'; '.join(texts)}.",
    }


def _bar(title: str, progress: bool) -> Callable[[int, int], None]:
    bar = tqdm(desc=title, disable=not progress, unit="answer")

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
