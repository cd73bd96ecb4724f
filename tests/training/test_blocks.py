"""Packed blocks against rounds of decoding, and what must not leak: cases E1, E2, H1, H2, H3."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from by_hand import F, S, features_of, packed, states_of

from specjax.decoding.drafting import DFlash
from specjax.models import drafter, drafter_hf
from specjax.models.params import abstract, load
from specjax.models.storage import open_checkpoint
from specjax.training import blocks
from specjax.training.blocks import Anchors
from specjax.training.objectives import Objective, loss_sums
from specjax.types import Sampling, Vocabulary

VOCABULARY = Vocabulary(
    jnp.asarray(tiny.tensor("model.embed_tokens.weight", (tiny.VOCAB, 48))),
    jnp.asarray(tiny.tensor("lm_head.weight", (tiny.VOCAB, 48))),
)
SLIDING = {"sliding_window": 6, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "fill": ({}, "fill"),
    "next": ({}, "next"),
    "causal": ({"is_causal": True}, "fill"),
    "sliding": (SLIDING | MIXED, "fill"),  # sliding layers are causal
    "sliding, next": (SLIDING | MIXED, "next"),
    "sliding both ways": (SLIDING | {"sliding_window_non_causal": True} | MIXED, "fill"),
}
# Documents of (prompt, answer) tokens per row, several of them; the rest of a row is padding.
DOCUMENTS = [[(3, 9), (5, 14), (1, 2)], [(1, 4), (9, 2), (2, 17)]]


def at(*rows):
    return Anchors(jnp.array(rows, jnp.int32), jnp.ones(np.shape(rows), bool))


@pytest.fixture(scope="module", params=KINDS)
def network(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("drafter"), *KINDS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make(tmp_path_factory.mktemp("drafter"), {"num_hidden_layers": 1}, "fill")


def make(directory, overrides, layout):
    written = tiny.drafter_config(**overrides)
    tiny.write(directory, written, tiny.drafter_tensors(written))
    config = drafter_hf.config_from_hf(written, layout=layout)
    return config, load(drafter.table(config), open_checkpoint(directory), dtype=jnp.float32)


@partial(jax.jit, static_argnums=0)
def packed_pass(config, params, batch, features, anchors):
    return blocks.hidden(config, params, VOCABULARY, batch, features, anchors)


@partial(jax.jit, static_argnums=(0, 1))
def step_sums(config, objective, params, vocabulary, batch, features, anchors, teacher):
    """The sums of a training step; `teacher` are the target's final states [B, S, E]."""
    hidden = blocks.hidden(config, params, vocabulary, batch, features, anchors)
    labels = blocks.block_labels(config, batch, anchors)
    states = blocks.target_rows(teacher, labels)
    return loss_sums(objective, config, params, vocabulary, hidden, labels, states, chunk=4)


# The packed pass is decoding.


class Telling(DFlash):
    """DFlash that tells its states."""

    keeps = frozenset({"draft_hidden"})


@partial(jax.jit, static_argnums=0)
def decode(config, params, features, tokens, anchor):
    """One round of decoding behind tokens[: anchor + 1], in two extensions of the context."""
    method = Telling(config, config.num_drafts)
    draft = method.init(1, 2 * S, jnp.float32)
    count = jnp.array([0, anchor // 2, anchor])
    for i in range(2):
        rows = jnp.arange(S)[None] + count[i]
        fresh = jnp.where(rows[..., None] < anchor, features[:, rows[0] % S], 1e4)
        draft = method.extend(params, draft, fresh, rows, (count[i + 1] - count[i])[None])
    greedy = Sampling(jnp.zeros(1), jnp.int32(0), jnp.float32(1.0))
    length = anchor[None] + 1
    proposal, _ = method.propose(params, VOCABULARY, draft, tokens, length, None, None, greedy)
    return proposal.hidden[0], proposal.tokens[0]


def test_the_packed_pass_equals_decoding_at_every_anchor(network):
    config, params = network
    batch = packed(DOCUMENTS)
    features = features_of(batch)
    anchors = blocks.draw_anchors(jax.random.key(0), batch, S)  # all there are
    hidden = packed_pass(config, params, batch, features, anchors)
    drafts = jnp.argmax(drafter.unembed(config, params, VOCABULARY, hidden), axis=-1)
    assert int(anchors.valid.sum()) == sum(n - 1 for row in DOCUMENTS for _, n in row)
    for b, j in np.argwhere(np.asarray(anchors.valid)):
        row = int(anchors.at[b, j])
        first = int(batch.start[b, row])
        alone = jnp.roll(features[b], -first, axis=0)[None], jnp.roll(batch.tokens[b], -first)[None]
        want, tokens = decode(config, params, *alone, jnp.int32(row - first))
        np.testing.assert_allclose(hidden[b, j], want, atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(drafts[b, j], tokens)


def test_blocks_are_those_of_a_round(plain):  # case E1
    config, _ = plain
    batch = packed(DOCUMENTS)
    anchors = at([4, 17, 20], [2, 14, 19])
    made = blocks.block_inputs(config, batch, anchors)
    for b, j in np.ndindex(2, 3):
        row = int(anchors.at[b, j])
        local = row - int(batch.start[b, row])
        want = drafter.draft_block(config, batch.tokens[b, row][None], jnp.array([local]))
        np.testing.assert_array_equal(made.tokens[b, j], want.tokens[0, 0])
        np.testing.assert_array_equal(made.positions[b, j], want.positions[0, 0])
        assert int(made.context_end[b, j] - made.context_start[b, j]) == int(want.context_end[0, 0])
        assert made.tokens[b, j].tolist() == [int(batch.tokens[b, row])] + [tiny.MASK] * 7


# Nothing leaks.


def test_nothing_else_changes_a_block(network):  # case H1
    config, params = network
    batch = packed(DOCUMENTS)
    features = features_of(batch)
    anchors = at([4, 17, 19, 28], [2, 18, 25, 33])
    base = packed_pass(config, params, batch, features, anchors)
    for b, j in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 3)]:
        row = int(anchors.at[b, j])
        first = int(batch.start[b, row])
        slot = jnp.arange(S)[None]
        own = jnp.arange(2)[:, None] == b
        seen = own & (slot >= first) & (slot < row)
        others = jnp.where(jnp.arange(4)[None] == j, anchors.at, anchors.at[:, ::-1] + 1)
        changed = {
            "features": (batch, jnp.where(seen[:, :, None], features, 2.0 - features), anchors),
            "tokens": (
                batch.replace(tokens=jnp.where(own & (slot == row), batch.tokens, 11)),
                features,
                anchors,
            ),
            "anchors": (batch, features, anchors._replace(at=jnp.where(own, others, 5))),
        }
        for name, args in changed.items():
            got = packed_pass(config, params, *args)
            np.testing.assert_array_equal(got[b, j], base[b, j], err_msg=name)
            assert float(jnp.abs(got - base).max()) > 1e-3, name  # elsewhere it does something
        before = packed_pass(config, params, batch, features.at[b, row - 1].add(3.0), anchors)
        own_token = batch.replace(tokens=batch.tokens.at[b, row].set(11))
        token = packed_pass(config, params, own_token, features, anchors)
        for got in (before, token):
            assert (jnp.abs(got[b, j] - base[b, j]).max(axis=-1) > 1e-4).all()


def test_no_gradient_from_the_anchor_on_or_into_other_blocks(network):  # case H1
    config, params = network
    batch = packed([[(10, 30)]])
    features, anchors = features_of(batch), at([10, 12, 13, 30])
    labels = blocks.block_labels(config, batch, anchors)
    inputs = blocks.block_inputs(config, batch, anchors)

    def own_loss(features, delta, block):
        rows = blocks.context(config, params, features, batch.positions)
        hidden = drafter.forward(config, params, VOCABULARY, inputs.replace(delta=delta), rows)
        own = labels._replace(mask=labels.mask & (jnp.arange(4)[None, :, None] == block))
        used = hidden[:, :, config.first_slot :]
        return loss_sums(Objective(), config, params, VOCABULARY, used, own, chunk=4).loss

    gradient = jax.jit(jax.grad(own_loss, argnums=(0, 1)))
    delta = jnp.zeros((1, 4, config.block_size, 48))
    for j, row in enumerate([10, 12, 13, 30]):
        to_features, to_slots = gradient(features, delta, j)
        assert (to_features[0, row:] == 0).all()
        assert (jnp.abs(to_features[0, row - 4 : row]).max(axis=-1) > 0).all()
        assert (jnp.abs(to_slots[0, j]).max(axis=-1) > 0).all()
        assert (to_slots.at[0, j].set(0.0) == 0).all()


@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_only_the_drafter_learns(plain, weights):
    config, params = plain
    batch, anchors = packed(DOCUMENTS), at([4, 17, 19, 28], [2, 18, 25, 33])
    objective = Objective((("ce", 1.0), ("kl", 0.5)), weights)

    def mean(params, vocabulary, features, teacher):
        args = (params, vocabulary, batch, features, anchors, teacher)
        return step_sums(config, objective, *args).mean

    gradient = jax.jit(jax.grad(mean, argnums=(0, 1, 2, 3)))
    of_drafter, *frozen = gradient(params, VOCABULARY, features_of(batch), states_of(batch))
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(of_drafter))
    assert all((x == 0).all() for x in jax.tree.leaves(frozen))


# Anchors and labels.


def test_anchors_are_drawn_uniformly_where_a_label_follows():
    batch = packed([[(3, 9), (0, 19), (4, 1)], [(2, 4), (8, 0)], [(20, 0)]])
    rows = [[*range(3, 11), *range(12, 30)], [2, 3, 4], []]
    draw = jax.jit(jax.vmap(partial(blocks.draw_anchors, count=6), in_axes=(0, None)))
    got = draw(jax.random.split(jax.random.key(1), 4000), batch)
    for b, eligible in enumerate(rows):
        chosen, valid = np.asarray(got.at[:, b]), np.asarray(got.valid[:, b])
        assert (valid.sum(axis=1) == min(6, len(eligible))).all()
        assert (chosen[~valid] == 0).all()
        assert (np.diff(chosen) >= valid[:, :-1]).all()  # ascending, no row twice
        counts = np.bincount(chosen[valid], minlength=S)
        assert set(np.flatnonzero(counts)) == set(eligible)
        if len(eligible) > 6:
            expected = 4000 * 6 / len(eligible)
            assert (np.abs(counts[eligible] - expected) < 5 * expected**0.5).all()
    again = draw(jax.random.split(jax.random.key(1), 4000)[:3], batch)
    np.testing.assert_array_equal(again.at, got.at[:3])
    assert (got.at[0] != got.at[1]).any()


@pytest.mark.parametrize("count", [0, S + 1])
def test_more_anchors_than_rows_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} anchors .* {S} tokens"):
        blocks.draw_anchors(jax.random.key(0), packed(DOCUMENTS), count)


@pytest.mark.parametrize("layout", ["fill", "next"])
def test_labels_end_with_the_document_the_answer_and_the_row(layout, tmp_path):  # cases E2, H2
    config, _ = make(tmp_path / "d", {}, layout)
    batch = packed([[(3, 9), (0, 19), (1, 8)], [(1, 4), (9, 2), (2, 17)]])
    batch = batch.replace(
        supervised=batch.supervised.at[0, 25:27].set(False)
    )  # an answer with a gap
    anchors = blocks.draw_anchors(jax.random.key(0), batch, S)
    labels = blocks.block_labels(config, batch, anchors)
    assert labels.tokens.shape == (2, S, {"fill": 7, "next": 8}[layout])
    document, supervised = np.asarray(batch.document), np.asarray(batch.supervised)
    lengths = set()
    for b, j in np.ndindex(2, S):
        row = int(anchors.at[b, j])
        count = 0
        while (
            bool(anchors.valid[b, j])
            and count < config.num_drafts
            and row + 1 + count < S
            and document[b, row + 1 + count] == document[b, row]
            and supervised[b, row + 1 + count]
        ):
            count += 1
        assert labels.mask[b, j].tolist() == [k < count for k in range(config.num_drafts)]
        assert labels.at[b, j, :count].tolist() == list(range(row + 1, row + 1 + count))
        np.testing.assert_array_equal(
            labels.tokens[b, j, :count], batch.tokens[b, row + 1 : row + 1 + count]
        )
        lengths.add(count)
    assert lengths == set(range(config.num_drafts + 1))
    states = jnp.arange(S, dtype=jnp.float32)[None, :, None] * jnp.ones((2, 1, 3))
    np.testing.assert_array_equal(
        blocks.target_rows(states, labels),
        np.repeat(np.asarray(labels.at)[..., None] - 1, 3, axis=-1),
    )


# The network can say exactly what the labels ask for, and nothing else.

WINDOW = 9


def oracle(layout):
    """A drafter that adds up the features it sees within its window, and a head that reads them.

    A slot at position p sees the rows from p - 8 to the anchor. Row r holds the difference of the
    tokens behind r + 7 and r + 8 rows (one further in the layout "next"), so that the sum over the
    rows of a slot has the token it must predict and minus the one that all slots have in common.
    """
    V = tiny.VOCAB
    written = tiny.drafter_config(
        hidden_size=V + 3,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        sliding_window=WINDOW,
        use_sliding_window=True,
        sliding_window_non_causal=True,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=V + 3,
        dflash_config={"mask_token_id": tiny.MASK, "target_layer_ids": [0]},
    )
    config = drafter_hf.config_from_hf(written, layout=layout)
    params = jax.tree.map(lambda p: jnp.zeros(p.shape), abstract(drafter.table(config)))
    eye = jnp.eye(V + 3)
    tokens_only = eye.at[V:].set(0.0)
    layer = params["layers"][0]
    params |= {"fc": eye, "hidden_norm": jnp.ones(V + 3), "norm": jnp.full(V + 3, 100.0)}
    layer["attention_norm"] = layer["mlp_norm"] = jnp.ones(V + 3)
    layer["attention"] |= {"v": {"weight": tokens_only}, "o": {"weight": eye}}
    embedding = jnp.zeros((V, V + 3)).at[:, V].set(0.1)
    return config, params, Vocabulary(embedding, tokens_only[:V])


@pytest.mark.parametrize("layout", ["fill", "next"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_an_oracle_loses_nothing_and_a_shifted_one_everything(layout, shift):  # cases E2, H2
    config, params, vocabulary = oracle(layout)
    batch = packed([[(12, 28)], [(10, 30)]])
    distinct = jnp.stack([jnp.roll(jnp.arange(S, dtype=jnp.int32) * 2, 5), jnp.arange(S)[::-1]])
    batch = batch.replace(tokens=distinct.astype(jnp.int32))
    ahead = WINDOW - 1 + (layout == "next") + shift
    known = jax.nn.one_hot(jnp.roll(batch.tokens, -ahead, axis=1), tiny.VOCAB + 3)
    features = known - jnp.roll(known, -1, axis=1)
    anchors = blocks.draw_anchors(jax.random.key(2), batch, 12)
    states = jnp.zeros((2, S, tiny.VOCAB + 3))
    sums = step_sums(config, Objective(), params, vocabulary, batch, features, anchors, states)
    accuracy = sums.correct / sums.seen
    if shift == 0:
        assert float(sums.mean) < 1e-5
        assert (accuracy == 1).all()
        assert float(sums.expected) == float(sums.seen.sum())
    else:
        assert float(sums.mean) > 5
        assert (accuracy < 0.1).all()


# Short samples, and memory.


@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_short_samples_and_empty_ones_do_no_harm(plain, weights):  # case H3
    config, params = plain
    objective = Objective((("ce", 1.0), ("kl", 0.5)), weights)

    def mean(params, batch, anchors):
        args = (params, VOCABULARY, batch, features_of(batch), anchors, states_of(batch))
        sums = step_sums(config, objective, *args)
        return sums.mean, sums

    step = jax.jit(jax.grad(mean, has_aux=True))

    def run(documents):
        batch = packed(documents)
        gradient, sums = step(params, batch, blocks.draw_anchors(jax.random.key(0), batch, 4))
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((sums, gradient)))
        return sums, gradient

    sums, gradient = run([[(2, 38)], [(2, 4)], [(6, 0)]])
    assert sums.blocks == 4 + 3
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(gradient))
    sums, gradient = run([[(6, 0)], [(40, 0)], []])
    assert sums.mean == 0
    assert all((x == 0).all() for x in jax.tree.leaves((sums, gradient)))


def test_invalid_blocks_do_not_count(plain):  # case H3
    config, params = plain
    batch = packed([[(2, 38)], [(2, 4)]])
    drawn = blocks.draw_anchors(jax.random.key(0), batch, 4)
    args = (params, VOCABULARY, batch, features_of(batch), drawn, states_of(batch))
    sums = step_sums(config, Objective(), *args)
    hidden = packed_pass(config, params, batch, features_of(batch), drawn)
    labels = blocks.block_labels(config, batch, drawn)
    total, weight = 0.0, 0.0
    logits = np.asarray(hidden) @ np.asarray(VOCABULARY.head).T
    for b, j in np.argwhere(np.asarray(drawn.valid)):
        for k in range(int(labels.mask[b, j].sum())):
            row = logits[b, j, k].astype(np.float64)
            own = np.log(np.exp(row - row.max()).sum()) + row.max() - row[labels.tokens[b, j, k]]
            total, weight = total + np.exp(-k / 4) * own, weight + np.exp(-k / 4)
    np.testing.assert_allclose(sums.mean, total / weight, rtol=1e-5)


def test_memory_of_a_step_is_linear_in_anchors_whatever_the_vocabulary(plain):
    config, params = plain

    def temporary(anchors, vocab):
        table = jax.ShapeDtypeStruct((vocab, 48), jnp.float32)
        batch = jax.eval_shape(lambda: packed([[]] * 2, rows=256))
        features = jax.ShapeDtypeStruct((2, 256, F), jnp.float32)
        where = Anchors(
            jax.ShapeDtypeStruct((2, anchors), jnp.int32),
            jax.ShapeDtypeStruct((2, anchors), jnp.bool_),
        )
        states = jax.ShapeDtypeStruct((2, 256, 48), jnp.float32)
        step = jax.jit(jax.grad(lambda *args: step_sums(config, Objective(), *args).mean))
        lowered = step.lower(params, Vocabulary(table, table), batch, features, where, states)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    counts, vocab = (32, 64, 128), 40000
    sizes = [temporary(count, vocab) for count in counts]
    slopes = [(sizes[i + 1] - sizes[i]) / 2 / (counts[i + 1] - counts[i]) for i in range(2)]
    assert max(slopes) < 1.2 * min(slopes)
    logits = 7 * vocab * 4  # bytes, of one block
    assert max(slopes) < logits / 5
    assert sizes[0] < 3 * 4 * logits + 64 * max(slopes)  # those of a chunk and their gradient
