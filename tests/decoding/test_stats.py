"""The arithmetic of acceptance, on hand-made rounds (evaluation metrics)."""

import pytest

from specjax.decoding import stats


def test_the_worked_example():
    accepted, drafted = [3, 0, 15, 3], [15] * 4
    emitted = [a + 1 for a in accepted]
    assert stats.acceptance_length(emitted) == 6.25
    assert stats.acceptance_rate(accepted, drafted) == 0.35
    per_position = stats.acceptance_per_position(accepted, 15)
    assert per_position[:4] == [0.75, 0.75, 0.75, 0.25]
    assert per_position[14] == 0.25
    assert sum(per_position) == 5.25
    conditional = stats.conditional_acceptance(accepted, 15)
    assert conditional[:4] == [0.75, 1, 1, pytest.approx(1 / 3)]
    assert conditional[14] == 1
    assert stats.verify_efficiency(emitted, drafted) == 25 / 64


def test_what_was_cut_is_not_counted():
    """Blocks of 16 fully accepted, 50 new tokens: the last round emits one token only."""
    made = stats.PromptStats(3, 50, [15] * 4, [15] * 4, [16, 16, 16, 1])
    assert made.tau == 12.25
    assert made.rounds == 4
    assert sum(made.emitted) + 1 == made.new_tokens


def test_pooled_and_per_prompt_means_differ():
    rounds = [[16, 16], [1] * 8]
    pooled = stats.acceptance_length([n for each in rounds for n in each])
    macro = sum(stats.acceptance_length(each) for each in rounds) / 2
    assert (pooled, macro) == (4.0, 8.5)


def test_no_round_is_no_figure():
    assert stats.PromptStats(3).tau is None
    assert stats.acceptance_rate([], []) is None
    assert stats.verify_efficiency([], []) is None
    assert stats.acceptance_per_position([], 3) == []
    assert stats.conditional_acceptance([0, 0], 3) == [0.0, None, None]
