"""The parallel draft, verify, draft of training against rounds of decoding, anchor by anchor."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decoding import loop
from specjax.decoding.drafting import DFlash
from specjax.decoding.sampling import make_sampling, row_keys
from specjax.decoding.state import Decoder, Weights
from specjax.models import params
from specjax.models import target as networks
from specjax.models.reuse import Carryover, DFlow, ReTrace
from specjax.training import blocks, branches, config, trainer
from specjax.training.blocks import Anchors
from specjax.training.branches import Branches
from specjax.training.features import clean_pass
from specjax.training.objectives import Objective
from specjax.training.packing import Batch
from specjax.training.trainer import Plan

# The packed pass and the loop sum attention in another order; final states are up to 5 large.
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
METHODS = [Carryover(), Carryover("post_norm"), DFlow(), ReTrace()]
TEXTS = ["Once upon a time", "Tom had a red ball. He"]
NEW, LENGTH = 48, 144
ANCHORS = [9, 14, 20, 31, 70, 80, 95]  # of both documents
WHOLE = Branches(anchors=len(ANCHORS), empty=0.0)


@pytest.fixture(scope="module")
def target():
    return specjax.load_target("stories260k")


@pytest.fixture(scope="module")
def batch(target):
    """Two greedy stories in one row, and some padding."""
    ids = [target.tokenizer(text).input_ids for text in TEXTS]
    out = specjax.generate(target, ids, max_new_tokens=NEW, temperature=0, eos_token_id=[])
    texts = [one + two for one, two in zip(ids, out.tokens, strict=True)]
    lengths = [len(text) for text in texts]
    row = {name: np.zeros(LENGTH, np.int32) for name in ("tokens", "positions", "start")}
    document, supervised = np.full(LENGTH, -1, np.int32), np.zeros(LENGTH, bool)
    for n, text in enumerate(texts):
        first = sum(lengths[:n])
        here = slice(first, first + len(text))
        row["tokens"][here] = text
        row["positions"][here] = np.arange(len(text))
        row["start"][here] = first
        document[here] = n
        supervised[first + len(ids[n]) : first + len(text)] = True
    source = np.full((1, LENGTH), -1, np.int32)
    rows = {name: values[None] for name, values in row.items()}
    return Batch(**rows, document=document[None], supervised=supervised[None], source=source)


def network(target, method, layout="fill", seed=1):
    """The packaged drafter with what a method adds to it, random."""
    drafter = specjax.load_drafter("stories260k-dflash", target)
    made = replace(drafter.config, reuse=method, layout=layout)
    own = params.init(method.table(made), jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), own)
    return made, drafter.params | {"reuse": own}


def anchors(at=ANCHORS):
    return Anchors(jnp.asarray([at], jnp.int32), jnp.ones((1, len(at)), bool))


@pytest.fixture(scope="module")
def clean(target, batch):
    drafter = specjax.load_drafter("stories260k-dflash", target)
    run = jax.jit(clean_pass, static_argnums=(0, 3))
    return run(target.config, target.params, batch, drafter.config.taps)


def drafted(target, batch, clean, made, weights, wanted=WHOLE, at=ANCHORS):
    vocabulary = networks.vocabulary(target.params)
    keys = jax.random.split(jax.random.key(0), 1)

    @jax.jit
    def run(weights, clean, batch):
        return list(
            branches.drafts(
                wanted,
                target.config,
                made,
                target.params,
                weights,
                vocabulary,
                batch,
                clean,
                anchors(at),
                keys,
            )
        )

    return run(weights, clean, batch)


def in_the_loop(target, made, weights, text, rounds):
    """Draft states [E] and accepted length of each of some rounds behind the prompt `text`."""
    decoder = Decoder(target.config, DFlash(made, made.num_drafts, made.reuse))
    both = Weights(target.params, weights)
    sampling = make_sampling(
        0.0, 0, 1.0, batch=1, vocab_size=target.config.vocab_size, drafting="greedy"
    )
    stops = jnp.array([-1], jnp.int32)
    prompt = np.zeros((1, 128), np.int32)
    prompt[0, : len(text)] = text
    state, _ = loop.prefill(
        decoder,
        both,
        sampling,
        stops,
        jnp.asarray(prompt),
        jnp.array([len(text)], jnp.int32),
        jnp.array([60], jnp.int32),
        row_keys(0, jnp.arange(1)),
        256,
        64,
    )
    for _ in range(rounds):
        state, _ = STEP(decoder, both, sampling, stops, state)
    # What the drafter would propose now, as states: the pass of `DFlash.propose`, whole.
    probe = replace(decoder, drafter=Probe(made, made.num_drafts, made.reuse))
    proposal, _ = DRAFT(probe, both, sampling, state)
    return proposal.hidden[0], int(state.length[0]) - 1


class Probe(DFlash):
    """Tells its states, whatever the method keeps."""

    @property
    def keeps(self):
        return super().keeps | {"draft_hidden"}


STEP = jax.jit(loop.step, static_argnums=0)
DRAFT = jax.jit(loop.draft, static_argnums=0)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if m == DFlow() else pytest.mark.slow) for m in METHODS],
    ids=repr,
)
def test_a_draft_behind_a_rejection_is_that_of_decoding(target, batch, clean, method):
    made, weights = network(target, method)
    (draft,) = drafted(target, batch, clean, made, weights)
    seen = set()
    for a, at in enumerate(ANCHORS):
        first = int(batch.start[0, at])
        text = batch.tokens[0, first:at].tolist()  # the prefill draws the anchor itself
        want, position = in_the_loop(target, made, weights, text, rounds=1)
        count = int(draft.rejected[0, a])
        assert position == at - first + made.num_drafts - count + 1
        np.testing.assert_allclose(draft.hidden[0, a], want, **CLOSE)
        follows = batch.tokens[0, first + position + 1 :][: made.num_drafts]
        labels = np.where(draft.labels.mask[0, a], draft.labels.tokens[0, a], -1)
        assert [t for t in labels.tolist() if t >= 0] == follows[: (labels >= 0).sum()].tolist()
        seen.add(count)
    assert len(seen) > 2, seen


@pytest.mark.slow
def test_the_next_layout_too(target, batch, clean):
    made, weights = network(target, DFlow(), "next")
    (draft,) = drafted(target, batch, clean, made, weights)
    for a, at in enumerate(ANCHORS[:4]):
        first = int(batch.start[0, at])
        text = batch.tokens[0, first:at].tolist()
        want, _ = in_the_loop(target, made, weights, text, rounds=1)
        np.testing.assert_allclose(draft.hidden[0, a], want, **CLOSE)


@pytest.mark.slow
def test_two_rounds_are_those_of_decoding(target, batch, clean):
    made, weights = network(target, DFlow())
    at = [9, 14, 70]
    wanted = Branches(anchors=len(at), rounds=2, empty=0.0)
    first, second = drafted(target, batch, clean, made, weights, wanted, at)
    for a, start in enumerate(at):
        begin = int(batch.start[0, start])
        text = batch.tokens[0, begin:start].tolist()
        for rounds, draft in ((1, first), (2, second)):
            want, _ = in_the_loop(target, made, weights, text, rounds)
            np.testing.assert_allclose(draft.hidden[0, a], want, **CLOSE)


@pytest.mark.slow
def test_rounds_before_the_trained_one_only_lead_to_it(target, batch, clean):
    """The recurrent form: the memory of a draft is of a draft that had one itself."""
    made, weights = network(target, ReTrace())
    at = [9, 14, 70]
    _, second = drafted(
        target, batch, clean, made, weights, Branches(anchors=len(at), rounds=2, empty=0.0), at
    )
    behind = Branches(anchors=len(at), before=1, empty=0.0)
    (alone,) = drafted(target, batch, clean, made, weights, behind, at)
    np.testing.assert_allclose(alone.hidden, second.hidden, **CLOSE)
    assert (alone.rejected == second.rejected).all()
    assert (alone.rejected > 0).any()
    (parallel,) = drafted(target, batch, clean, made, weights, replace(behind, before=0), at)
    assert float(jnp.abs(parallel.hidden - alone.hidden).max()) > 1e-2
    for a, start in enumerate(at):
        begin = int(batch.start[0, start])
        text = batch.tokens[0, begin:start].tolist()
        want, _ = in_the_loop(target, made, weights, text, rounds=2)
        np.testing.assert_allclose(alone.hidden[0, a], want, **CLOSE)


def test_what_a_method_grows_counts_by_its_share(target):
    made, weights = network(target, ReTrace())
    wanted = Branches(ramp=50)
    for updates, share in ((0, 0.0), (20, 0.4), (50, 1.0), (900, 1.0)):
        got = branches.ramped(wanted, made, weights, jnp.float32(updates))
        np.testing.assert_allclose(got["reuse"]["fuse"], share * weights["reuse"]["fuse"])
        assert got["reuse"]["gate"] is weights["reuse"]["gate"]
        assert got["fc"] is weights["fc"]
    assert branches.ramped(Branches(), made, weights, jnp.float32(0)) is weights


def test_one_target_pass_verifies_every_branch(target, batch, clean):
    """Equal to a pass over each branch alone; a branch does not see another one's drafts."""
    made, _ = network(target, Carryover())
    rng = np.random.default_rng(0)
    V, K = target.config.vocab_size, made.num_drafts
    tokens = rng.integers(0, V, (1, len(ANCHORS), K)).astype(np.int32)

    @jax.jit
    def run(tokens):
        return branches.verify(target.config, made, target.params, batch, clean, anchors(), tokens)

    out = run(tokens)
    alone = jax.jit(networks.forward, static_argnums=0, static_argnames="taps")
    for a, at in enumerate(ANCHORS):
        first = int(batch.start[0, at])
        text = [*batch.tokens[0, first : at + 1].tolist(), *tokens[0, a].tolist()]
        padded = np.zeros((1, 1, 128), np.int32)
        padded[0, 0, : len(text)] = text
        positions = jnp.arange(128, dtype=jnp.int32)[None, None]
        want = alone(target.config, target.params, jnp.asarray(padded), positions, taps=made.taps)
        here = slice(len(text) - K, len(text))
        close = dict(atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(out.hidden[0, a], want.hidden[0, 0, here], **close)
        np.testing.assert_allclose(out.features[0, a], want.features[0, 0, here], **close)
    other = tokens.copy()
    other[0, 2] = rng.integers(0, V, K)
    changed = jnp.any(run(other).hidden != out.hidden, axis=(0, 2, 3))
    assert changed.tolist() == [a == 2 for a in range(len(ANCHORS))]


def test_the_anchor_moves_behind_what_the_recording_confirms():
    """a = 10, K = 4, m = 1: the new anchor is 12, and the rows of 12, 13, 14 are carried."""
    S, K = 32, 4
    tokens = np.arange(S, dtype=np.int32)[None]
    zeros = np.zeros((1, S), np.int32)
    supervised = np.arange(S)[None] < 16
    batch = Batch(tokens, tokens, zeros, zeros, supervised, zeros)
    at = anchors([10, 10, 10, 12])
    drafts = jnp.asarray([[[11, 0, 13, 14], [0, 12, 13, 14], [11, 12, 13, 14], [13, 14, 15, 16]]])
    steps = jnp.arange(1, K + 1)[None, None]
    labels = blocks.Labels(
        at.at[:, :, None] + steps,
        at.at[:, :, None] + steps < 16,
        at.at[:, :, None] + steps,
    )
    moved, accepted = branches.advance(batch, at, labels, drafts)
    assert accepted[0].tolist() == [1, 0, 4, 3]
    assert moved.at[0].tolist() == [12, 11, 15, 0]
    assert moved.valid[0].tolist() == [True, True, True, False]  # 16 is behind the answer
    positions = (at.at[:, :, None] + steps)[..., None].astype(jnp.float32)
    states = networks.Output(positions, jnp.zeros((1, 4, K, 0)), k=(), v=())
    kept = SimpleNamespace(reuse=ReTrace())  # all that is read of a config
    rejected = branches.rejected_rows(kept, drafts, positions, states, accepted, moved.valid)
    assert rejected.count[0].tolist() == [3, 4, 0, 0]
    assert rejected.final_hidden[0, 0, :3, 0].tolist() == [12, 13, 14]
    assert rejected.draft_hidden[0, 1, :, 0].tolist() == [11, 12, 13, 14]
    assert rejected.tokens[0, 0, :3].tolist() == [0, 13, 14]


def plan(target, method, **changes):
    made, _ = network(target, method)
    arguments = {"objective": Objective(), "anchors": 4, "head_chunk": 4, "branches": WHOLE}
    return Plan(target=target.config, drafter=made, **(arguments | changes))


def starts(at=ANCHORS):
    """No plain blocks, and branches at some rows."""
    return trainer.Starts(
        Anchors(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), bool)),
        anchors(at),
        jax.random.split(jax.random.key(0), 1),
    )


def gradients(target, batch, method, weights, at, wanted=WHOLE, progress=1.0):
    """Of the loss of the branches alone, in the drafter and in the target."""
    wanted = plan(target, method, branches=wanted, steps=100)

    def loss(weights, target_params):
        states = rows = None
        return trainer.loss_sums(
            wanted, weights, target_params, batch, starts(at), states, rows, progress
        ).loss

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, target.params)


@pytest.mark.parametrize(
    "method",
    [
        Carryover(),
        pytest.param(DFlow(), marks=pytest.mark.slow),
        pytest.param(ReTrace(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_the_gradient_goes_into_the_second_draft_alone(target, batch, method):
    _, weights = network(target, method)
    own, of_target = gradients(target, batch, method, weights, ANCHORS)
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(of_target))
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(own["reuse"]))
    # Branches that carry nothing teach the method nothing.
    nothing = replace(WHOLE, empty=1 - 1e-9)
    own, _ = gradients(target, batch, method, weights, ANCHORS, nothing)
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(own["reuse"]))
    assert float(jnp.abs(own["fc"]).max()) > 0


def test_proposals_are_those_that_the_drafter_is_trained_for(target, batch):
    """Where logits are restricted to some tokens, so are the drafts, as in decoding."""
    _, weights = network(target, Carryover())
    rows = jnp.arange(1, target.config.vocab_size, 2)
    proposed = []

    def watched(*given):
        proposed.append(np.asarray(given[-1]))
        return verify(*given)

    verify = branches.verify
    with mock.patch.object(branches, "verify", watched):
        for only in (None, rows):
            trainer.loss_sums(
                plan(target, Carryover()), weights, target.params, batch, starts(), None, only
            )
    freely, some = proposed
    assert (freely % 2 == 0).any()
    assert (some % 2 == 1).all()
    assert (some == freely).any()


def test_no_gradient_goes_into_what_was_rejected(target, batch):
    """Neither into the drafter's states nor into the target's, in a later round either; traced
    only. Without `stop_gradient` it would."""
    _, weights = network(target, ReTrace())  # it reads the states of both
    reached = set()

    def watched(name, x):
        @jax.custom_vjp
        def same(x):
            return x

        same.defvjp(lambda x: (x, None), lambda _, g: (reached.add(name), (g,))[1])
        return same(x)

    def rows(config, tokens, hidden, states, *rest):
        states = replace(states, hidden=watched("target", states.hidden))
        return run(config, tokens, watched("draft", hidden), states, *rest)

    run, wanted = branches.rejected_rows, replace(WHOLE, rounds=2)
    trace = partial(gradients, target, batch, ReTrace(), weights, ANCHORS, wanted)
    with mock.patch.object(branches, "rejected_rows", rows):
        jax.eval_shape(trace)
        assert reached == set()
        with mock.patch.object(jax.lax, "stop_gradient", lambda x: x):
            jax.eval_shape(lambda: trace())
        assert reached == {"draft", "target"}


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "learns"), [(0, False), (1, True), (20, True)])
def test_what_grows_learns_from_the_first_update_on(target, batch, updates, learns):
    """The step's own count of updates is what the ramp goes by."""
    _, weights = network(target, ReTrace())
    ramp = replace(WHOLE, ramp=10)
    own, _ = gradients(target, batch, ReTrace(), weights, ANCHORS, ramp, updates / 100)
    assert (float(jnp.abs(own["reuse"]["fuse"]).max()) > 0) == learns
    assert float(jnp.abs(own["reuse"]["gate"]).max()) > 0


@pytest.mark.slow
def test_a_run_learns_to_reuse(target, batch):
    """A few steps lower the loss; micro-batches change nothing."""
    two = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    optimizer = config.Optimizer(learning_rate=1e-3, warmup=0.0)

    def curve(accumulate):
        wanted = plan(target, DFlow(), branches=Branches(anchors=4), accumulate=accumulate)
        update = trainer.make_optimizer(optimizer, 100)
        _, weights = network(target, DFlow())
        state = trainer.fresh_state(wanted, update, params=weights)
        step = trainer.make_step(wanted, update)
        losses = []
        for _ in range(6):
            state, metrics = step(state, target.params, two, None, None)
            losses.append(float(metrics["loss"]))
        return losses

    whole = curve(1)
    assert whole[-1] < 0.9 * whole[0]
    # Adam turns rounding into steps, more in each of the six.
    np.testing.assert_allclose(curve(2), whole, rtol=1e-4)
