"""Answers of a target: what is in them, and how they are loaded."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from answering_by_hand import (
    GREEDY,
    SAMPLED,
    SEVERAL,
    TEXTS,
    files,
    killed_after,
    prompts,
)

import specjax
from specjax import evaluation
from specjax.models.text import render_chat
from specjax.training import answering, data


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


def test_the_dtype_is_told_and_binds_nobody(stories, tmp_path, monkeypatch):
    """Answers that are committed are used in other dtypes, and older ones do not tell theirs."""
    made = data.answer(stories, prompts(), tmp_path, **GREEDY)
    assert made.manifest["computed_in"] == "float32"
    half = specjax.load_target("stories260k", dtype="bfloat16")
    killed_after(monkeypatch, 0)
    again = data.answer(half, prompts(), tmp_path, **GREEDY)
    assert again.manifest == made.manifest
    older = {key: value for key, value in made.manifest.items() if key != "computed_in"}
    (tmp_path / data.MANIFEST).write_text(json.dumps(older))
    for documents in (data.load(tmp_path), data.answer(half, prompts(), tmp_path, **GREEDY)):
        assert documents.manifest == older
        np.testing.assert_array_equal(documents.tokens, made.tokens)


def test_a_dtype_of_the_answers_is_that_of_the_target(tmp_path):
    directory = tiny.successor_target(tmp_path / "target", [*range(1, 12), 0])
    half = specjax.load_target(directory, dtype="bfloat16")
    made = data.answer(half, [[[0, 1]]], tmp_path / "made", max_new_tokens=3, progress=False)
    assert made.manifest["computed_in"] == "bfloat16"


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
    sharded = specjax.load_target("stories260k", mesh=mesh)
    for _ in range(50):  # programs that are in flight together would hang sooner or later
        assert data.fingerprint(sharded) == name
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
