"""Answers of a target: what is in them, and that an interruption changes nothing."""

import errno
import json
import os
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import specjax
from specjax import evaluation
from specjax.models.text import render_chat
from specjax.training import answering, data

TEXTS = [
    "Once upon a time",
    "The dog",
    "Lily saw a big",
    "Tom",
    "A cat sat on",
    "He",
    "One day, she",
]
GREEDY = {"max_new_tokens": 12, "batch_size": 3, "progress": False}
SAMPLED = GREEDY | {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}
SEVERAL = [["hi", "and?", "no"], ["what is 12"], ["ok", "ha ha"]]


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A tiny random target with a chat template and a context of 128."""
    config = tiny.target_config(
        "qwen3", vocab_size=306, eos_token_id=302, max_position_embeddings=128
    )
    directory = tmp_path_factory.mktemp("chatty")
    tensors = tiny.target_tensors(config)
    tiny.write(directory, config, tensors, tokenizer=tiny.tokenizer_files())
    return specjax.load_target(directory)


def files(directory):
    """Everything in a directory, byte for byte."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def prompts():
    return [[text] for text in TEXTS]


class Killed(BaseException):
    """What a kill is to the code: it ends there."""


def killed_after(monkeypatch, calls):
    """Lets so many batches through; the next one is killed."""
    real, left = answering.generate, [calls]

    def generate(*arguments, **more):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(*arguments, **more)

    monkeypatch.setattr(answering, "generate", generate)


def kill(target, asked, directory, settings, calls):
    """A run that is killed after so many batches; returns the unfinished file, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, calls)
        with pytest.raises(Killed):
            data.answer(target, asked, directory, **settings)
    path = directory / data.PARTIAL
    return path.read_bytes() if path.exists() else b""


# ------------------------------------------------------------------------------- what is made
def test_documents_are_prompts_and_answers(stories, tmp_path):
    """In the order of the prompts, each answer the one that decoding gives for it alone."""
    made = data.answer(stories, prompts(), tmp_path, **GREEDY)
    assert len(made) == len(TEXTS)
    for index, text in enumerate(TEXTS):
        prompt = stories.tokenizer(text).input_ids
        alone = specjax.generate(stories, text, max_new_tokens=12, temperature=0.0)
        tokens, length = made.document(index)
        assert (tokens[:length].tolist(), tokens[length:].tolist()) == (prompt, alone.tokens)
    assert (made.tokens.dtype, made.starts.dtype) == (np.int32, np.int64)
    with np.load(tmp_path / data.ANSWERS) as arrays:
        assert arrays["tokens"].dtype == np.uint16
    assert sorted(files(tmp_path)) == ["answers.npz", "manifest.json"]
    assert made.manifest["documents"] == 7
    assert made.manifest["tokens"] == len(made.tokens)
    assert made.manifest["answer_tokens"] == 7 * 12
    with pytest.raises(IndexError, match="document 7 of 7"):
        made.document(7)


def test_the_mask_covers_answers_only():
    made = data.Documents(
        np.arange(9, dtype=np.int32), np.array([0, 4, 6, 9]), np.array([3, 1, 1]), {}
    )
    assert made.supervised.tolist() == [False] * 3 + [True, False, True, False, True, True]


def test_an_answer_holds_its_end_of_text(tmp_path):
    """Token x is followed by x + 1, and 5 ends the text."""
    directory = tiny.successor_target(tmp_path / "target", [*range(1, 12), 0])
    target = replace(specjax.load_target(directory), eos_token_ids=(5,))
    made = data.answer(target, [[[0, 1]], [[7]]], tmp_path / "made", max_new_tokens=6)
    assert made.document(0)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert made.document(1)[0].tolist() == [7, 8, 9, 10, 11, 0, 1]
    assert made.occurring(12).tolist() == [*range(6), *range(7, 12)]  # 6 is never said
    assert made.occurring(12).dtype == np.int32
    with pytest.raises(ValueError, match="id 11 is outside the vocabulary of 11"):
        made.occurring(11)


def test_texts_of_a_base_model_begin_with_its_bos(stories, tmp_path):
    made = data.answer(stories, 5, tmp_path, **SAMPLED | {"max_new_tokens": 60})
    texts = {tuple(made.document(i)[0]) for i in range(5)}
    assert len(texts) == 5  # noise of its own for each
    assert {text[0] for text in texts} == {1}
    assert made.prompt_lengths.tolist() == [1] * 5
    with pytest.raises(ValueError, match="5 texts at temperature 0 are all the same"):
        data.answer(stories, 5, tmp_path / "greedy", **GREEDY)
    fewer = data.answer(stories, 5, tmp_path / "limit", limit=2, **SAMPLED)
    assert len(fewer) == 2


def test_noise_differs_by_batch_and_follows_the_seed(stories, tmp_path):
    same = [["The dog"]] * 6  # two batches
    first = data.answer(stories, same, tmp_path / "a", **SAMPLED)
    other = data.answer(stories, same, tmp_path / "b", **SAMPLED | {"seed": 8})
    assert len({tuple(first.document(i)[0]) for i in range(6)}) == 6
    assert first.tokens.tolist() != other.tokens.tolist()


def test_later_turns_stand_behind_the_answers(chatty, tmp_path):
    """As evaluation asks them, which is as serving renders a conversation."""
    made = data.answer(chatty, SEVERAL, tmp_path, **GREEDY | {"max_new_tokens": 4})
    want = [ids for _, ids in evaluation._dialogues(chatty, SEVERAL, 4, {"temperature": 0.0})]
    got = [tokens[:length].tolist() for tokens, length in map(made.document, range(len(made)))]
    assert got == want
    assert made.manifest["left_out_turns"] == 0


def test_messages_are_rendered_by_the_template(chatty, tmp_path):
    messages = [{"role": "system", "content": "ok"}, {"role": "user", "content": "hi"}]
    made = data.answer(chatty, [[messages]], tmp_path, **GREEDY)
    tokens, length = made.document(0)
    assert tokens[:length].tolist() == render_chat(chatty.tokenizer, messages)
    assert made.manifest["template"].endswith("thinking=off")


def test_a_turn_without_room_is_left_out_and_counted(chatty, tmp_path):
    made = data.answer(chatty, SEVERAL, tmp_path, **GREEDY | {"max_new_tokens": 50})
    lengths = np.diff(made.starts)
    assert made.manifest["left_out_turns"] == 6 - len(made) > 0
    assert lengths.max() <= 128
    with pytest.raises(ValueError, match=r"prompt 1 of \d+ tokens and max_new_tokens 120 exceed"):
        data.answer(chatty, [[[1]], [[1] * 9]], tmp_path / "b", **GREEDY | {"max_new_tokens": 120})
    assert not (tmp_path / "b").exists()


def test_all_batches_have_one_shape(stories, tmp_path, monkeypatch):
    """A last batch of one row would compile anew: it is filled up, and the filling ends at once."""
    real, calls = answering.generate, []

    def generate(target, ids, **more):
        calls.append((len(ids), more["batch_size"], more["max_new_tokens"]))
        return real(target, ids, **more)

    monkeypatch.setattr(answering, "generate", generate)
    data.answer(stories, prompts(), tmp_path, **GREEDY)
    assert [call[:2] for call in calls] == [(3, 3)] * 3
    assert calls[-1][2] == [12, 1, 1]


# -------------------------------------------------------------------------------- interruptions
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
        ({"temperature": 0.5}, "temperature: 0.9 there, 0.5 now"),
        ({"max_new_tokens": 13}, "max_new_tokens: 12 there, 13 now"),
        ({"top_p": 0.5, "seed": 1}, "top_p: 0.95 there, 0.5 now\n  seed: 7 there, 1 now"),
        ({"limit": 3}, "prompts: '7 prompts"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            data.answer(stories, prompts(), tmp_path, **SAMPLED | change)
    with pytest.raises(ValueError, match=r"other settings:\n  prompts: '7 prompts"):
        data.answer(stories, [*prompts()[:-1], ["Else"]], tmp_path, **SAMPLED)
    params = stories.params | {"norm": stories.params["norm"] * 2.0}
    with pytest.raises(ValueError, match="fingerprint: "):
        data.answer(replace(stories, params=params), prompts(), tmp_path, **SAMPLED)
    assert files(tmp_path) == before
    renamed = replace(stories, name="elsewhere/stories260k")
    data.answer(renamed, prompts(), tmp_path, **SAMPLED)  # the name is for people


def test_bad_requests_are_refused_before_anything_is_written(stories, tmp_path):
    cases = [
        ([], {}, "no prompts"),
        (0, {}, "at least 1"),
        (["The dog"], {}, "prompt 0 must be a list of turns, not 'The dog'"),
        ([[]], {}, "prompt 0 must be a list of turns"),
        ([[1, 2, 3]], {}, "prompt 0 must be a list of turns"),
        ([["The dog", [1, 2]]], {}, "several turns, which must all be text"),
        ([["The dog", "and?"]], {}, "no chat template"),
        ([[[600]]], {}, "prompt 0, turn 0: token id 600 is outside the vocabulary"),
        (prompts(), {"max_new_tokens": 0}, "max_new_tokens must be a positive whole number, not 0"),
        (prompts(), {"batch_size": 2.5}, "batch_size must be a positive whole number, not 2.5"),
        (prompts(), {"limit": 0}, "limit must be"),
        (prompts(), {"seed": -1}, "seed must be between"),
        (prompts(), {"temperature": -1.0}, "temperature"),
        (prompts(), {"temperature": 1.0, "top_p": 0.0}, "top_p"),
    ]
    for asked, change, message in cases:
        with pytest.raises(ValueError, match=message):
            data.answer(stories, asked, tmp_path / "made", **GREEDY | change)
    assert not (tmp_path / "made").exists()


def test_a_model_without_bos_needs_prompts(chatty, tmp_path):
    config = json.loads((chatty.directory / "config.json").read_text())
    del config["bos_token_id"]
    target = replace(chatty, directory=tiny.write(tmp_path / "none", config, {}))
    with pytest.raises(ValueError, match="has no bos_token_id"):
        data.answer(target, 2, tmp_path / "made", **SAMPLED)


# --------------------------------------------------------------------------------------- loading
def test_a_finished_directory_is_loaded(stories, tmp_path, monkeypatch):
    made = data.answer(stories, prompts(), tmp_path, **GREEDY)
    killed_after(monkeypatch, 0)
    for again in (data.load(tmp_path), data.answer(stories, prompts(), tmp_path, **GREEDY)):
        for name in ("tokens", "starts", "prompt_lengths"):
            got, want = getattr(again, name), getattr(made, name)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
        assert again.manifest == made.manifest


def test_damaged_files_are_named(stories, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no answers: manifest.json is missing"):
        data.load(tmp_path)
    data.answer(stories, prompts(), tmp_path, **GREEDY)
    whole = files(tmp_path)
    answers, manifest = whole["answers.npz"], whole["manifest.json"]
    changed = bytearray(answers)
    changed[60] ^= 1
    fewer = manifest.replace(b'"documents": 7', b'"documents": 8')
    cases = [
        ("answers.npz", answers[:-1], r"answers.npz was cut short or changed \(\d+ bytes"),
        ("answers.npz", b"", "was cut short or changed"),
        ("answers.npz", bytes(changed), "was cut short or changed"),
        ("manifest.json", manifest[:40], "manifest.json is damaged"),
        ("manifest.json", b"[]", "manifest.json is damaged"),
        ("manifest.json", b'{"documents": 7}', r"manifest.json is damaged \(KeyError: 'sha256'"),
        ("manifest.json", fewer, "7 documents of .* says 8"),
    ]
    for name, content, message in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.load(tmp_path)
        (tmp_path / name).write_bytes(whole[name])
    data.load(tmp_path)
    (tmp_path / "answers.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"answers.npz is missing: copy it again"):
        data.load(tmp_path)


# ----------------------------------------------------------------------------------- fingerprint
def test_a_fingerprint_names_the_weights(stories):
    name = data.fingerprint(stories)
    assert name == "75c685e3f66afca5"  # over processes, too
    assert data.fingerprint(specjax.load_target("stories260k", dtype="bfloat16")) == name
    mesh = jax.make_mesh((8,), ("model",))
    assert data.fingerprint(specjax.load_target("stories260k", mesh=mesh)) == name
    leaves, tree = jax.tree.flatten(stories.params)
    for i, leaf in enumerate(leaves):
        for change in (
            leaf.at[(0,) * leaf.ndim].multiply(1.01),
            jnp.flip(leaf),
            jnp.roll(leaf, 1, axis=0),
        ):
            params = jax.tree.unflatten(tree, [*leaves[:i], change, *leaves[i + 1 :]])
            assert data.fingerprint(replace(stories, params=params)) != name, i
    layers = replace(stories.config.layers, rms_norm_eps=1e-6)
    other = replace(stories, config=replace(stories.config, layers=layers))
    assert data.fingerprint(other) != name
