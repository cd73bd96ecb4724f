"""Token ids to text while they arrive: whole characters only, stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what a decoder puts for bytes that are no character (yet)


class TextStream:
    """The text of one growing answer.

    A piece never ends inside a character, nor inside what may become a stop string. A stop string
    ends the answer: the text stands before it, the ids end with the one that completes it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Decoded with the prompt in front: some tokenizers drop the space of a first token.
        self._prompt = list(prompt)
        self._before = self._decode(self._prompt).rstrip(BROKEN)
        self._ids: list[int] = []
        self._sent = 0
        self.text = ""  # complete characters so far, what is held back included
        self.stopped_at: int | None = None  # number of ids up to the end of a stop string

    def push(self, ids: Sequence[int]) -> str:
        """Takes further ids; returns the text that is safe to show now."""
        seen = len(self._ids)
        self._ids += ids
        self.text = self._text(len(self._ids))
        at, found = self._find(self.text)
        if found:
            self.stopped_at = self._completes(found, seen)
            self.text = self.text[:at]
            return self._send(len(self.text))
        return self._send(self._safe())

    def finish(self) -> str:
        """Returns what was held back; the answer is complete."""
        return self._send(len(self.text))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _text(self, count: int) -> str:
        whole = self._decode(self._prompt + self._ids[:count])
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        return self._decode(self._ids[:count])

    def _find(self, text: str) -> tuple[int, str]:
        # The one that is complete first wins, however the text arrives.
        hits = [(text.find(stop) + len(stop), stop) for stop in self._stop if stop in text]
        end, stop = min(hits, default=(0, ""))
        return end - len(stop), stop

    def _completes(self, stop: str, seen: int) -> int:
        """The number of ids after which `stop` first stands in the text."""
        for count in range(seen + 1, len(self._ids)):
            if stop in self._text(count):
                return count
        return len(self._ids)

    def _safe(self) -> int:
        """How much of the text no later id can change or turn into a stop string."""
        whole = self.text.rstrip(BROKEN)
        return min((len(whole) - _begun(whole, stop) for stop in self._stop), default=len(whole))

    def _send(self, end: int) -> str:
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece


def _begun(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` that `text` ends with."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
