"""Where each method puts the rejected rows, on one example: a = 10, K = 4, m = 1, so a' = 12.

Rejected drafts d_2, d_3, d_4 stand at 12, 13, 14.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax.models import cache as kv
from specjax.models import drafter, drafter_hf, hub, params, reuse
from specjax.models.layers import empty_cache
from specjax.models.reuse import Carryover, DFlow, ReAnchor, ReTrace
from specjax.types import Rejected, Vocabulary

K, COUNT, ANCHOR = 4, 3, 12
E, F = 48, 96
METHODS = [Carryover("pre_fc"), Carryover("post_norm"), DFlow(), ReTrace()]
EMBEDDING = jnp.asarray(tiny.tensor("model.embed_tokens.weight", (tiny.VOCAB, E)))
VOCABULARY = Vocabulary(EMBEDDING, EMBEDDING)


def network(layout, method=None, seed=3):
    """A drafter of K drafts; what a method adds is random, not zero as at the start of training."""
    raw = tiny.drafter_config(
        block_size=K + (layout == "fill"), sample_from_anchor=layout == "next"
    )
    config = replace(drafter_hf.config_from_hf(raw), reuse=method)
    made = params.init(drafter.table(config), jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
    make = lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape)  # noqa: E731
    return config, jax.tree.map(make, made)


def buffer(count=COUNT, seed=0, K=K):
    """Rejected rows; what lies behind `count` is as random as the rest."""
    rng = np.random.default_rng(seed)
    states = lambda *shape: jnp.asarray(rng.normal(size=(1, K, *shape)), jnp.float32)  # noqa: E731
    ids = lambda: jnp.asarray(rng.integers(0, 90, (1, K)), jnp.int32)  # noqa: E731
    return Rejected(
        tokens=ids(),
        count=jnp.array([count], jnp.int32),
        features=states(F),
        final_hidden=states(E),
        argmax=ids(),
        certainty=jnp.asarray(rng.uniform(size=(1, K)), jnp.float32),
        draft_hidden=states(E),
    )


def behind(rejected, seed=9):
    """The same real rows with other values behind them."""
    other = buffer(int(rejected.count[0]), seed)
    real = jnp.arange(K)[None] < rejected.count[:, None]

    def mix(a, b):
        return jnp.where(real.reshape(1, K, *(1,) * (a.ndim - 2)), a, b)

    return jax.tree.map(lambda a, b: mix(a, b) if a.ndim > 1 else a, rejected, other)


def context(config, made, rows=32, seed=5):
    """Committed rows up to the anchor."""
    features = jnp.asarray(np.random.default_rng(seed).normal(size=(1, rows, F)), jnp.float32)
    cache = empty_cache(config.layers, 1, 64, jnp.float32)
    positions = jnp.arange(rows, dtype=jnp.int32)[None]
    k, v = drafter.context_rows(config, made, drafter.fuse(config, made, features), positions)
    return features, kv.append(cache, k, v, jnp.array([rows], jnp.int32))


def plain_block(config, position=ANCHOR, token=7):
    return drafter.draft_block(config, jnp.array([token]), jnp.array([position], jnp.int32))


def inject(method, config, made, rejected):
    return method.inject(config, made, VOCABULARY, rejected, plain_block(config))


forward = jax.jit(drafter.forward, static_argnums=0)


def hidden(config, made, block, cache):
    return forward(config, made, VOCABULARY, block, cache)


@pytest.fixture(params=["fill", "next"])
def layout(request):
    return request.param


# --------------------------------------------------------------------------------- index tables
def predicted(config, row):
    """The position that block row `row` predicts."""
    return ANCHOR + row + 1 - config.first_slot


def rows_that_change(method, config, made, name, at):
    """Block rows whose input changes with the rejected state `name` of position `at`."""
    before = buffer()
    states = getattr(before, name)
    after = replace(before, **{name: states.at[0, at - ANCHOR].add(1.0)})
    one, two = (inject(method, config, made, rejected).delta[0, 0] for rejected in (before, after))
    return [int(t) for t in jnp.flatnonzero(jnp.any(one != two, axis=1))]


def test_dflow_takes_a_state_to_the_slot_that_it_predicts(layout):
    config, made = network(layout, DFlow())
    got = {
        at: [predicted(config, t) for t in rows_that_change(DFlow(), config, made, "features", at)]
        for at in range(ANCHOR, ANCHOR + K)
    }
    want = {12: [13], 13: [14], 14: [15], 15: []}  # row 15 is behind the three real ones
    if layout == "next":
        want[12] = []  # the anchor's row predicts 13, and is no mask
    assert got == want


def test_dflow_reads_both_tokens(layout):
    config, made = network(layout, DFlow())
    before = inject(DFlow(), config, made, buffer()).delta
    first = replace(buffer(), tokens=buffer().tokens.at[0, 0].set(91))
    later = replace(buffer(), tokens=buffer().tokens.at[0, 1].set(91))
    assert (inject(DFlow(), config, made, first).delta != before).any()
    assert (inject(DFlow(), config, made, later).delta == before).all()
    other = DFlow().inject(config, made, VOCABULARY, buffer(), plain_block(config, token=8)).delta
    assert (other != before).any()


def test_retrace_drops_the_first_rejected_draft(layout):
    config, made = network(layout, ReTrace())

    def slots(name):
        return {
            at: [predicted(config, t) for t in rows_that_change(ReTrace(), config, made, name, at)]
            for at in range(ANCHOR, ANCHOR + K)
        }

    # slot 1 (13): old draft 13, target state 12; slot 2 (14): old draft 14, target state 13
    memory, scored = {12: [], 13: [13], 14: [14], 15: []}, {12: [13], 13: [14], 14: [], 15: []}
    if layout == "next":
        memory[13] = scored[12] = []
    assert slots("draft_hidden") == memory
    assert slots("final_hidden") == scored


@pytest.mark.parametrize("site", ["pre_fc", "post_norm"])
def test_carried_rows_keep_their_positions(layout, site):
    config, made = network(layout, Carryover(site))
    carried = inject(Carryover(site), config, made, buffer()).carried
    assert carried.positions[0, 0].tolist() == [12, 13, 14, 15]
    assert carried.valid[0, 0].tolist() == [True, True, True, False]


def test_shifted_blocks_stand_behind_their_rows(layout):
    config, made = network(layout)
    method, rejected = ReAnchor((1, 2, 3)), buffer()
    block = inject(method, config, made, rejected)
    assert block.positions[0, :, 0].tolist() == [12, 13, 14, 15]
    stale = rejected.argmax[0].tolist()
    assert block.tokens[0, :, 0].tolist() == [7, stale[0], stale[1], stale[2]]
    assert (block.tokens[0, :, 1:] == config.mask_token_id).all()
    assert block.context_end[0].tolist() == [12] * 4
    seen = [
        [int(p) for p, v in zip(*rows, strict=True) if v]
        for rows in zip(block.carried.positions[0], block.carried.valid[0], strict=True)
    ]
    assert seen == [[], [12], [12, 13], [12, 13, 14]]


# ------------------------------------------------------------------------------------ the pass
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_empty_buffer_is_plain(layout, method):
    """Bit for bit in one program, whatever the dead rows hold; close to the plain program."""
    config, made = network(layout, method)
    _, cache = context(config, made)
    one, two = (
        hidden(config, made, inject(method, config, made, buffer(0, seed)), cache)
        for seed in (0, 1)
    )
    assert (one == two).all()
    plain = hidden(config, made, plain_block(config), cache)
    np.testing.assert_allclose(one, plain, atol=1e-5)
    full = hidden(config, made, inject(method, config, made, buffer()), cache)
    assert jnp.abs(full - plain).max() > 1e-3
    again = hidden(config, made, inject(method, config, made, behind(buffer())), cache)
    assert (full == again).all()


@pytest.mark.parametrize("method", [DFlow(), ReTrace()], ids=repr)
def test_at_the_start_of_training_nothing_changes(layout, method):
    config, made = network(layout, method)
    _, cache = context(config, made)
    made = made | {"reuse": params.init(method.table(config), jax.random.key(0))}
    got = inject(method, config, made, buffer())
    assert (got.delta == 0).all()
    want = hidden(config, made, plain_block(config), cache)
    np.testing.assert_allclose(hidden(config, made, got, cache), want, atol=1e-5)


@pytest.mark.parametrize(("method", "count"), [(ReTrace(), 1), (DFlow(), 0)], ids=repr)
def test_too_few_rows_are_none(layout, method, count):
    config, made = network(layout, method)
    assert (inject(method, config, made, buffer(count)).delta == 0).all()
    assert (inject(method, config, made, buffer(count + 2)).delta != 0).any()


@pytest.mark.parametrize("site", ["pre_fc", "post_norm"])
def test_a_carried_row_is_a_context_row_with_a_mark(layout, site):
    """The same pass with the rejected rows written into the cache, as if they were committed."""
    method = Carryover(site)
    config, made = network(layout, method)
    rejected = buffer()
    _, cache = context(config, made)
    got = hidden(config, made, inject(method, config, made, rejected), cache)

    mark = made["reuse"]["embedding"][None, None]
    rows = rejected.features[:, :COUNT]
    fused = drafter.fuse(config, made, rows + mark if site == "pre_fc" else rows)
    fused = fused + mark if site == "post_norm" else fused
    at = ANCHOR + jnp.arange(COUNT, dtype=jnp.int32)[None]
    k, v = drafter.context_rows(config, made, fused, at)
    cache = replace(cache, length=jnp.array([ANCHOR], jnp.int32))
    cache = kv.append(cache, k, v, jnp.array([COUNT], jnp.int32))
    block = replace(plain_block(config), context_end=jnp.array([[ANCHOR + COUNT]], jnp.int32))
    np.testing.assert_allclose(got, hidden(config, made, block, cache), atol=1e-5)


def test_packed_shifted_blocks_equal_passes_of_their_own(layout):
    """And the first of them is the plain block, to the bit of the same program."""
    config, made = network(layout)
    method, rejected = ReAnchor((1, 2, 3)), buffer()
    features, cache = context(config, made)
    block = inject(method, config, made, rejected)
    packed = hidden(config, made, block, cache)
    other = inject(method, config, made, buffer(seed=4))
    np.testing.assert_array_equal(packed[:, 0], hidden(config, made, other, cache)[:, 0])
    for n, shift in enumerate((0, *method.shifts)):
        # The rejected rows as ordinary context, then an ordinary block behind them.
        text = jnp.concatenate([features[:, :ANCHOR], rejected.features[:, :shift]], axis=1)
        at = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        k, v = drafter.context_rows(config, made, drafter.fuse(config, made, text), at)
        alone = kv.append(
            empty_cache(config.layers, 1, 64, jnp.float32), k, v, jnp.array([text.shape[1]])
        )
        own = plain_block(config, ANCHOR + shift, int(block.tokens[0, n, 0]))
        np.testing.assert_allclose(packed[:, n], hidden(config, made, own, alone)[:, 0], atol=1e-5)


def test_with_the_truth_in_the_buffer_a_shifted_block_is_an_ordinary_one(layout):
    """The teacher test: rejected rows that hold the committed text's own states."""
    config, made = network(layout)
    method = ReAnchor((1, 2, 3))
    features, cache = context(config, made)
    truth = replace(buffer(), features=features[:, ANCHOR : ANCHOR + K])
    block = inject(method, config, made, truth)
    packed = hidden(config, made, block, cache)
    for n, shift in enumerate((0, *method.shifts)):
        own = plain_block(config, ANCHOR + shift, int(block.tokens[0, n, 0]))
        np.testing.assert_allclose(packed[:, n], hidden(config, made, own, cache)[:, 0], atol=1e-5)


# ------------------------------------------------------------------------------------- on disk
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_trained_method_is_in_the_checkpoint(method, tmp_path):
    raw = tiny.target_config("qwen3")
    target = hub.load_target(tiny.write(tmp_path / "t", raw, tiny.target_tensors(raw)))
    config = replace(drafter_hf.config_from_hf(tiny.drafter_config()), reuse=method)
    made = jax.tree.map(lambda x: x + 0.5, params.init(drafter.table(config), jax.random.key(0)))
    hub.save_drafter(tmp_path / "d", hub.Drafter("d", tmp_path, config, made), dtype=jnp.float32)
    back = hub.load_drafter(tmp_path / "d", target)
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, back.params, made)


def test_other_engines_layout_cannot_hold_a_method():
    config = replace(drafter_hf.config_from_hf(tiny.drafter_config()), reuse=Carryover())
    with pytest.raises(ValueError, match="speculators layout cannot hold reuse"):
        drafter_hf.config_to_speculators(config, verifier=None, architectures=["x"])


@pytest.mark.parametrize("method", [*METHODS, ReAnchor((2, 5), 0.25, 0.5)], ids=repr)
def test_a_method_is_its_json(method):
    assert reuse.from_json(reuse.to_json(method)) == method
    assert hash(method) == hash(reuse.from_json(reuse.to_json(method)))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"method": "carry"}, "'carry' is not one of carryover, dflow, retrace, reanchor"),
        ({"method": "dflow", "site": "pre_fc"}, "dflow has no setting 'site'"),
        ({"method": "carryover", "site": "late"}, "'late' is not pre_fc or post_norm"),
        ({"method": "reanchor", "shifts": [2, 1]}, "from 1 on, ascending"),
        ({"method": "reanchor", "shifts": [0]}, "must be whole numbers from 1 on"),
        ({"method": "reanchor", "shifts": [1.5]}, "must be whole numbers from 1 on"),
        ({"method": "reanchor", "name": "x"}, "has no setting 'name'"),
        ({"method": "reanchor", "threshold": 2}, "no probability"),
        ({"method": "reanchor", "trust": 1.5}, "trust 1.5 is not between 0 and 1"),
    ],
)
def test_what_no_method_has_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        reuse.from_json(raw)
