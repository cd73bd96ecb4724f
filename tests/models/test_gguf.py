"""GGUF to a Hugging Face directory, on tiny files written here as llama.cpp's converter does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import (
    DIM,
    FFN,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPM_KEYS,
    SPM_TOKENS,
    TOKENS,
    VOCAB,
    WIDTH,
    gguf_tensors,
    hf_tensors,
    interleave,
    write_gguf,
)
from transformers import AutoTokenizer

from specjax.models import packaged
from specjax.models.gguf import convert_gguf


def convert(tmp_path, **options):
    convert_gguf(write_gguf(tmp_path / "model.gguf", **options), tmp_path / "out")
    return tmp_path / "out"


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back(tmp_path, tied):
    expected = hf_tensors(tied)
    directory = convert(tmp_path, tensors=gguf_tensors(expected))
    found = load_file(directory / "model.safetensors")
    assert found.keys() == expected.keys()
    quantised = "model.layers.1.mlp.down_proj.weight"
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        if name == quantised:  # 127 steps of a float16 scale for 32 neighbours
            blocks = np.abs(value).reshape(-1, 32)
            error = np.abs(found[name] - value).reshape(-1, 32)
            assert error.max() > 0
            assert np.all(error <= blocks.max(1, keepdims=True) / 127 * 0.57)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert config_of(directory)["tie_word_embeddings"] is tied


def test_interleaved_rotation_equals_rotate_half_after_the_conversion():
    """The order of `interleave` is the one that llama.cpp's rotation needs."""
    weight = hf_tensors()["model.layers.0.self_attn.q_proj.weight"]
    angle = 3.0 * 1e4 ** (-np.arange(DIM // 2) / (DIM // 2))
    x = np.linspace(-1, 1, WIDTH)
    pairs = (interleave(weight) @ x).reshape(HEADS, DIM // 2, 2)
    a, b = np.moveaxis((weight @ x).reshape(HEADS, 2, DIM // 2), 1, 0)
    cos, sin = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(pairs[..., 0] * cos - pairs[..., 1] * sin, a * cos - b * sin)
    np.testing.assert_allclose(pairs[..., 1] * cos + pairs[..., 0] * sin, b * cos + a * sin)


def test_config(tmp_path):
    directory = convert(tmp_path, keys={"tokenizer.ggml.eot_token_id": 0})
    config = config_of(directory)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert config | expected == config
    assert "rope_scaling" not in config
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


def test_byte_level_tokenizer(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path))
    ids = {token: i for i, token in enumerate(TOKENS)}
    assert len(tokenizer) == VOCAB
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    text = "hello hello12<|im_end|><think>"
    expected = ["hello", "Ġhello", "1", "2", "<|im_end|>", "<think>"]  # smollm splits digits
    assert tokenizer(text)["input_ids"] == [ids[token] for token in expected]
    assert tokenizer.decode([2, ids["<think>"]], skip_special_tokens=True) == "<think>"
    for text in ["", " two  spaces ", "中文 😀🏳️‍🌈", "don't . , !\n\t\r\n", "½ é e\u0301"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message)["input_ids"] == [1, ids["hello"], 2]


@pytest.mark.parametrize(
    ("keys", "prepended"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": None}, False),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "gpt-2"}, False),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.pre": "llama-bpe"}, False),
        (SPM_KEYS, True),
        (SPM_KEYS | {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos_follows_the_flag_and_then_the_kind(tmp_path, keys, prepended):
    vocab = len(keys.get("tokenizer.ggml.tokens", TOKENS))
    directory = convert(tmp_path, keys=keys, tensors=gguf_tensors(hf_tensors(vocab=vocab)))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("a")["input_ids"]
    assert (ids[0] == 1) is prepended
    assert len(ids) == 1 + prepended
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == ids[prepended:]
    assert tokenizer("")["input_ids"] == [1] * prepended


def test_eos_is_appended_when_the_file_says_so(tmp_path):
    keys = {"tokenizer.ggml.add_eos_token": True}
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path, keys=keys))
    assert tokenizer("hello")["input_ids"] == [TOKENS.index("hello"), 2]


def test_split_of_llama3(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        convert(tmp_path, keys={"tokenizer.ggml.pre": "llama-bpe"})
    )
    tokens = tokenizer.convert_ids_to_tokens(
        tokenizer("hello12", add_special_tokens=False).input_ids
    )
    assert tokens == ["hello", "12"]  # up to three digits stay together


def test_sentencepiece_tokenizer(tmp_path):
    tensors = gguf_tensors(hf_tensors(vocab=len(SPM_TOKENS)))
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path, keys=SPM_KEYS, tensors=tensors))
    ids = tokenizer("aaa b", add_special_tokens=False)["input_ids"]
    # "▁a" scores best, then "aa"; "b" has no token.
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "aa", "▁", "<0x62>"]
    for text in ["", "a", " a", "aaaa  a", "中😀\n"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    plain = SPM_KEYS | {"tokenizer.ggml.add_space_prefix": False}
    write_gguf(tmp_path / "plain.gguf", keys=plain, tensors=tensors)
    convert_gguf(tmp_path / "plain.gguf", tmp_path / "plain")
    ids = AutoTokenizer.from_pretrained(tmp_path / "plain")("a")["input_ids"]
    assert ids == [1, SPM_TOKENS.index("a")]


def test_named_chat_templates(tmp_path):
    directory = convert(tmp_path, keys={"tokenizer.chat_template.short": "{{ 'x' }}"})
    tokenizer = AutoTokenizer.from_pretrained(directory)
    message = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(message, chat_template="short", tokenize=False)
    assert rendered == "x"
    assert "hello" in tokenizer.apply_chat_template(message, tokenize=False)


def llama3_factors(factor=8.0, high=4.0):
    wavelengths = 2 * np.pi * 5e5 ** (np.arange(0, DIM, 2) / DIM)
    values = []
    for length in wavelengths:  # the published rule, one frequency after the other
        if length < 8192 / high:
            values.append(1.0)
        elif length > 8192:
            values.append(factor)
        else:
            smooth = (8192 / length - 1.0) / (high - 1.0)
            values.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(values, np.float32)


def test_rope_scaling(tmp_path):
    tensors = gguf_tensors(hf_tensors())
    directory = convert(tmp_path, tensors=tensors | {"rope_freqs.weight": llama3_factors()})
    assert config_of(directory)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for number, keys in enumerate([{"llama.rope.scaling.type": "linear"}, {}]):
        path = tmp_path / f"{number}.gguf"
        write_gguf(path, keys=keys | {"llama.rope.scaling.factor": 4.0}, tensors=tensors)
        convert_gguf(path, tmp_path / str(number))
        scaling = config_of(tmp_path / str(number))["rope_scaling"]
        assert scaling == {"rope_type": "linear", "factor": 4.0}


def changed(change=(), without=()):
    tensors = gguf_tensors(hf_tensors()) | dict(change)
    return {"tensors": {n: t for n, t in tensors.items() if n not in without}}


ZEROS = np.zeros((WIDTH, WIDTH), np.float32)
BAD = [
    ({"architecture": "qwen2"}, "general.architecture 'qwen2'"),
    (changed(without=["blk.1.attn_v.weight"]), r"tensors missing: blk\.1\.attn_v\.weight"),
    (changed(without=["token_embd.weight"]), "token_embd.weight is missing"),
    (changed({"blk.0.attn_q.bias": ZEROS[0]}), r"not supported: blk\.0\.attn_q\.bias"),
    (changed({"blk.2.attn_q.weight": ZEROS}), r"not supported: blk\.2\.attn_q\.weight"),
    (changed({"blk.0.attn_k.weight": ZEROS}), r"blk\.0\.attn_k\.weight has shape \(32, 32\)"),
    (changed({"rope_freqs.weight": llama3_factors(high=2.0) * 1.01}), "rope_freqs.weight"),
    (changed({"rope_freqs.weight": np.ones(3, np.float32)}), "rope_freqs.weight"),
    ({"keys": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type 'yarn'"),
    ({"keys": {"llama.logit_scale": 2.0}}, "llama.logit_scale"),
    ({"keys": {"llama.expert_count": 8}}, "llama.expert_count"),
    ({"keys": {"llama.block_count": None}}, "llama.block_count is missing"),
    ({"keys": {"llama.block_count": 3}}, r"tensors missing: blk\.2\."),
    ({"keys": {"llama.attention.head_count_kv": 3}}, "3 key/value heads"),
    ({"keys": {"llama.attention.head_count_kv": [1, 2]}}, "head_count_kv differs"),
    ({"keys": {"llama.rope.dimension_count": 4}}, "rope.dimension_count = 4"),
    ({"keys": {"llama.vocab_size": 5}}, "llama.vocab_size = 5"),
    ({"keys": {"split.count": 2}}, "split.count"),
    ({"keys": {"tokenizer.ggml.model": "t5"}}, "tokenizer.ggml.model 't5'"),
    ({"keys": {"tokenizer.ggml.pre": "falcon"}}, "tokenizer.ggml.pre 'falcon'"),
    ({"keys": {"tokenizer.ggml.pre": None}}, "tokenizer.ggml.pre is missing"),
    ({"keys": {"tokenizer.ggml.merges": None}}, "tokenizer.ggml.merges is missing"),
    ({"keys": {"tokenizer.ggml.merges": ["h q"]}}, "tokenizer.ggml.merges"),
    ({"keys": {"tokenizer.ggml.tokens": TOKENS[:-1]}}, "tokenizer.ggml.tokens has"),
    ({"keys": {"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}}, "a token twice"),
    ({"keys": {"tokenizer.ggml.token_type": [1]}}, "tokenizer.ggml.token_type has 1 entries"),
    ({"keys": {"tokenizer.ggml.eos_token_id": VOCAB}}, "tokenizer.ggml.eos_token_id"),
    (
        {"keys": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}},
        "tokenizer.ggml.bos_token_id is missing",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_files_are_refused_by_name_and_leave_nothing(tmp_path, options, message):
    path = write_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=message) as error:
        convert_gguf(path, tmp_path / "out")
    assert str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_truncated_files_are_refused_at_every_length(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [0, 3, 20, *np.linspace(50, len(whole) - 40, 40).astype(int)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated or not a GGUF file"):
            convert_gguf(path, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"whole.gguf", "cut.gguf"}


def test_other_errors(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="taken"):
        convert_gguf(path, taken)
    assert [p.name for p in taken.iterdir()] == ["mine.txt"]
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install specjax\[gguf\]"):
        convert_gguf(path, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "taken"}


SMOLLM2 = packaged.cache_dir() / "smollm2-135m"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="run make smollm2")


@needs_smollm2
def test_smollm2_tokenizer():
    golden = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
    items = json.loads(golden.read_text(encoding="utf-8"))["items"]
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    for item in items:
        assert tokenizer(item["prompt"])["input_ids"] == item["prompt_ids"]
        assert tokenizer.decode(item["greedy_ids"]) == item["text"]
    for text in [
        "",
        "  two  ",
        "中文字符 日本語",
        "😀🏳️‍🌈 é e\u0301",
        "1234 ½\n\n\t\r\n",
        "a . , !",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    message = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    assert encoded["input_ids"] == items[3]["prompt_ids"]
