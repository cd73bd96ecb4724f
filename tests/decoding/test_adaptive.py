"""num_draft="auto": the arithmetic of the choice, and equal output whatever it chooses."""

from types import SimpleNamespace

import numpy as np
import pytest
from scripted import Scripted, script

import specjax
from specjax.decoding import adaptive
from specjax.decoding.state import Decoder


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


def made(stories, K=7, seconds=(1.0, 1.5, 2.0)):
    known = adaptive.Adaptive(Decoder(stories.config, Scripted(K)))
    known.seconds = dict(zip(known.lengths, seconds, strict=True))
    return known


def log(accepted, K=7):
    """Infos of one row whose rounds accepted so many of K drafts."""
    accepted = np.array(accepted)[:, None]
    return SimpleNamespace(
        emitted=accepted + 1, accepted=accepted, proposed=np.full_like(accepted, K)
    )


def test_expected_tokens_follow_the_rounds_seen(stories):
    known = made(stories)
    known.observe(log([7, 3, 0, 2]), 7)
    # Survival: .75, .75, .5, .25, .25, .25, .25
    assert known.tokens(7) == pytest.approx(4.0)
    assert known.tokens(4) == pytest.approx(1 + 0.75 + 0.75 + 0.5 + 0.25)
    assert known.tokens(0) == 1.0


def test_rounds_without_a_proposal_count_against_the_drafter(stories):
    known = made(stories)
    nine_of_ten = log([7, *[0] * 9])
    nine_of_ten.proposed[1:] = 0
    known.observe(nine_of_ten, 7)
    assert known.tokens(7) == pytest.approx(1.7)


def test_an_answer_too_short_to_time_leaves_no_trace(stories):
    adaptive.known.cache_clear()
    arguments = dict(drafter=specjax.NGram(5), num_draft="auto", eos_token_id=[])
    specjax.generate(stories, "The dog", max_new_tokens=4, **arguments)
    decoder = Decoder(stories.config, specjax.NGram(5))
    known = adaptive.known(f"stories260k {specjax.NGram(5)}", decoder, 1, 192, "greedy")
    assert known.seconds == {}
    specjax.generate(stories, "The dog", max_new_tokens=100, **arguments)
    assert all(0 < seconds < 0.5 for seconds in known.seconds.values())


@pytest.mark.parametrize(
    ("accepted", "best"),
    [([7] * 4, 7), ([0] * 4, 0), ([2, 1, 2, 1], 4), ([1, 0, 0, 0], 0)],
)
def test_the_length_with_the_most_tokens_per_second_wins(stories, accepted, best):
    known = made(stories)
    known.observe(log(accepted), 7)
    assert known.lengths == [0, 4, 7]
    assert known.best(7) == best


def test_the_present_length_stays_unless_clearly_beaten(stories):
    known = made(stories, seconds=(1.0, 1.5, 1.53))
    known.observe(log([1] * 4), 7)
    assert known.best(4) == 4
    assert known.best(7) == 7  # 2 / 1.5 against 2 / 1.53: within the margin


def test_a_drafter_that_did_not_pay_is_tried_again_now_and_then(stories):
    known = made(stories)
    assert known.first() == 7
    known.observe(log([0] * 4), 7)
    assert [known.first() for _ in range(2, adaptive.RETRY)] == [0] * (adaptive.RETRY - 2)
    assert known.first() == 7


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
def test_the_output_stays_that_of_plain_decoding(stories, right, settings, monkeypatch):
    prompt = stories.tokenizer("The dog").input_ids
    want = specjax.generate(stories, prompt, max_new_tokens=60, eos_token_id=[], **settings)
    adaptive.known.cache_clear()
    times = {0: 1.0, 4: 1.5, 7: 2.0}
    monkeypatch.setattr(adaptive, "_measure", lambda known, *rest: known.seconds.update(times))
    out = specjax.generate(
        stories,
        prompt,
        drafter=(Scripted(7), script([prompt], [want.tokens], right, 512)),
        num_draft="auto",
        max_new_tokens=60,
        eos_token_id=[],
        **settings,
    )
    assert out.tokens == want.tokens
    assert sum(out.stats.emitted) + 1 == 60
    assert out.stats.drafted[:4] == [7] * 4
    settled = {0: 0, 3: 4, 7: 7}[right]
    assert set(out.stats.drafted[4:]) == {settled}


def test_rounds_are_really_measured(stories):
    adaptive.known.cache_clear()
    prompt = stories.tokenizer("The dog").input_ids
    arguments = dict(drafter=specjax.NGram(5), num_draft="auto", max_new_tokens=100)
    out = specjax.generate(stories, prompt, eos_token_id=[], **arguments)
    assert (
        out.tokens == specjax.generate(stories, prompt, max_new_tokens=100, eos_token_id=[]).tokens
    )
    assert adaptive.known.cache_info().currsize == 1
    assert out.settings["num_draft"] == "auto"


def test_a_word_that_is_not_auto_is_refused(stories):
    with pytest.raises(ValueError, match="num_draft='many'"):
        specjax.generate(stories, "The dog", drafter=specjax.NGram(5), num_draft="many")
