"""The drafter inside the package: it loads by name, changes no token, and is worth what is said."""

import numpy as np
import pytest

import specjax
from specjax import evaluation
from specjax.models import packaged

PROMPTS = "experiments/prompts/stories-test.jsonl"


def test_the_packaged_drafter_accepts_long_and_changes_nothing():
    target = specjax.load_target("stories260k")
    drafter = specjax.load_drafter("stories260k-dflash", target)
    prompts = [turns[0] for turns in evaluation.read_prompts(PROMPTS, 16)]
    call = {"max_new_tokens": 128, "temperature": 0.0, "batch_size": 16}
    plain = specjax.generate(target, prompts, **call)
    fast = specjax.generate(target, prompts, drafter=drafter, **call)
    assert fast.tokens == plain.tokens
    emitted = np.concatenate([stats.emitted for stats in fast.stats])
    assert emitted.mean() > 3.0


@pytest.mark.slow
@pytest.mark.skipif(not (packaged.cache_dir() / "smollm2-135m").is_dir(), reason="run make smollm2")
def test_the_smollm2_drafter_accepts_long_and_changes_nothing():
    target = specjax.load_target("smollm2-135m")
    drafter = specjax.load_drafter("experiments/drafters/smollm2-135m-dflash", target)
    prompts = evaluation.read_prompts("experiments/prompts/gsm8k-test.jsonl", 8)
    chats = [[{"role": "user", "content": turns[0]}] for turns in prompts]
    call = {"max_new_tokens": 64, "temperature": 0.0}
    plain = specjax.generate(target, chats, **call)
    fast = specjax.generate(target, chats, drafter=drafter, **call)
    assert fast.tokens == plain.tokens
    emitted = np.concatenate([stats.emitted for stats in fast.stats])
    assert emitted.mean() > 2.0
