"""A trained drafter as a directory that other engines load, with a model card.

Two layouts: z-lab's (DeepSpec's where the anchor's slot predicts), which the package `dflash`,
vLLM and SGLang read, and that of the package `speculators`. Neither holds the target's embedding or
head, but for the rows of a reduced vocabulary in the latter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from specjax.models import drafter as backbone
from specjax.models import drafter_hf, hub, info, params
from specjax.models.drafter import DrafterConfig
from specjax.models.reuse import name_of
from specjax.models.storage import read_json, write_directory

Format = Literal["z-lab", "speculators"]
CARD_KEYS = ("target", "base_model", "license", "data", "report", "command", "config")
TAGS = ("speculative-decoding", "block-diffusion", "dflash", "drafter")


def export(
    drafter: hub.Drafter,
    directory: str | Path,
    *,
    layout: Format = "z-lab",
    card: Mapping[str, Any] | None = None,
    dtype: Any = jnp.bfloat16,
    target: hub.Target | None = None,
    verifier: str | None = None,
) -> None:
    """Writes config.json, model.safetensors and README.md, whole or not at all; in z-lab's layout
    draft_ids.json too where the drafter proposes some tokens only, which other readers ignore.

    Args:
      drafter: what to write; its name heads the card.
      directory: must not exist, or be an empty directory.
      layout: "z-lab" or "speculators".
      card: what the card tells beyond the config; any of: `target` (name), `base_model` (hub id),
        `license` (a hub licence id), `data` (a sentence), `report` (as `specjax eval --json` or a
        run's report.json), `command` (what made it), `config` (of the run; written beside the card
        as training.json).
      dtype: of the tensors.
      target: the model it drafts for; the drafter is checked against it. Needed for
        "speculators", whose config names the target's architectures.
      verifier: where readers of "speculators" find the target's weights, a hub id or a directory;
        by default the name that `target` was loaded by.

    Raises:
      FileExistsError: the directory exists and is not empty.
      ValueError: an unknown layout or card key, a drafter that the layout cannot hold or that
        does not fit the target, a missing target, or a name that no reader can resolve.
    """
    write_directory(directory, *_contents(drafter, layout, card, dtype, target, verifier))


def replace(drafter: hub.Drafter, directory: str | Path, **arguments: Any) -> None:
    """`export` over an earlier export, which stays in place until the new one is complete.

    Raises:
      FileNotFoundError, ValueError: the directory holds something else than a drafter, or what
        `export` raises.
    """
    directory = Path(directory)
    if not directory.exists() or not any(directory.iterdir()):
        return export(drafter, directory, **arguments)
    if not info.is_drafter(read_json(directory / "config.json")):
        raise ValueError(f"{directory} is not an exported drafter: it is not replaced")
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as folder:
        export(drafter, Path(folder, "new"), **arguments)
        os.replace(directory, Path(folder, "old"))
        try:
            os.replace(Path(folder, "new"), directory)
        except BaseException:
            os.replace(Path(folder, "old"), directory)
            raise


def model_card(
    name: str,
    config: DrafterConfig,
    card: Mapping[str, Any],
    *,
    layout: Format,
    dtype: Any,
    ids: Any = None,
) -> str:
    """README.md: YAML front matter, what the drafter is, its figures, how to use and remake it."""
    unknown = sorted(set(card) - set(CARD_KEYS))
    if unknown:
        raise ValueError(f"a model card has no {', '.join(unknown)}; it has {', '.join(CARD_KEYS)}")
    report = card.get("report") or {}
    target = _short(card.get("target") or report.get("target") or "")
    whose = f"`{target}`" if target else "one target"
    sections = [
        _front_matter(card),
        f"# {_short(name)}",
        f"A block-diffusion drafter (DFlash, arXiv 2602.06036) for {whose}, for speculative "
        "decoding: it changes how fast the target's text comes, not the text. Its embedding and "
        "head are the target's, which must be the very model it was trained for.",
        _shapes(config, dtype, ids),
    ]
    if report:
        sections += ["## Figures", _figures(report)]
    sections += ["## Use", _usage(config, layout, target, ids)]
    made = [str(card["data"])] if card.get("data") else []
    if card.get("command"):
        made.append(f"Made by\n\n    {card['command']}")
    if made:
        sections += ["## How it was made", *made]
    if card.get("license"):
        sections += ["## Licence", str(card["license"])]
    return "\n\n".join(sections) + "\n"


# ------------------------------------------------------------------------------------ contents
def _contents(
    drafter: hub.Drafter,
    layout: Format,
    card: Mapping[str, Any] | None,
    dtype: Any,
    target: hub.Target | None,
    verifier: str | None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the files of the directory."""
    card = dict(card or {})
    if target is not None:
        hub.check_fit(drafter.config, target.config, target.name)
        card.setdefault("target", target.name)
    ids = drafter.params.get("target_ids")
    if layout == "z-lab":
        tensors, files = hub.drafter_contents(drafter, dtype)
    elif layout == "speculators":
        tensors, files = _speculators(drafter, target, verifier, dtype)
    else:
        raise ValueError(f"layout {layout!r} is not 'z-lab' or 'speculators'")
    files["README.md"] = model_card(
        drafter.name, drafter.config, card, layout=layout, dtype=dtype, ids=ids
    )
    return tensors, files | ({"training.json": card["config"]} if card.get("config") else {})


def _speculators(
    drafter: hub.Drafter, target: hub.Target | None, verifier: str | None, dtype: Any
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and config.json of that layout; a reduced vocabulary has its head and two maps:
    offsets to target ids, and who is in it."""
    if target is None:
        raise ValueError("the speculators layout names the target: pass target=")
    verifier = verifier or target.name
    if not Path(verifier).is_dir() and not hub.HUB_ID.fullmatch(verifier):
        raise ValueError(
            f"readers of the speculators layout find no target under {verifier!r}: pass verifier= "
            "with a hub id (org/model) or a directory"
        )
    config, own, maps = drafter.config, dict(drafter.params), {}
    if "target_ids" in own:
        ids = np.asarray(own.pop("target_ids"), np.int64)
        if (np.diff(ids) <= 0).any():  # readers cut the target's head by the mask t2d, in id order
            raise ValueError("target_ids of a reduced vocabulary must ascend to be written")
        config = dataclasses.replace(config, draft_vocab_size=ids.size)
        member = np.isin(np.arange(target.config.vocab_size), ids)
        maps = {"d2t": ids - np.arange(ids.size), "t2d": member}
    architectures = read_json(target.directory / "config.json").get("architectures") or []
    written = drafter_hf.config_to_speculators(
        config, verifier=verifier, architectures=architectures
    )
    written["dtype"] = jnp.dtype(dtype).name
    return params.save(backbone.table(config), own, dtype) | maps, {"config.json": written}


# ---------------------------------------------------------------------------------------- card
def _front_matter(card: Mapping[str, Any]) -> str:
    fields: dict[str, Any] = {
        "library_name": "specjax",
        "pipeline_tag": "text-generation",
        "license": card.get("license"),
        "base_model": card.get("base_model"),
        "tags": list(TAGS),
    }
    # A JSON value is a YAML value, whatever characters a name has.
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items() if value is not None]
    return "\n".join(["---", *lines, "---"])


def _shapes(config: DrafterConfig, dtype: Any, ids: Any) -> str:
    layers, count = config.layers, params.count(backbone.table(config))
    slots = "the token at its own position" if config.layout == "fill" else "the token behind it"
    rows = {
        "parameters": f"{count:,}, {jnp.dtype(dtype).name}",
        "layers": f"{layers.num_layers}, width {layers.hidden_size}, {layers.num_heads} query and "
        f"{layers.num_kv_heads} key/value heads of {layers.head_dim}",
        "target layers read (outputs, from 0)": ", ".join(map(str, config.taps)),
        "block": f"{config.block_size} rows, {config.num_drafts} drafts; a slot predicts {slots}",
        "mask token": config.mask_token_id,
    }
    if ids is not None:
        rows["proposes"] = f"{len(ids):,} of {config.vocab_size:,} tokens"
    if config.template is not None:
        rows["chat template"] = config.template
    if config.reuse is not None:
        rows["reuse of rejected states"] = name_of(config.reuse)
    return _table(["", ""], [[key, str(value)] for key, value in rows.items()])


def _figures(report: Mapping[str, Any]) -> str:
    """What a report holds of the figures that a person compares."""
    parts = []
    walk = report.get("walk")
    if walk:
        slots = ", ".join(f"{share:.3f}" for share in walk["acceptance_per_position"])
        parts.append(
            f"Greedy acceptance length on held-out text, teacher-forced over {walk['answers']} "
            f"answers: **{walk['tau']:.3f}** tokens a round. Accepted by slot: {slots}."
        )
    head = [
        "temperature",
        "rule",
        "reuse",
        "drafts",
        "acceptance length",
        "tokens/s",
        "plain tokens/s",
        "speed-up",
    ]
    rows = [_figure_row(run) for run in report.get("runs") or [report] if "tau" in run]
    if rows:
        parts.append(_table(head, rows))
        device = (report.get("runs") or [report])[0].get("device")
        parts.append(
            "Acceptance length is new tokens a round, the target's own included"
            + (f"; speeds on one {device}." if device else ".")
        )
    return "\n\n".join(parts)


def _figure_row(run: Mapping[str, Any]) -> list[str]:
    def shown(value: Any, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    settings = run.get("settings") or {}
    return [
        str((run.get("asked") or {}).get("temperature", 0)),
        *(str(settings.get(name) or "-") for name in ("rule", "reuse", "num_draft")),
        shown(run.get("tau"), 3),
        shown(run.get("tokens_per_s"), 1),
        shown(run.get("plain_tokens_per_s"), 1),
        shown(run.get("speedup"), 2),
    ]


def _usage(config: DrafterConfig, layout: Format, target: str, ids: Any) -> str:
    lines = [
        "    import specjax",
        "",
        f'    target = specjax.load_target("{target or "TARGET"}")',
        '    drafter = specjax.load_drafter("THIS DIRECTORY", target)',
        '    print(specjax.generate(target, "Once upon a time", drafter=drafter).text)',
    ]
    if layout == "speculators":
        also = "`speculators.SpeculatorModel.from_pretrained` reads the files too."
    elif config.layout == "fill":
        also = "The files are in z-lab's layout: `dflash.DFlashDraftModel` reads them too."
    else:
        also = "The files are in DeepSpec's layout: the anchor's slot predicts too."
    if ids is not None and layout == "z-lab":
        also += (
            " Other readers do not know draft_ids.json and propose any token: the text is the "
            "same, but not always the rounds."
        )
    return "\n".join(lines) + f"\n\n{also}"


def _short(name: str) -> str:
    """A name, or the last part of a path: a card leaves the machine it was made on."""
    return Path(name).name if Path(name).is_absolute() else name


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
