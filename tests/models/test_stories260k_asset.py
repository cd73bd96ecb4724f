"""The packaged model: its weights by an independent forward, its tokenizer by another encoder."""

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from specjax.models import packaged

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "stories260k_greedy.json").read_text(encoding="utf-8")
)
BOS, FIRST_BYTE, FIRST_TOKEN = 1, 3, 259
TEXTS = [
    "",
    " ",
    "  ",
    "Once upon a time",
    " Once upon a time",
    "Lily and Tom went to the park.\nThey played!\n\n",
    "little happy friend upon with that there very",
    "ooo oooo ooooo ppp pppp lll lllll",
    "thethethe the  the   the",
    "UPPER lower MiXeD",
    "0123456789 3.14 1,000",
    "tabs\tand\r\nreturns\r",
    "don't “quote” \u2018single\u2019 \u2013 — … ™ €",
    "café señor naïve",
    "cafe\u0301 combining",
    "中文字符",
    "日本語のテキスト",
    "한국어",
    "Привет, мир",
    "שלום עולם",
    "😀",
    "a😀b 🏳️‍🌈 👩‍👩‍👧",
    "𝄞 𐍈",
    "\x00\x01\x7f",
    "\u2581under\u2581score",
    "\u00a0no-break\u200aspace\u200b",
    "<0x41> < s > <unk",
    "{json: [1, 2], 'k': \"v\"} | \\ / ` ~ ^ _ @ #",
    "x" * 200,
    "She said, “I want to play with you,” and he was very, very happy. " * 5,
    "\n",
    "trailing space ",
]


@pytest.fixture(scope="module")
def directory():
    return packaged.resolve("stories260k")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def encode_by_score(text, tokens):
    """llama2.c's encoder, rescanning after every join. A lower id is a better score here."""
    ids_of = {token: i for i, token in enumerate(tokens) if i >= FIRST_TOKEN}
    ids = [ids_of[" "]] if text else []
    for character in text:
        known = ids_of.get(character)
        ids += [FIRST_BYTE + b for b in character.encode()] if known is None else [known]
    while True:
        unions = [
            (ids_of.get(tokens[a] + tokens[b], len(tokens)), place)
            for place, (a, b) in enumerate(itertools.pairwise(ids))
        ]
        best, place = min(unions, default=(len(tokens), 0))
        if best == len(tokens):
            return [BOS, *ids]
        ids[place : place + 2] = [best]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_joining_by_score_and_decode_gives_the_text_back(tokenizer, text):
    tokens = tokenizer.convert_ids_to_tokens(range(512))
    ids = tokenizer(text)["input_ids"]
    assert ids == encode_by_score(text, tokens)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert len(tokenizer) == 512
    assert tokenizer("", add_special_tokens=False)["input_ids"] == []
    assert tokenizer("<s>", add_special_tokens=False)["input_ids"] == [BOS]
    assert tokenizer(["The dog", ""])["input_ids"] == [[1, 291, 400, 428], [1]]


def test_golden_texts(tokenizer):
    for item in GOLDEN["items"]:
        assert tokenizer(item["prompt"])["input_ids"] == item["prompt_ids"]
    story = tokenizer.decode(GOLDEN["items"][0]["greedy_ids"])
    assert GOLDEN["empty_prompt_text"].startswith(story)
    assert len(story) > 500


def test_files_and_manifest(directory):
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in directory.iterdir()) < 1_200_000
    tensors = load_file(directory / "model.safetensors")
    assert sum(t.size for t in tensors.values()) == 260_032
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}


class Forward:
    """One token at a time, in NumPy, with the layout that config.json and rotate_half imply."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.keys = [[] for _ in range(self.config["num_hidden_layers"])]
        self.values = [[] for _ in self.keys]

    def norm(self, x, name):
        mean = np.mean(x * x) + self.config["rms_norm_eps"]
        return x / np.sqrt(mean) * self.weights[name + ".weight"]

    def rotate(self, x, position):
        half = x.shape[1] // 2
        angle = position * self.config["rope_theta"] ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def project(self, block, name, x):
        return self.weights[f"{block}{name}.weight"] @ x

    def __call__(self, token, position):
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        group = heads // self.config["num_key_value_heads"]
        x = self.weights["model.embed_tokens.weight"][token]
        for layer in range(len(self.keys)):
            block = f"model.layers.{layer}."
            project = partial(self.project, block)
            h = self.norm(x, block + "input_layernorm")
            q, k, v = (
                project(f"self_attn.{name}_proj", h).reshape(-1, dim) for name in ("q", "k", "v")
            )
            self.keys[layer].append(np.repeat(self.rotate(k, position), group, axis=0))
            self.values[layer].append(np.repeat(v, group, axis=0))
            scores = np.einsum("hd,shd->hs", self.rotate(q, position), self.keys[layer])
            weights = np.exp(scores / np.sqrt(dim) - scores.max(1, keepdims=True) / np.sqrt(dim))
            weights /= weights.sum(1, keepdims=True)
            mixed = np.einsum("hs,shd->hd", weights, self.values[layer]).reshape(-1)
            x = x + project("self_attn.o_proj", mixed)
            h = self.norm(x, block + "post_attention_layernorm")
            gate = project("mlp.gate_proj", h)
            h = gate / (1 + np.exp(-gate)) * project("mlp.up_proj", h)
            x = x + project("mlp.down_proj", h)
        return self.weights["model.embed_tokens.weight"] @ self.norm(x, "model.norm")


@pytest.mark.parametrize("item", GOLDEN["items"], ids=lambda item: item["prompt"] or "empty")
def test_greedy_tokens_equal_the_golden_ones(directory, item):
    forward = Forward(directory)
    count = len(item["greedy_ids"])
    ids = item["prompt_ids"] + item["greedy_ids"]
    logits = [forward(token, place) for place, token in enumerate(ids[:-1])][-count:]
    assert [int(row.argmax()) for row in logits] == item["greedy_ids"]
    best = np.sort(logits, axis=1)[:, -2:]
    np.testing.assert_allclose(best[:, 1] - best[:, 0], item["top2_logit_margin"], atol=2e-4)


def test_a_story_ends_with_bos(directory):
    """Why generation_config.json lists both: the model never says EOS."""
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [2, 1]
    forward, ids = Forward(directory), list(GOLDEN["items"][1]["prompt_ids"])
    place = 0
    while len(ids) < 300:
        logits = forward(ids[place], place)
        place += 1
        if place == len(ids):
            ids.append(int(logits.argmax()))
            if ids[-1] in ends:
                break
    assert ids[-1] == BOS
