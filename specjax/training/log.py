"""The metrics of a run as JSON lines, and as event files where they are wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.models.storage import write_file

NAMES = ("metrics", "walks")


class Log:
    """Appends to `metrics.jsonl` (a line per step) and `walks.jsonl` of a run's folder.

    A run that goes on from step `done` makes the later steps again, so their lines are dropped.
    """

    def __init__(self, folder: Path, done: int, *, tensorboard: bool = False):
        self._files = {}
        for name in NAMES:
            path = folder / f"{name}.jsonl"
            kept = [line for line in lines(path) if json.loads(line)["step"] <= done]
            write_file(path, "".join(f"{line}\n" for line in kept).encode("utf-8"))
            self._files[name] = path.open("a", encoding="utf-8", buffering=1)  # line by line
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(folder / "events"), purge_step=done + 1)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), *([self._events] if self._events else [])):
            file.close()

    def write(self, name: str, step: int, values: dict[str, Any]) -> None:
        """Adds a line to one of `NAMES`."""
        self._files[name].write(json.dumps({"step": step} | values) + "\n")
        if self._events is not None:
            for key, value in values.items():
                parts = {f"/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {}
                for part, number in (parts or {"": value}).items():
                    if isinstance(number, int | float):
                        self._events.add_scalar(f"{name}/{key}{part}", number, step)


def lines(path: Path) -> Iterator[str]:
    """The whole lines of a file that may end in a torn one, or may be missing."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        yield from text[: text.rfind("\n") + 1].splitlines()
