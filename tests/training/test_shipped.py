"""The drafters inside the package: they load by name, change no token, are worth what is said."""

import numpy as np
import pytest

import specjax
from specjax import evaluation
from specjax.models import packaged
from specjax.models.reuse import name_of

PROMPTS = "experiments/prompts/stories-test.jsonl"


@pytest.mark.parametrize("name", [name for name in packaged.INSIDE if name != "stories260k"])
def test_a_packaged_drafter_accepts_long_and_changes_nothing(name):
    """With the reuse that it was trained for, if any, and with that switched off."""
    assert sum(file.stat().st_size for file in packaged.resolve(name).iterdir()) < 1_000_000
    target = specjax.load_target("stories260k")
    drafter = specjax.load_drafter(name, target)
    prompts = [turns[0] for turns in evaluation.read_prompts(PROMPTS, 16)]
    call = {"max_new_tokens": 128, "temperature": 0.0, "batch_size": 16}
    plain = specjax.generate(target, prompts, **call)
    trained = drafter.config.reuse and name_of(drafter.config.reuse)
    assert trained is None or name == f"stories260k-{trained}"
    for reuse in (None,) if trained is None else (trained, "off"):
        fast = specjax.generate(target, prompts, drafter=drafter, reuse=reuse, **call)
        assert fast.settings["reuse"] == (None if reuse == "off" else reuse)
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
