"""Expected acceptance lengths in closed form against the loop, which draws."""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest
import tiny

import specjax
from specjax.decoding.request import RULES
from specjax.models import hub
from specjax.models.reuse import DFlow
from specjax.training import expected, heldout
from specjax.training.data import Documents

VOCAB = 6  # so few tokens that a random drafter is often right
NEW = 40


def documents(prompts, answers, **manifest):
    texts = [np.asarray([*p, *a], np.int32) for p, a in zip(prompts, answers, strict=True)]
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return Documents(np.concatenate(texts), starts, lengths, manifest)


@pytest.fixture(scope="module", params=["fill"])
def pair(request, tmp_path_factory):
    """A random target and a random drafter, laws far from flat."""
    folder = tmp_path_factory.mktemp(request.param)
    config = tiny.target_config("qwen3", vocab_size=VOCAB, eos_token_id=5, bos_token_id=0)
    tensors = tiny.target_tensors(config, 28)
    target = hub.load_target(tiny.write(folder / "t", config, tensors), dtype="float32")
    own = tiny.drafter_config(
        vocab_size=VOCAB,
        dflash_config={"mask_token_id": 4, "target_layer_ids": list(tiny.TAPS)},
        sample_from_anchor=request.param == "next",
    )
    folder = tiny.write(folder / "d", own, tiny.drafter_tensors(own, 28))
    return target, hub.load_drafter(folder, target)


def prompts(count):
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, rng.integers(3, 12)).tolist() for _ in range(count)]


def decoded(pair, rule, count, **settings):
    """Texts that the loop decoded under a rule, and the rounds of each."""
    (target, drafter), asked = pair, prompts(count)
    out = specjax.generate(
        target,
        asked,
        drafter=drafter,
        verify=rule,
        max_new_tokens=NEW,
        batch_size=64,
        seed=3,
        eos_token_id=[],
        **settings,
    )
    known = documents(asked, out.tokens, **settings)
    return known, np.array([one.rounds for one in out.stats])


def distance(pair, known, counted, rule):
    """By how many standard errors the counted rounds miss the closed form of their own texts."""
    target, drafter = pair
    forms = expected.rounds(target, drafter.config, drafter.params, known)
    assert forms.keys() == RULES.keys()
    off = counted - forms[rule]
    return abs(off.mean()) / (off.std() / np.sqrt(len(off)))


@pytest.mark.filterwarnings("ignore:acceptance length")
def test_a_rule_decodes_as_long_as_its_closed_form_says(pair):
    known, counted = decoded(pair, "block", 192, temperature=0.7)
    assert distance(pair, known, counted, "block") < 4.5
    assert distance(pair, known, counted, "token") > 6  # another rule is told apart


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:acceptance length")
@pytest.mark.parametrize(
    ("pair", "rule"),
    [("fill", "match"), ("fill", "block"), ("next", "match-independent"), ("next", "token")],
    indirect=["pair"],
)
def test_so_it_does_with_filters_and_in_both_layouts(pair, rule):
    known, counted = decoded(pair, rule, 512, temperature=0.8, top_k=5, top_p=0.95)
    assert distance(pair, known, counted, rule) < 4.5
    for other in RULES.keys() - {rule}:
        assert distance(pair, known, counted, other) > 4.5


@pytest.mark.filterwarnings("ignore:acceptance length")
def test_at_temperature_0_it_is_the_walk_whatever_the_rule(pair):
    (target, drafter), drafts = pair, {"num_draft": 3}
    known, counted = decoded(pair, "match", 12, temperature=0.0, **drafts)
    made = expected.rounds(target, drafter.config, drafter.params, known, **drafts)
    for rule in RULES:
        np.testing.assert_allclose(made[rule], counted, atol=1e-5)
    known = documents([[1, 2], *prompts(7)], [[3], *([4] * n for n in range(1, 8))])
    report = expected.expected(target, drafter.config, drafter.params, known, limit=7, **drafts)
    walk = heldout.walk(target, drafter.config, drafter.params, known, limit=7, **drafts)
    assert (report["answers"], report["temperature"], report["num_draft"]) == (7, None, 3)
    assert report["rules"]["token"]["tau"] == walk["tau"]


def test_of_a_trained_drafter_no_rule_keeps_less_than_a_weaker_one():
    """At every token of texts that the target told, and so in the mean."""
    target = specjax.load_target("stories260k", dtype="float32")
    drafter = specjax.load_drafter("stories260k-dflash", target)
    settings = {"temperature": 1.0, "max_new_tokens": 60, "batch_size": 8}
    asked = [target.tokenizer(text).input_ids for text in ("Once upon a time", "The dog")] * 4
    known = documents(asked, specjax.generate(target, asked, **settings).tokens, temperature=1.0)
    seen = []

    def watch(*arguments):
        seen.append(jax.device_get(chances(*arguments)))
        return seen[-1]

    chances = expected._chances
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "_chances", watch)
        report = expected.expected(target, drafter.config, drafter.params, known)
    order = ["match-independent", "match", "token", "block"]
    for weak, strong in pairwise(order):
        assert all((one[strong] - one[weak]).min() > -1e-5 for one in seen)
        assert report["rules"][strong]["tau"] > report["rules"][weak]["tau"]


def test_what_has_no_closed_form_is_refused(pair):
    target, drafter = pair
    known = documents([[1, 2]], [[3, 4]])

    def run(config=drafter.config, known=known, **settings):
        return expected.expected(target, config, drafter.params, known, **settings)

    with pytest.raises(ValueError, match="num_draft 9 is not between 1 and"):
        run(num_draft=9)
    with pytest.raises(ValueError, match="reads rejected states"):
        run(replace(drafter.config, reuse=DFlow()))
    with pytest.raises(ValueError, match="ends at position 4, the drafter was made for 3"):
        run(replace(drafter.config, max_positions=3))
    with pytest.raises(ValueError, match="those of the target 123, not of"):
        run(known=replace(known, manifest={"fingerprint": "123"}))
