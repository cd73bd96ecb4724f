"""Prompts to ids: every return type of tokenizers, thinking on and off (cases D11, D12)."""

from collections import UserDict

import numpy as np
import pytest
import tiny

from specjax.models import text

IDS = [3, 1, 4, 1, 5]
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in tiny.tokenizer_files().items():
        (directory / name).write_text(content, encoding="utf-8")
    return text.load_tokenizer(directory)


@pytest.mark.parametrize(
    "encoded",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array([IDS]),
        [IDS],
        {"input_ids": IDS},
        UserDict(input_ids=IDS),
        UserDict(input_ids=[IDS], attention_mask=[[1] * 5]),
    ],
)
def test_all_return_types_give_one_flat_list(encoded):  # case D11
    assert text.token_ids(encoded) == IDS
    assert all(type(i) is int for i in text.token_ids(encoded))


@pytest.mark.parametrize("encoded", ["text", [[1, 2], [3, 4]], [1.5], {"input_ids": ["a"]}])
def test_anything_else_is_refused(encoded):
    with pytest.raises(ValueError, match="one sequence of token ids"):
        text.token_ids(encoded)


def test_real_tokenizers_give_flat_lists(tokenizer):
    ids = text.encode(tokenizer, "ha ha 世界 😀")
    assert tokenizer.decode(ids) == "ha ha 世界 😀"
    rendered = text.render_chat(tokenizer, MESSAGES)
    assert all(type(i) is int for i in rendered)
    assert tokenizer.decode(rendered).startswith("<|im_start|>user\nWhat is 12 + 30?<|im_end|>")


def test_the_thinking_flag_changes_the_rendered_ids(tokenizer):  # case D12
    off = text.render_chat(tokenizer, MESSAGES, enable_thinking=False)
    on = text.render_chat(tokenizer, MESSAGES, enable_thinking=True)
    assert off[: len(on)] == on
    assert tokenizer.decode(off[len(on) :]) == "<think>\n\n</think>\n\n"


def test_a_tokenizer_without_template_says_so(tokenizer):
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        text.render_chat(plain, MESSAGES)


def test_a_tokenizer_is_named_by_its_files(tmp_path):
    assert text.tokenizer_fingerprint(tmp_path) is None
    names = []
    for file in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / file).write_text("{}")
        names.append(text.tokenizer_fingerprint(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    names.append(text.tokenizer_fingerprint(tmp_path))
    assert len(set(names)) == 4
    assert text.tokenizer_fingerprint(tmp_path) == names[-1]
