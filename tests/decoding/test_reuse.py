"""Every method of reuse in the loop: exact, row by row, and plain where nothing was rejected."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax.decoding import loop
from specjax.models import params
from specjax.models import target as networks
from specjax.models.reuse import Carryover, DFlow, ReAnchor, ReTrace

PROMPTS = ["Once upon a time", "Tom had a red", "Lily and her mom went to the park. They saw"]
LIMITS = [40, 17, 60]
METHODS = {
    "carryover": Carryover(),
    "carryover post_norm": Carryover("post_norm"),
    "dflow": DFlow(),
    "retrace": ReTrace(),
    "reanchor": ReAnchor((1, 2, 4)),
    "reanchor beyond the block": ReAnchor((1, 3), 0.0),
    "reanchor with trust": ReAnchor((2,), trust=0.5),
    "reanchor by choices alone": ReAnchor((), trust=0.5),
}
SETTINGS = {
    "greedy": {"temperature": 0},
    "coupled": {"temperature": 0.8, "seed": 4, "verify": "match"},
    "independent": {"temperature": 1.0, "seed": 4, "verify": "match-independent"},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 5, "verify": "match"},
    "token": {"temperature": 0, "verify": "token"},
}


@pytest.fixture(scope="module")
def target():
    return specjax.load_target("stories260k")


def made(target, method, layout="fill"):
    """The packaged drafter "trained" with a method: what that adds is random.

    In the other layout its drafts come one slot late, and are right now and then.
    """
    drafter = specjax.load_drafter("stories260k-dflash", target)
    trained = None if isinstance(method, ReAnchor) else method
    config = replace(drafter.config, reuse=trained, layout=layout)
    if trained is None:
        return replace(drafter, config=config)
    own = params.init(method.table(config), jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), own)
    return replace(drafter, config=config, params=drafter.params | {"reuse": own})


def how(method):
    """What `generate` is told beside the drafter."""
    if not isinstance(method, ReAnchor):
        return {}
    return {"reuse": method} | ({"num_draft": 10} if method.threshold == 0 else {})


def decode(target, drafter=None, prompts=PROMPTS, limits=LIMITS, stops=(), **settings):
    return specjax.generate(
        target, prompts, drafter=drafter, max_new_tokens=limits, eos_token_id=stops, **settings
    )


STEP = jax.jit(loop.step, static_argnums=0)


def rounds(answers):
    return [(one.drafted, one.accepted, one.emitted) for one in answers.stats]


pytestmark = pytest.mark.filterwarnings("ignore:acceptance length")


# --------------------------------------------------------------------------------------- exact
@pytest.fixture(scope="module")
def known(target):
    """Answers without a drafter (layout None) and with one whose reuse is off, each made once."""

    @cache
    def get(layout, setting):
        asked = SETTINGS[setting]
        if layout is None:
            return decode(target, **{k: v for k, v in asked.items() if k != "verify"})
        return decode(target, made(target, None, layout), **asked)

    return get


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        pytest.param("fill", setting, marks=() if setting == "greedy" else pytest.mark.slow)
        for setting in SETTINGS
    ]
    + [("next", "coupled")],
)
def test_a_method_changes_nothing_but_the_rounds(target, known, name, layout, setting):
    method = METHODS[name]
    got = decode(target, made(target, method, layout), **SETTINGS[setting], **how(method))
    assert got.tokens == known(None, setting).tokens
    if layout == "fill":
        assert len({n for one in got.stats for n in one.accepted}) > 2
        assert rounds(got) != rounds(known(layout, setting))  # what was rejected was read


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("dflow", "reanchor") else pytest.mark.slow)
        for n in METHODS
    ],
)
def test_a_row_alone_equals_the_row_in_a_batch(target, known, name):
    """Rows of a batch are in different phases: prefilled, rejected early or late, accepted whole,
    cut by a limit or a stop, finished."""
    method = METHODS[name]
    drafter, asked = made(target, method), SETTINGS["greedy"] | how(method)
    asked["stops"] = known(None, "greedy").tokens[2][47:48]
    together = decode(target, drafter, **asked)
    assert {*together.finish_reason} == {"stop", "length"}
    assert any(one.emitted[-1] <= one.accepted[-1] for one in together.stats)
    assert {0, 7} <= {n for one in together.stats for n in one.accepted}
    for b in range(len(PROMPTS)):
        alone = decode(target, drafter, PROMPTS[b : b + 1], LIMITS[b : b + 1], **asked)
        assert alone.tokens == together.tokens[b : b + 1]
        assert rounds(alone) == rounds(together)[b : b + 1]


def short_sighted(drafter):
    """The drafter with sliding windows, which carried and rejected rows have to respect."""
    layers = replace(drafter.config.layers, windows=(10,) * drafter.config.layers.num_layers)
    return replace(drafter, config=replace(drafter.config, layers=layers))


def of_few_words(drafter, target):
    """The drafter with a head of its own over half of the vocabulary."""
    ids = jnp.arange(0, target.config.vocab_size, 2, dtype=jnp.int32)
    ids = jnp.concatenate([ids, jnp.arange(259, 400, 2, dtype=jnp.int32)])
    head = networks.vocabulary(target.params).head[ids]
    return replace(
        drafter,
        config=replace(drafter.config, draft_vocab_size=len(ids)),
        params=drafter.params | {"head": head, "target_ids": ids},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["carryover", "dflow", "reanchor"])
@pytest.mark.parametrize("kind", ["short-sighted", "of few words"])
def test_other_kinds_of_drafters(target, known, name, kind):
    method = METHODS[name]
    drafter = made(target, method)
    other = of_few_words(drafter, target) if kind == "of few words" else short_sighted(drafter)
    got = decode(target, other, **SETTINGS["filtered"], **how(method))
    assert got.tokens == known(None, "filtered").tokens
    assert rounds(got) != rounds(decode(target, other, **SETTINGS["filtered"], reuse="off"))
    assert max(n for one in got.stats for n in one.accepted) > 2


# ---------------------------------------------------------------------------- plain at the start
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "carryover" else pytest.mark.slow) for n in METHODS],
)
def test_with_an_empty_buffer_every_method_has_the_rounds_of_dflash(target, known, name):
    method = METHODS[name]
    decoder, weights, sampling, stops, state = specjax.started(
        target,
        PROMPTS,
        drafter=made(target, method),
        max_new_tokens=LIMITS,
        eos_token_id=[],
        **SETTINGS["greedy"],
        **how(method),
    )
    seen = []
    while not state.done.all():
        nothing = replace(state.rejected, count=jnp.zeros_like(state.rejected.count))
        state = replace(state, rejected=nothing)
        state, info = STEP(decoder, weights, sampling, stops, state)
        seen.append(jax.device_get((info.proposed, info.accepted, info.emitted)))
    for b, (drafted, accepted, emitted) in enumerate(rounds(known("fill", "greedy"))):
        want = list(zip(drafted, accepted, emitted, strict=True))
        got = [tuple(int(x[b]) for x in info) for info in seen]
        assert [one for one in got if one[2]] == want


@pytest.mark.parametrize("method", [DFlow(), ReTrace()], ids=repr)
def test_untrained_weights_give_the_rounds_of_dflash(target, known, method):
    drafter = made(target, method)
    fresh = params.init(method.table(drafter.config), jax.random.key(0))
    drafter = replace(drafter, params=drafter.params | {"reuse": fresh})
    got = decode(target, drafter, **SETTINGS["coupled"])
    assert rounds(got) == rounds(known("fill", "coupled"))


@pytest.mark.parametrize("setting", ["greedy", "coupled"])
def test_without_shifts_reanchor_gives_the_rounds_of_dflash(target, known, setting):
    got = decode(target, made(target, None), **SETTINGS[setting], reuse=ReAnchor(()))
    assert rounds(got) == rounds(known("fill", setting))


@pytest.mark.parametrize("asked", ["off", "reanchor"])
def test_a_method_that_does_not_run_is_no_part_of_the_program(target, asked):
    """The step of the plain drafter, which shares its compile, and not even its parameters."""
    drafter = made(target, Carryover())
    bare = replace(
        drafter,
        config=replace(drafter.config, reuse=None),
        params={k: v for k, v in drafter.params.items() if k != "reuse"},
    )
    one, two, own = (
        specjax.started(target, PROMPTS[0], drafter=which, reuse=reuse)
        for which, reuse in ((drafter, asked), (bare, asked), (drafter, None))
    )
    assert one[0] == two[0] != own[0]
    assert jax.tree.structure(one[1:]) == jax.tree.structure(two[1:])
    assert own[1].drafter.keys() - one[1].drafter.keys() == {"reuse"}


# ----------------------------------------------------------------------------------- long runs
def held(state):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)


def live():
    """How many arrays there are in the process, and their bytes."""
    arrays = jax.live_arrays()
    return len(arrays), sum(x.size * x.dtype.itemsize for x in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_thousand_rounds_hold_what_the_first_held(target, name):
    """Shapes, bytes and one program; the row goes back to its start before it reaches its end."""
    method = METHODS[name]
    decoder, weights, sampling, stops, state = specjax.started(
        target,
        PROMPTS[1],
        drafter=made(target, method),
        max_new_tokens=450,
        eos_token_id=[],
        **how(method),
    )
    start, first = int(state.length[0]), held(state)
    compiled = loop.run_rounds._cache_size()
    amounts = set()
    while int(state.stats.rounds[0]) < 1000:
        state, _ = loop.run_rounds(decoder, weights, sampling, stops, state, 40)
        assert held(state) == first
        state = replace(
            state,
            length=jnp.array([start]),
            done=jnp.array([False]),
            fresh=jnp.array([0]),
            target=replace(state.target, length=jnp.array([start - 1])),
            draft=replace(state.draft, length=jnp.array([start - 1])),
        )
        amounts.add(live())
    assert len(amounts) == 1
    assert loop.run_rounds._cache_size() == compiled + 1
    kept = {
        name
        for name in ("features", "final_hidden", "argmax", "certainty", "draft_hidden")
        if getattr(state.rejected, name).size
    }
    assert kept == set(method.keeps)


# --------------------------------------------------------------------------------------- asked
def test_a_method_is_chosen_by_name(target):
    drafter = made(target, Carryover())
    prompts, limits = PROMPTS[:1], [8]
    names = {
        None: "carryover",
        "carryover": "carryover",
        "off": None,
        "reanchor": "reanchor",
    }
    for asked, ran in names.items():
        out = decode(target, drafter, prompts, limits, reuse=asked)
        assert out.settings["reuse"] == ran
    assert decode(target, made(target, None), prompts, limits).settings["reuse"] is None


@pytest.mark.parametrize(
    ("trained", "asked", "message"),
    [
        (None, "carryover", "stories260k-dflash was trained without any reuse"),
        (Carryover(), "dflow", "stories260k-dflash was trained for 'carryover'; train one for it"),
        (None, "carry", "reuse='carry' is not one of off, carryover, dflow, retrace, reanchor"),
        (None, Carryover(), "is not one of off"),
    ],
)
def test_what_a_drafter_was_not_trained_for_is_refused(target, trained, asked, message):
    with pytest.raises(ValueError, match=message):
        decode(target, made(target, trained), reuse=asked)


def test_reuse_without_a_trained_drafter_is_refused(target):
    for drafter in (None, specjax.NGram()):
        with pytest.raises(ValueError, match="needs a drafter from load_drafter"):
            decode(target, drafter, reuse="reanchor")


def test_a_greedy_row_has_its_rounds_beside_drawn_ones(target):
    drafter = made(target, None)
    method = ReAnchor((1, 2), threshold=0.0, trust=0.5)
    alone = decode(target, drafter, reuse=method, num_draft=9)
    plain = decode(target, drafter)
    assert rounds(alone) != rounds(plain)  # the method does something there
    heat = [0.0 if n % 2 == 0 else 1.0 for n in range(len(PROMPTS))]
    for verify in ("match", "token"):
        mixed = decode(target, drafter, reuse=method, num_draft=9, temperature=heat, verify=verify)
        for n in range(0, len(PROMPTS), 2):
            assert mixed.tokens[n] == alone.tokens[n]
            assert rounds(mixed)[n] == rounds(alone)[n]


def test_a_chain_cannot_outgrow_its_blocks(target):
    drafter = made(target, None)
    with pytest.raises(ValueError, match="not between 1 and 11: a block holds 7 drafts"):
        decode(target, drafter, reuse=ReAnchor((1, 4)), num_draft=12)
    with pytest.raises(ValueError, match="not between 1 and 7: a block holds 7 drafts"):
        decode(target, drafter, reuse=ReAnchor((8,)), num_draft=8)  # no block reaches slot 8
