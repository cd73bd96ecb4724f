"""Curves of a run, for people who would rather look than read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from specjax.models.storage import write_file


def curves(folder: Path) -> Path | None:
    """Draws loss, accuracy per slot and acceptance length of `folder` into `curves.png`.

    Returns the file, or None where nothing was logged yet or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    steps = _read(folder / "metrics.jsonl")
    if not steps:
        return None
    walks = _read(folder / "walks.jsonl")
    x = np.array([row["step"] for row in steps])
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    loss, accuracy, tau = figure.subplots(1, 3)
    loss.plot(x, _smooth(np.array([row["loss"] for row in steps])))
    loss.set(title="loss", xlabel="step")
    slots = np.array([row["accuracy"] for row in steps])
    for k in range(slots.shape[1]):
        accuracy.plot(x, _smooth(slots[:, k]), label=f"slot {k + 1}", linewidth=1)
    accuracy.set(title="accuracy by slot", xlabel="step", ylim=(0, 1))
    accuracy.legend(fontsize=7, ncols=2)
    tau.plot(x, _smooth(np.array([row["tau"] for row in steps])), label="training blocks")
    if walks:
        tau.plot(
            [row["step"] for row in walks],
            [row["tau"] for row in walks],
            "o-",
            label="held-out, greedy",
        )
    tau.set(title="acceptance length (bonus included)", xlabel="step")
    tau.legend(fontsize=8)
    file = folder / "curves.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    write_file(file, drawn.getvalue())
    return file


def _read(file: Path) -> list[dict]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a fiftieth of the curve; the beginning averages what there is."""
    width = max(1, len(values) // 50)
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    return (total[end] - total[start]) / (end - start)
