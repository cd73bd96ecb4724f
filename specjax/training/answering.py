"""Prompts to answers: dialogues rendered turn by turn and decoded in batches, resumably."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from specjax.decoding import request
from specjax.decoding.detokenize import TextStream
from specjax.decoding.generate import generate
from specjax.models.hub import Target
from specjax.models.storage import read_json
from specjax.training.partial import Answer, Partial

WINDOW = 4  # batches of prompts that are sorted by length together


def dialogues(target: Target, prompts: Any, limit: int | None) -> list[list[Any]]:
    """The turns of every prompt.

    Raises:
      ValueError: no prompts, a prompt that is no list of turns, or no BOS to begin with.
    """
    if isinstance(prompts, int):
        if prompts < 1:
            raise ValueError(f"the number of texts must be at least 1, not {prompts}")
        config = read_json(target.directory / "config.json")
        bos = target.generation_config.get("bos_token_id", config.get("bos_token_id"))
        if not isinstance(bos, int):
            raise ValueError(
                f"{target.name} has no bos_token_id to begin a text with: give prompts instead"
            )
        return [[[bos]]] * (prompts if limit is None else min(prompts, limit))
    if not len(prompts):
        raise ValueError("there are no prompts to answer")
    for index, turns in enumerate(prompts):
        if not isinstance(turns, list | tuple) or not turns or isinstance(turns[0], int | Mapping):
            raise ValueError(f"prompt {index} must be a list of turns, not {turns!r:.80}")
        if len(turns) > 1 and not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"prompt {index} has several turns, which must all be text")
    return [list(turns) for turns in prompts[:limit]]


def answer_all(
    target: Target,
    dialogues: list[list[Any]],
    partial: Partial,
    settings: Mapping[str, Any],
    progress: bool,
) -> int:
    """Answers every turn that is not in the file yet; returns how many turns were left out.

    Args:
      target: the model.
      dialogues: the turns of each prompt.
      partial: where answers are found and go to.
      settings: `max_new_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `batch_size`.
      progress: show a bar on stderr.

    Raises:
      ValueError: a prompt that leaves no room, or answers in the file that belong to no prompt.
    """
    width = min(settings["batch_size"], len(dialogues))
    waiting, fitted, left_out = list(range(len(dialogues))), 0, 0
    bar = _Bar(sum(map(len, dialogues)), len(partial), progress)
    try:
        for turn in range(max(map(len, dialogues))):
            prompts = {i: _render(target, partial, i, dialogues[i], turn) for i in waiting}
            fitting = _fitting(target, prompts, turn, settings["max_new_tokens"])
            left_out += sum(len(dialogues[i]) - turn for i in waiting if i not in fitting)
            fitted += len(fitting)
            _answer_turn(target, fitting, turn, partial, settings, width, bar)
            waiting = [i for i in fitting if len(dialogues[i]) > turn + 1]
    finally:
        bar.close()
    if len(partial) != fitted:
        raise ValueError(f"the unfinished file holds {len(partial)} answers to {fitted} prompts")
    return left_out


def _render(target: Target, partial: Partial, index: int, turns: list[Any], turn: int) -> list[int]:
    """The ids of one turn of a dialogue, as serving renders it: behind the answers before it."""
    asked = turns[turn]
    chats = target.has_tokenizer and bool(target.tokenizer.chat_template)
    if isinstance(asked, str) and (chats or len(turns) > 1):
        history = []
        for t in range(turn):
            before = partial.get(index, t)
            assert before is not None
            history += [_message("user", turns[t]), _message("assistant", _text(target, before))]
        asked = [*history, _message("user", asked)]
    try:
        return request.token_ids(target, asked, enable_thinking=False)
    except ValueError as error:
        raise ValueError(f"prompt {index}, turn {turn}: {error}") from None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(target: Target, one: Answer) -> str:
    """The text of an answer, as `generate` gives it."""
    stream = TextStream(target.tokenizer, one.prompt)
    stream.push(one.answer)
    return stream.text


def _fitting(
    target: Target, rendered: dict[int, list[int]], turn: int, max_new_tokens: int
) -> dict[int, list[int]]:
    """The prompts that leave room for an answer.

    Raises:
      ValueError: a first turn leaves no room, which nothing but another prompt can mend.
    """
    room = target.config.max_positions - max_new_tokens
    ended = [i for i, ids in rendered.items() if len(ids) > room]
    if ended and turn == 0:
        raise ValueError(
            f"prompt {ended[0]} of {len(rendered[ended[0]])} tokens and max_new_tokens "
            f"{max_new_tokens} exceed the {target.config.max_positions} positions of {target.name} "
            f"({len(ended)} prompts do): take it out, or ask for fewer new tokens"
        )
    return {i: ids for i, ids in rendered.items() if len(ids) <= room}


def _answer_turn(
    target: Target,
    prompts: dict[int, list[int]],
    turn: int,
    partial: Partial,
    settings: Mapping[str, Any],
    width: int,
    bar: Any,
) -> None:
    """Answers one turn of every prompt, batch by batch; batches that are there are passed over."""
    for i, ids in prompts.items():
        there = partial.get(i, turn)
        if there is not None and there.prompt != ids:
            raise ValueError(f"the unfinished answers hold another prompt {i}, turn {turn}")
    for number, batch in enumerate(_batches(prompts, settings["seed"], turn, width)):
        if all(partial.get(i, turn) for i in batch):
            continue
        # A batch of fewer rows would compile anew: it is filled up with rows that end at once.
        filled = [prompts[i] for i in batch] + [prompts[batch[0]]] * (width - len(batch))
        limits = [settings["max_new_tokens"]] * len(batch) + [1] * (width - len(batch))
        made: Any = generate(
            target,
            filled,
            max_new_tokens=limits,
            temperature=settings["temperature"],
            top_k=settings["top_k"],
            top_p=settings["top_p"],
            seed=int(np.random.SeedSequence([settings["seed"], turn, number]).generate_state(1)[0]),
            batch_size=width,
        )
        answers = zip(batch, made.tokens, strict=False)
        bar(partial, partial.add(Answer(i, turn, prompts[i], ids) for i, ids in answers))


def _batches(
    prompts: dict[int, list[int]], seed: int, turn: int, width: int
) -> Iterator[list[int]]:
    """Indices of prompts by batch: a shuffled order, of which each window is sorted by length.

    Windows keep the speed steady over a run and the rows of a batch alike.
    """
    order = list(prompts)
    random.Random(seed + turn).shuffle(order)
    for first in range(0, len(order), WINDOW * width):
        window = sorted(order[first : first + WINDOW * width], key=lambda i: len(prompts[i]))
        for start in range(0, len(window), width):
            yield window[start : start + width]


class _Bar:
    """Answers done, tokens per second and time left, on stderr."""

    def __init__(self, total: int, done: int, progress: bool):
        self._bar = tqdm(
            total=total, initial=done, desc="answers", unit="answer", disable=not progress
        )
        self._begin, self._tokens = time.perf_counter(), 0

    def __call__(self, partial: Partial, tokens: int) -> None:
        """Counts a further batch of so many tokens."""
        self._tokens += tokens
        speed = self._tokens / (time.perf_counter() - self._begin)
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        self._bar.update(len(partial) - self._bar.n)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()
