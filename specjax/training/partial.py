"""The file of answers that are not complete yet: a line of settings, then a line per answer.

Lines are appended and brought to the disk batch by batch. A kill or a full disk can tear the last
line only, which the next run cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specjax.models.storage import differences

FREE = ("target",)  # settings that only say where the rest came from


class Answer(NamedTuple):
    """One answered turn of a prompt."""

    document: int  # index of the prompt
    turn: int
    prompt: list[int]
    answer: list[int]


class Partial:
    """The answers of an unfinished run, on the disk and in memory.

    Args:
      path: need not exist; it is written with the first answers.
      settings: what decides the answers.

    Raises:
      ValueError: the file was made with other settings, or a line but the last is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self._path = path
        self._settings = settings
        self._answers: dict[tuple[int, int], Answer] = {}
        self._size = 0  # of the whole lines, in bytes
        if path.exists():
            self._read()

    def __len__(self) -> int:
        """Number of answers."""
        return len(self._answers)

    @property
    def answers(self) -> list[Answer]:
        """All answers, in the order of their prompts and turns."""
        return [self._answers[place] for place in sorted(self._answers)]

    def get(self, document: int, turn: int) -> Answer | None:
        """The answer to one turn, or None."""
        return self._answers.get((document, turn))

    def add(self, answers: Iterable[Answer]) -> int:
        """Appends those that are not there yet; returns how many tokens they hold.

        Raises:
          OSError: they could not be written; the answers of before are kept.
        """
        new = [one for one in answers if self.get(one.document, one.turn) is None]
        lines = [one._asdict() for one in new]
        if not self._size:
            lines = [dict(self._settings), *lines]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("r+b" if self._path.exists() else "xb") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._path} could not be written ({error.strerror}); its {len(self)} answers "
                "are kept: make room and run again",
            ) from error
        self._size += len(data)
        self._answers |= {(one.document, one.turn): one for one in new}
        return sum(len(one.answer) for one in new)

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        data = self._path.read_bytes()
        self._size = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._size].splitlines(), 1):
            try:
                row = json.loads(line)
                if number == 1:
                    check_equal(f"{self._path} holds", row, self._settings)
                    continue
                one = Answer(**row)
                place = one.document, one.turn
                if not one.prompt or not one.answer or place in self._answers:
                    raise TypeError(f"empty, or a second answer to turn {place}")
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
                raise ValueError(
                    f"{self._path}:{number} is damaged ({error}): take the line out, or remove the "
                    "file to make all answers again"
                ) from None
            self._answers[place] = one


def check_equal(what: str, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises ValueError with a line per setting that differs from what is asked for now."""
    if not isinstance(there, Mapping):
        raise TypeError("no settings")
    compared = [name for name in asked if name not in FREE]
    before = {name: there[name] for name in compared if name in there}
    if lines := differences(before, {name: asked[name] for name in compared}):
        raise ValueError(
            "\n".join([f"{what} answers made with other settings:", *lines])
            + "\nUse the same settings, or another directory."
        )
