"""Plain decoding: golden tokens, finish reasons and clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

import specjax
from specjax.decoding import request
from specjax.decoding.drafting import DFlash, Plain
from specjax.models import hub, packaged

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(file):
    return json.loads((GOLDEN / file).read_text(encoding="utf-8"))["items"]


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


@pytest.mark.parametrize("item", golden("stories260k_greedy.json"), ids=lambda item: item["prompt"])
def test_stories260k_tells_the_golden_stories(stories, item):
    want = item["greedy_ids"]
    out = specjax.generate(stories, item["prompt"], max_new_tokens=len(want))
    assert out.tokens == want
    assert out.finish_reason == "length"
    by_ids = specjax.generate(stories, item["prompt_ids"], max_new_tokens=len(want))
    assert by_ids.tokens == want


def test_stories260k_gives_the_published_text(stories):
    text = json.loads((GOLDEN / "stories260k_greedy.json").read_text())["empty_prompt_text"]
    item = golden("stories260k_greedy.json")[0]
    out = specjax.generate(stories, "", max_new_tokens=len(item["greedy_ids"]))
    assert text.startswith(out.text.strip())
    assert len(out.text) > 100


@pytest.mark.slow
@pytest.mark.skipif(not (packaged.cache_dir() / "smollm2-135m").is_dir(), reason="run make smollm2")
@pytest.mark.parametrize(
    "item", golden("smollm2_greedy.json"), ids=lambda item: item["prompt"][:20]
)
def test_smollm2_gives_the_golden_tokens(item):
    target = hub.load_target("smollm2-135m")
    want = item["greedy_ids"]
    out = specjax.generate(target, item["prompt_ids"], max_new_tokens=len(want))
    assert out.tokens == want


def test_decoding_continues_a_prompt_as_one_text(stories):
    whole = specjax.generate(stories, "Once upon a time", max_new_tokens=24)
    assert whole.text.startswith(", there was")  # no space lost or added at the seam
    first = specjax.generate(stories, "Once upon a time", max_new_tokens=10)
    ids = [*stories.tokenizer("Once upon a time").input_ids, *first.tokens]
    rest = specjax.generate(stories, ids, max_new_tokens=14)
    assert first.tokens + rest.tokens == whole.tokens


def test_an_end_of_text_id_stops(stories):
    """The model ends its stories with BOS; the id is kept and nothing follows it."""
    out = specjax.generate(stories, "The dog", max_new_tokens=400)
    assert out.finish_reason == "stop"
    assert out.tokens[-1] in stories.eos_token_ids
    assert not set(out.tokens[:-1]) & set(stories.eos_token_ids)


def test_the_last_position_is_used_and_no_more(tmp_path):  # case B9
    config = tiny.target_config("qwen3", max_position_embeddings=64, eos_token_id=...)
    target = hub.load_target(tiny.write(tmp_path, config, tiny.target_tensors(config)))
    prompt = list(np.random.RandomState(0).randint(0, 97, 60))
    assert len(specjax.generate(target, prompt, max_new_tokens=4).tokens) == 4
    with pytest.raises(ValueError, match=r"prompt of 60 tokens and max_new_tokens 5.*64 positions"):
        specjax.generate(target, prompt, max_new_tokens=5)


def test_auto_takes_the_rule_that_keeps_most_of_such_drafts(stories):
    drafter = specjax.load_drafter("stories260k-dflash", stories)
    block, lookup = DFlash(drafter.config, 7), specjax.NGram()
    warm, cold, mixed = np.ones(2), np.zeros(2), np.array([0.0, 0.7])
    for network, heat, steady, want in [
        (block, warm, True, ("block", "independent")),
        (block, mixed, True, ("block", "independent")),
        (block, cold, True, ("match", "greedy")),
        (block, warm, False, ("match", "coupled")),  # its rounds follow the clock
        (lookup, warm, True, ("match", "coupled")),
        (Plain(), warm, True, ("match", "coupled")),
        (object(), warm, True, ("match", "coupled")),
    ]:
        assert request.rule("auto", heat, network, steady) == want
    settings = {"drafter": drafter, "max_new_tokens": 60, "temperature": 1.0, "eos_token_id": []}
    out = specjax.generate(stories, "The dog", **settings)
    again = specjax.generate(stories, "The dog", verify="block", **settings)
    assert out.stats.rule == out.settings["rule"] == "block"
    assert out.tokens == again.tokens


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 4, "prompts must be"),
        ([3, 512], 4, "token id 512 is outside the vocabulary"),
        ([-1], 4, "token id -1"),
        ([1], 0, "max_new_tokens must be at least 1"),
        ([1] * 513, 4, "prompt of 513 tokens"),
    ],
)
def test_bad_input_is_refused_before_any_compute(stories, prompt, limit, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(stories, prompt, max_new_tokens=limit)


def test_an_empty_text_without_bos_is_refused(tmp_path):  # case B11
    config = tiny.target_config("qwen3", vocab_size=320)
    files = tiny.tokenizer_files()
    target = hub.load_target(
        tiny.write(tmp_path, config, tiny.target_tensors(config), tokenizer=files)
    )
    with pytest.raises(ValueError, match="a prompt is empty"):
        specjax.generate(target, "")
