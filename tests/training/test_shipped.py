"""The drafter inside the package: it loads by name, changes no token, and is worth what is said."""

import numpy as np

import specjax
from specjax import evaluation

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
