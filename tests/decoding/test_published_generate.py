"""Whole greedy generations against the published loop: tokens, and new tokens of every round."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

import specjax

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "generate.npz")
CASES = [key.removesuffix("/seed") for key in GOLDEN.files if key.endswith("/seed")]
PROMPTS = [row[row >= 0].tolist() for row in GOLDEN["prompts"]]


def load(case, directory):
    seed = int(GOLDEN[f"{case}/seed"])
    config = json.loads(str(GOLDEN[f"{case}/target"]))
    tensors = tiny.target_tensors(config, seed)
    target = specjax.load_target(tiny.write(directory / "target", config, tensors))
    config = json.loads(str(GOLDEN[f"{case}/drafter"]))
    tensors = tiny.drafter_tensors(config, seed)
    return target, specjax.load_drafter(tiny.write(directory / "d", config, tensors), target)


def comparable(emitted, limit, block):
    """How many rounds had room for a whole block.

    The published loop shortens the last blocks to the limit and drafts them with fewer masks; ours
    drafts a whole block and trims what it emits.
    """
    before = np.cumsum(emitted) - emitted  # the anchor is the token behind these
    return int((limit - before >= block).sum())


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_rounds_equal_the_published_loop(case, tmp_path):
    target, drafter = load(case, tmp_path)
    tokens = GOLDEN[f"{case}/tokens"]
    limit = tokens.shape[1]
    out = specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=limit)
    assert out.tokens == tokens.tolist()
    for stats, counts in zip(out.stats, GOLDEN[f"{case}/emitted"], strict=True):
        counts = counts[counts > 0]
        rounds = comparable(counts, limit, drafter.config.block_size)
        assert len(set(counts[:rounds].tolist())) >= 2  # else equality would show little
        assert stats.emitted[:rounds] == counts[:rounds].tolist()
        assert sum(stats.emitted) == sum(counts) == limit - 1
