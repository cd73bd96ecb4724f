"""The teacher-forced walk against the loop itself: the same rounds, one by one."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import specjax
from specjax import evaluation
from specjax.decoding.drafting import DFlash, Plain
from specjax.models import drafter as backbone
from specjax.models import drafter_hf, hub, params
from specjax.models import target as networks
from specjax.training import data, heldout
from specjax.training.data import Documents
from specjax.types import Proposal


def documents(pairs):
    """Documents of (prompt, answer) pairs of ids."""
    pairs = list(pairs)
    texts = [np.asarray([*prompt, *answer], np.int32) for prompt, answer in pairs]
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    prompts = np.asarray([len(prompt) for prompt, _ in pairs], np.int32)
    return Documents(np.concatenate(texts), starts, prompts, {})


def decoded(target, drafter, prompts, limits, **settings):
    """The answers of the loop and its rounds."""
    out = specjax.generate(
        target, prompts, drafter=drafter, max_new_tokens=limits, temperature=0, **settings
    )
    return documents(list(zip(prompts, out.tokens, strict=True))), out.stats, out.finish_reason


def prompts_of(vocab, count, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(3, 40)).tolist() for _ in range(count)]


# ------------------------------------------------------------------------------- tiny networks
SMALL = 6  # so few tokens that a random drafter is often right


def tiny_pair(directory, layout, seed, eos=5, **overrides):
    """A random target of six tokens and a random drafter for it."""
    config = tiny.target_config(
        "qwen3", vocab_size=SMALL, eos_token_id=eos, bos_token_id=0, **overrides
    )
    target = hub.load_target(
        tiny.write(directory / "t", config, tiny.target_tensors(config, seed)), dtype="float32"
    )
    own = tiny.drafter_config(
        vocab_size=SMALL,
        dflash_config={"mask_token_id": 4, "target_layer_ids": list(tiny.TAPS)},
        sample_from_anchor=layout == "next",
    )
    tensors = tiny.drafter_tensors(own, seed)
    return target, hub.load_drafter(tiny.write(directory / "d", own, tensors), target)


@pytest.mark.parametrize(
    ("layout", "num_draft"), [("fill", None), ("next", None), ("fill", 3), ("next", 1)]
)
def test_the_walk_gives_the_rounds_of_the_loop(layout, num_draft, tmp_path):
    target, drafter = tiny_pair(tmp_path, layout, seed=28)
    prompts = prompts_of(SMALL, 11, seed=1)  # one batch is not full
    limits = [1, 2, 3, 17, 40, 41, 42, 43, 60, 61, 62]
    answers, want, reasons = decoded(target, drafter, prompts, limits, num_draft=num_draft)
    network = DFlash(drafter.config, num_draft or drafter.config.num_drafts)
    walkable = heldout.Walkable(target, tiny.TAPS, network.num_draft, answers, rows=4)
    vocabulary = networks.vocabulary(target.params)
    got = heldout.rounds(network, drafter.params, vocabulary, walkable)
    assert got == want
    # What makes this a test: several lengths of acceptance, both ways of ending, cuts at the end.
    accepted = {n for one in want for n in one.accepted}
    assert len(accepted) > min(3, network.num_draft)
    assert set(reasons) == {"stop", "length"}
    assert any(a + 1 > e for one in want for a, e in zip(one.accepted, one.emitted, strict=True))


# ------------------------------------------------------------------------- scripted drafters
@dataclass(frozen=True)
class Chain(Plain):
    """Drafts by a table of successors, and from a slot on, which the position decides, wrongly.

    Parameters: `successor` [V] int32. With the table of a `tiny.successor_target` every length of
    acceptance occurs; with the bigrams of a real text some slots are right by themselves.
    """

    num_draft: int = 5
    spoiled: bool = True

    def propose(self, params, vocabulary, draft, tokens, length, rejected, key, sampling):
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        drafts = []
        for _ in range(self.num_draft):
            last = params["successor"][last]
            drafts.append(last)
        made = jnp.stack(drafts, axis=1)
        if self.spoiled:
            anchor = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
            right = (length * 5 + anchor * 3) % 7 % (self.num_draft + 1)
            slot = jnp.arange(self.num_draft, dtype=jnp.int32)[None]
            wrong = (made + 1) % len(params["successor"])
            made = jnp.where(slot < right[:, None], made, wrong)
        return Proposal(made, jnp.full_like(length, self.num_draft)), draft


@pytest.mark.parametrize("eos", [None, 30])
def test_every_acceptance_length_and_every_cut(eos, tmp_path):
    cycle = np.roll(np.arange(41), -1)
    target = hub.load_target(tiny.successor_target(tmp_path, cycle), dtype="float32")
    target = replace(target, eos_token_ids=() if eos is None else (eos,))
    prompts = [[n, n + 1] for n in range(0, 38)]
    limits = [1 + n % 13 for n in range(38)]
    table = {"successor": jnp.asarray(cycle, jnp.int32)}
    network = Chain()
    answers, want, reasons = decoded(target, (network, table), prompts, limits)
    walkable = heldout.Walkable(target, (), network.num_draft, answers)
    got = heldout.rounds(network, table, networks.vocabulary(target.params), walkable)
    assert got == want
    assert {n for one in got for n in one.accepted} == {0, 1, 2, 3, 4, 5}
    cut = {a + 1 - e for one in got for a, e in zip(one.accepted, one.emitted, strict=True)}
    assert cut == {0, 1, 2, 3, 4, 5}
    assert ("stop" in reasons) == (eos is not None)


# -------------------------------------------------------------------------------- stories260k
@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k", dtype="float32")


STORIES = ["Once upon a time", "The dog", "One day, Lily", "", "Tim had a red ball"]


def random_drafter(target, layout="fill", vocab=None, seed=0):
    """A random drafter for stories260k; `vocab` ids make it a reduced vocabulary."""
    E, V = target.config.layers.hidden_size, target.config.vocab_size
    config = tiny.drafter_config(
        hidden_size=E,
        vocab_size=V,
        num_target_layers=target.config.layers.num_layers,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 3]},
        sample_from_anchor=layout == "next",
        max_position_embeddings=512,
    )
    parsed = drafter_hf.config_from_hf(config)
    if vocab is not None:
        parsed = replace(parsed, draft_vocab_size=len(vocab))
    weights = params.init(backbone.table(parsed), jax.random.key(seed))
    if vocab is not None:
        weights["head"] = weights["head"] * 50
        weights["target_ids"] = jnp.asarray(vocab, jnp.int32)
    return hub.Drafter("random", target.directory, parsed, weights)


@pytest.fixture(scope="module")
def told(stories):
    """Greedy stories as (prompt ids, answer ids), some to their end."""
    prompts = [stories.tokenizer(text).input_ids for text in STORIES]
    out = specjax.generate(stories, prompts, max_new_tokens=[200, 64, 3, 1, 90], temperature=0)
    return prompts, out.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "reduced"), [("fill", False), ("next", False), ("fill", True)])
@pytest.mark.filterwarnings("ignore:acceptance length")
def test_stories260k_with_random_drafters(layout, reduced, stories, told):
    prompts, answers = told
    ids, counts = np.unique(np.concatenate(answers), return_counts=True)
    common = np.sort(ids[np.argsort(-counts)[:6]]) if reduced else None
    drafter = random_drafter(stories, layout, common)
    settings = {"num_draft": 4}
    limits = [len(answer) for answer in answers]
    known, want, _ = decoded(stories, drafter, prompts, limits, **settings)
    network = DFlash(drafter.config, 4)
    walkable = heldout.Walkable(stories, (0, 3), 4, known, rows=3)
    vocabulary = networks.vocabulary(stories.params)
    assert heldout.rounds(network, drafter.params, vocabulary, walkable) == want
    if reduced:
        assert sum(n for one in want for n in one.accepted) > 5


def test_stories260k_with_some_right_slots(stories, told):
    """Bigrams of the answers: right now and then, and several slots in a row."""
    prompts, answers = told
    V = stories.config.vocab_size
    pairs = np.zeros((V, V), int)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        np.add.at(pairs, (text[:-1], text[1:]), 1)
    table = {"successor": jnp.asarray(pairs.argmax(1), jnp.int32)}
    network = Chain(spoiled=False)
    limits = [len(answer) for answer in answers]
    known, want, _ = decoded(stories, (network, table), prompts, limits)
    walkable = heldout.Walkable(stories, (), 5, known)
    got = heldout.rounds(network, table, networks.vocabulary(stories.params), walkable)
    assert got == want
    assert {n for one in got for n in one.accepted} >= {0, 1, 2, 3}


# ----------------------------------------------------------------------------------- the report
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:acceptance length")
def test_the_report_has_the_figures_of_evaluate(stories, told):
    prompts, answers = told
    drafter = random_drafter(stories, vocab=[*range(256, 272)])
    limit = max(map(len, answers))
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) == limit]
    report = heldout.walk(stories, drafter.config, drafter.params, documents(pairs))
    want = evaluation.evaluate(
        stories, drafter, [p for p, _ in pairs], max_new_tokens=limit, temperature=0
    )
    shared = set(report) & set(want)
    assert shared >= {"tau", "tau_macro", "acceptance_per_position", "rounds", "answers"}
    assert {key: report[key] for key in shared} == {key: want[key] for key in shared}


def test_states_are_kept_only_on_demand_and_change_nothing(stories, told):
    drafter = random_drafter(stories)
    known = documents(zip(*told, strict=True))
    seen = []
    kept = heldout.Walkable(stories, (0, 3), 7, known, rows=2, keep=True)
    first = heldout.walk(
        stories, drafter.config, drafter.params, kept, progress=lambda *at: seen.append(at)
    )
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert [a is b for a, b in zip(kept, kept, strict=True)] == [True] * 3
    assert heldout.walk(stories, drafter.config, drafter.params, kept) == first
    assert heldout.walk(stories, drafter.config, drafter.params, known) == first
    fresh = heldout.Walkable(stories, (0, 3), 7, known)
    assert next(iter(fresh)) is not next(iter(fresh))


def test_a_limit_takes_the_first_documents(stories, told):
    drafter = random_drafter(stories)
    known = documents(zip(*told, strict=True))
    few = documents(list(zip(*told, strict=True))[:2])
    one = heldout.walk(stories, drafter.config, drafter.params, known, limit=2)
    assert one["answers"] == 2
    assert one == heldout.walk(stories, drafter.config, drafter.params, few)


def test_answers_that_are_not_this_targets_greedy_ones_are_refused(stories, told):
    drafter = random_drafter(stories)
    known = documents(zip(*told, strict=True))
    own = data.fingerprint(stories)

    def walk(said, target=stories):
        answers = replace(known, manifest=said)
        return heldout.walk(target, drafter.config, drafter.params, answers, limit=1)

    with pytest.raises(ValueError, match=r"drawn at temperature 0\.8: a walk is exact for greedy"):
        walk({"temperature": 0.8, "fingerprint": own})
    other = f"those of the target 5612a6ae389d899e, not of {stories.name} .{own}"
    with pytest.raises(ValueError, match=other):
        walk({"temperature": 0.0, "fingerprint": "5612a6ae389d899e"})
    changed = stories.params | {"norm": stories.params["norm"] * 2.0}
    with pytest.raises(ValueError, match=f"those of the target {own}, not of"):
        walk({"temperature": 0.0, "fingerprint": own}, replace(stories, params=changed))
    made = data.answer_settings(stories, [["Tom"]], max_new_tokens=4, temperature=0.5)
    with pytest.raises(ValueError, match=r"temperature 0\.5"):
        walk(made)
    assert walk(made | {"temperature": 0.0})["answers"] == 1


def test_what_cannot_be_walked_is_refused(stories, told):
    drafter = random_drafter(stories)
    known = documents(zip(*told, strict=True))

    def walk(*answers, **settings):
        return heldout.walk(stories, drafter.config, drafter.params, *answers, **settings)

    with pytest.raises(ValueError, match="num_draft 8 is not between 1 and 7"):
        walk(known, num_draft=8)
    with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
        walk(known, limit=0)
    with pytest.raises(ValueError, match=r"features of \(0, 2\), not of \(0, 3\)"):
        walk(heldout.Walkable(stories, (0, 2), 7, known))
    with pytest.raises(ValueError, match="num_draft 7: these answers were prepared for 4"):
        walk(heldout.Walkable(stories, (0, 3), 4, known))
    with pytest.raises(ValueError, match="limit 2: these answers were prepared for None"):
        walk(heldout.Walkable(stories, (0, 3), 7, known), limit=2)
    short = replace(drafter.config, max_positions=50)
    with pytest.raises(ValueError, match=r"ends at position \d+, the drafter was made for 50"):
        heldout.walk(stories, short, drafter.params, known)
    with pytest.raises(ValueError, match="no answers"):
        heldout.Walkable(
            stories,
            (0, 3),
            7,
            Documents(known.tokens[:0], known.starts[:1], known.prompt_lengths[:0], {}),
        )
