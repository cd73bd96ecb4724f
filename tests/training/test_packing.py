"""Packing: every token once, documents apart, batches a function of the step."""

import re

import numpy as np
import pytest

from specjax.training.data import Documents
from specjax.training.packing import Packing

FIELDS = ("tokens", "positions", "start", "document", "supervised", "source")


def documents(lengths, prompts, first=0):
    """Documents whose token ids say where they stand: `first`, `first` + 1, ..."""
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    tokens = np.arange(first, first + starts[-1], dtype=np.int32)
    return Documents(tokens, starts, np.asarray(prompts, np.int32), {})


def many(count=60, seed=0, most=20, first=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, most, count)
    return documents(lengths, [rng.integers(1, n) for n in lengths], first)


def epoch(packing, number=0):
    """All rows of one epoch, of packings whose batch divides them."""
    assert packing.packed % packing.rows == 0
    steps = packing.steps_per_epoch
    batches = [packing.batch(number * steps + i) for i in range(steps)]
    return {name: np.concatenate([getattr(b, name) for b in batches]) for name in FIELDS}


def seen(rows, size):
    """How often each token of the sources occurs."""
    return np.bincount(rows["source"][rows["source"] >= 0], minlength=size)


def test_every_token_occurs_once_and_keeps_its_mask():
    made = many()
    packing = Packing([(made, 1.0)], 32, 1, seed=3)
    for number in (0, 1):
        rows = epoch(packing, number)
        assert (seen(rows, len(made.tokens)) == 1).all()
        real = rows["source"] >= 0
        np.testing.assert_array_equal(rows["tokens"][real], made.tokens[rows["source"][real]])
        supervised = made.supervised[rows["source"][real]]
        np.testing.assert_array_equal(rows["supervised"][real], supervised)
        assert not rows["supervised"][~real].any()
        assert (rows["document"][~real] == -1).all()
        assert (rows["tokens"][~real] == 0).all()
    assert (packing.cut, packing.dropped) == (0, 0)
    assert packing.fill == pytest.approx(len(made.tokens) / (packing.packed * 32))
    assert packing.fill > 0.85


def test_documents_of_a_row_are_apart():
    """A row's range from `start` to itself is its own document, from the document's first token;
    padding is a range of its own, so that it sees no document and none sees it."""
    made = many()
    rows = epoch(Packing([(made, 1.0)], 32, 1, seed=0))
    several = 0
    for tokens, positions, start, document, _, source in zip(*map(rows.get, FIELDS), strict=True):
        several += len(set(document) - {-1}) > 1
        for at in range(32):
            own = slice(start[at], at + 1)
            assert (document[own] == document[at]).all()
            assert (positions[own] == np.arange(at + 1 - start[at])).all()
            if document[at] >= 0:
                whole, _ = made.document(document[at])
                assert tokens[own].tolist() == whole[: at + 1 - start[at]].tolist()
                assert (source[own] == made.starts[document[at]] + positions[own]).all()
    assert several > 5


def test_a_batch_is_a_function_of_the_step():
    made = [(many(), 1.0), (many(20, 1), 0.5)]
    packing, other = Packing(made, 32, 4, seed=5), Packing(made, 32, 4, seed=5)
    want = [packing.batch(step) for step in range(3 * packing.steps_per_epoch)]
    for step in reversed(range(len(want))):  # a fresh iterator, in another order
        got = other.batch(step)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(got, name), getattr(want[step], name))
    single = Packing(made, 32, 1, seed=5)
    assert not np.array_equal(epoch(single, 0)["source"], epoch(single, 1)["source"])
    assert not np.array_equal(Packing(made, 32, 4, seed=6).batch(0).source, want[0].source)


def test_dtypes_and_shapes():
    batch = Packing([(many(), 1.0)], 32, 4, seed=0).batch(2, 1, 2)
    for name in FIELDS:
        array = getattr(batch, name)
        assert array.shape == (2, 32)
        assert array.dtype == (bool if name == "supervised" else np.int32)


def test_every_row_occurs_once_an_epoch_where_the_batch_does_not_divide_them():
    made = documents([10] * 7, [2] * 7)
    packing = Packing([(made, 1.0)], 10, 3, seed=0)
    assert (packing.packed, packing.steps_per_epoch) == (7, 3)
    batches = [packing.batch(step) for step in range(7)]  # three epochs
    order = np.concatenate([batch.document[:, 0] for batch in batches])
    for first in (0, 7, 14):
        assert sorted(order[first : first + 7]) == list(range(7))


def test_hosts_share_a_batch():
    made = many()
    packing = Packing([(made, 1.0)], 32, 4, seed=1)
    for step in (0, 3, packing.steps_per_epoch):
        whole = packing.batch(step)
        for hosts in (2, 4):
            shares = [packing.batch(step, host, hosts) for host in range(hosts)]
            for name in FIELDS:
                together = np.concatenate([getattr(share, name) for share in shares])
                np.testing.assert_array_equal(together, getattr(whole, name))
    with pytest.raises(ValueError, match="4 rows do not divide among 3 processes"):
        packing.batch(0, 0, 3)
    for step, host in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(ValueError, match="no step"):
            packing.batch(step, host, 4)


@pytest.mark.parametrize(("weight", "counts"), [(0.5, {0: 30, 1: 30}), (2.0, {2: 60})])
def test_weights(weight, counts):
    half, rest = many(), many(20, 2, first=1000)
    packing = Packing([(half, weight), (rest, 1.0)], 32, 1, seed=0)
    rows = epoch(packing)
    often = seen(rows, len(packing.tokens))
    assert (often[len(half.tokens) :] == 1).all()
    by_document = [set(often[a:b]) for a, b in zip(half.starts, half.starts[1:], strict=False)]
    assert all(len(values) == 1 for values in by_document)  # whole documents
    values, found = np.unique([min(v) for v in by_document], return_counts=True)
    assert dict(zip(values.tolist(), found.tolist(), strict=True)) == counts
    assert (packing.tokens[len(half.tokens) :] == rest.tokens).all()


def test_copies_of_a_document_in_one_row_are_apart():
    packing = Packing([(documents([4], [1]), 2.5)], 8, 1, seed=0)
    rows = epoch(packing)
    assert rows["document"][0].tolist() in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert rows["start"][0].tolist() == [0] * 4 + [4] * 4


@pytest.mark.parametrize("weight", [0.01, 0.25])
def test_a_weight_that_takes_no_document_is_refused(weight):
    few, rest = documents([4, 4], [1, 1]), many(20)
    message = f"the weight {weight} of source 1 takes none of its 2 documents: 0.5 takes one"
    with pytest.raises(ValueError, match=message):
        Packing([(rest, 1.0), (few, weight)], 32, 1, seed=0)
    packing = Packing([(rest, 1.0), (few, 0.5)], 32, 1, seed=0)
    assert seen(epoch(packing), len(packing.tokens))[len(rest.tokens) :].sum() == 4


def test_a_document_longer_than_a_row_is_cut_at_its_end():
    made = documents([30, 25, 8], [3, 20, 2])
    packing = Packing([(made, 1.0)], 20, 1, seed=0)
    assert (packing.cut, packing.dropped) == (2, 1)  # the second has nothing but its prompt left
    rows = epoch(packing)
    often = seen(rows, 63)
    assert (often[:20] == 1).all()
    assert not often[20:55].any()
    assert (often[55:] == 1).all()
    assert rows["supervised"].sum() == 17 + 6


def test_a_long_tail_of_documents_packs_linearly():
    """More rows than stay open: documents still land once, in rows with room."""
    made = documents([7, 6] * 3000, [1] * 6000)
    packing = Packing([(made, 1.0)], 13, 1, seed=0)
    assert packing.fill > 0.95
    assert (seen(epoch(packing), len(made.tokens)) == 1).all()


def test_what_cannot_be_packed_is_refused():
    made = documents([10, 10], [2, 2])
    cases = [
        (([(made, 1.0)], 10, 3, 0), "a batch of 3 rows needs as many; 2 documents fill 2 rows"),
        (([(made, 1.0)], 2, 1, 0), "prompts of all 2 documents fill a row of 2 tokens"),
        (([(made, 0.0)], 10, 1, 0), "weight of source 0 must be above 0, not 0.0"),
        (([(made, float("nan"))], 10, 1, 0), "weight of source 0"),
        (([(documents([], []), 1.0)], 10, 1, 0), "source 0 holds no documents"),
        (([], 10, 1, 0), "no sources"),
        (([(made, 1.0)], 1, 1, 0), "row_length must be at least 2"),
        (([(made, 1.0)], 10, 0, 0), "rows must be at least 1"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Packing(*arguments)
