"""Answers that were interrupted end with the same files; other settings do not go on."""

import errno
import json
import os
import re
from dataclasses import replace

import pytest
from answering_by_hand import (
    GREEDY,
    SAMPLED,
    SEVERAL,
    Killed,
    files,
    kill,
    killed_after,
    prompts,
)

from specjax.training import data


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_run_ends_with_the_same_files(stories, tmp_path, settings):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    data.answer(stories, prompts(), whole, **settings)
    for calls in (0, 1, 1):  # killed before, within, and again
        kill(stories, prompts(), broken, settings, calls)
    data.answer(stories, prompts(), broken, **settings)
    assert files(broken) == files(whole)


def test_a_killed_dialogue_ends_with_the_same_files(chatty, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = GREEDY | {"max_new_tokens": 4}
    data.answer(chatty, SEVERAL, whole, **settings)
    for _ in range(2):
        kill(chatty, SEVERAL, broken, settings, 1)
    data.answer(chatty, SEVERAL, broken, **settings)
    assert files(broken) == files(whole)


def test_a_torn_file_goes_on_from_its_last_whole_line(stories, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    data.answer(stories, prompts(), whole, **SAMPLED)
    left = kill(stories, prompts(), broken, SAMPLED, 2)
    lines = [at + 1 for at, byte in enumerate(left) if byte == ord("\n")]
    assert len(lines) == 7  # settings and two batches
    for size in (0, 10, lines[0], lines[2] - 1, lines[2], lines[4] + 30, len(left) - 1):
        (broken / data.PARTIAL).write_bytes(left[:size])
        data.answer(stories, prompts(), broken, **SAMPLED)
        assert files(broken) == files(whole), size
        (broken / data.MANIFEST).unlink()
        (broken / data.ANSWERS).unlink()
    # A torn line that is longer than what comes next, and a further kill.
    (broken / data.PARTIAL).write_bytes(left[: lines[3]] + b"x" * 9000)
    assert kill(stories, prompts(), broken, SAMPLED, 1) == left
    data.answer(stories, prompts(), broken, **SAMPLED)
    assert files(broken) == files(whole)


def test_a_kill_while_the_files_are_written_loses_nothing(stories, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    data.answer(stories, prompts(), whole, **GREEDY)
    real = os.replace

    def killed(source, destination):
        if destination.name == data.MANIFEST:
            raise Killed
        real(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            data.answer(stories, prompts(), broken, **GREEDY)
    assert data.PARTIAL in files(broken)
    with pytest.raises(FileNotFoundError, match="is not finished"):
        data.load(broken)
    with monkeypatch.context() as patch:  # nothing is decoded again
        killed_after(patch, 0)
        data.answer(stories, prompts(), broken, **GREEDY)
    assert files(broken) == files(whole)


def test_a_full_disk_is_named_and_keeps_what_was_written(stories, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    data.answer(stories, prompts(), whole, **GREEDY)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space.*3 answers are kept"):
            data.answer(stories, prompts(), broken, **GREEDY)
    data.answer(stories, prompts(), broken, **GREEDY)
    assert files(broken) == files(whole)


def test_lines_of_another_hand_are_taken(stories, tmp_path):
    """Settings, then a line per answer, in whatever order: nothing is decoded again."""
    whole, fed = tmp_path / "whole", tmp_path / "fed"
    made = data.answer(stories, prompts(), whole, **GREEDY)
    settings = {key: value for key, value in GREEDY.items() if key != "progress"}
    lines = [data.answer_settings(stories, prompts(), **settings)]
    for index in reversed(range(7)):
        tokens, length = made.document(index)
        answers = {"prompt": tokens[:length].tolist(), "answer": tokens[length:].tolist()}
        lines.append({"document": index, "turn": 0} | answers)
    fed.mkdir()
    (fed / data.PARTIAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, 0)
        data.answer(stories, prompts(), fed, **GREEDY)
    assert files(fed) == files(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line | {"prompt": [1, 2]}, "another prompt"),
        (lambda line: line | {"document": 70}, "holds 8 answers to 7 prompts"),
        (lambda line: line | {"answer": []}, r"jsonl:7 is damaged \(empty"),
        (lambda line: {"document": 0}, "jsonl:7 is damaged"),
        (lambda line: "torn", "jsonl:7 is damaged"),
    ],
)
def test_damaged_lines_are_named(stories, tmp_path, change, message):
    *lines, last = kill(stories, prompts(), tmp_path, GREEDY, 2).splitlines()
    lines.append(json.dumps(change(json.loads(last))).encode())
    (tmp_path / data.PARTIAL).write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(ValueError, match=message):
        data.answer(stories, prompts(), tmp_path, **GREEDY)


# ------------------------------------------------------------------------------ other settings
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_with_the_difference(stories, tmp_path, finished):
    if finished:
        data.answer(stories, prompts(), tmp_path, **SAMPLED)
    else:
        kill(stories, prompts(), tmp_path, SAMPLED, 2)
    before = files(tmp_path)
    cases = [
        ({"temperature": 0.5}, "temperature: saved 0.9, now 0.5"),
        ({"max_new_tokens": 13}, "max_new_tokens: saved 12, now 13"),
        ({"top_p": 0.5, "seed": 1}, "top_p: saved 0.95, now 0.5\n  seed: saved 7, now 1"),
        ({"limit": 3}, 'prompts: saved "7 prompts'),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            data.answer(stories, prompts(), tmp_path, **SAMPLED | change)
    with pytest.raises(ValueError, match=r'other settings:\n  prompts: saved "7 prompts'):
        data.answer(stories, [*prompts()[:-1], ["Else"]], tmp_path, **SAMPLED)
    params = stories.params | {"norm": stories.params["norm"] * 2.0}
    with pytest.raises(ValueError, match="fingerprint: "):
        data.answer(replace(stories, params=params), prompts(), tmp_path, **SAMPLED)
    assert files(tmp_path) == before
    renamed = replace(stories, name="elsewhere/stories260k")
    data.answer(renamed, prompts(), tmp_path, **SAMPLED)  # the name is for people
