"""Checkpoints: whole or not at all, bit for bit, nothing guessed (cases H5, H6)."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from states import assert_same, drafter_state, small

from specjax.training.checkpoint import Checkpoints, check_meta


def abstract(state):
    """The state as shapes: host arrays and scalars as they are."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state
    )


# Bit for bit


@pytest.mark.parametrize("shapes", [False, True])
def test_every_leaf_comes_back_bit_for_bit_in_its_place(tmp_path, shapes, caplog):  # H5, H6
    state = drafter_state()
    Checkpoints(tmp_path).save(5, state, {})
    restored = Checkpoints(tmp_path).restore(5, abstract(state) if shapes else state)
    assert not caplog.records
    assert_same(restored, state)
    assert [int(layer["w"][0, 0]) for layer in restored["params"]["layers"]] == list(range(12))
    assert list(restored["params"]["by_number"]) == list(range(12))
    assert int(restored["optimizer"][0].count) == 3


def test_a_restored_key_draws_the_same_numbers(tmp_path):
    state = drafter_state()
    Checkpoints(tmp_path).save(1, state, {})
    restored = Checkpoints(tmp_path).restore(1, state)
    for name, key in [("key", state["key"]), ("keys", state["keys"][2])]:
        found = restored[name] if name == "key" else restored[name][2]
        assert (jax.random.bits(found, (8,)) == jax.random.bits(key, (8,))).all()


def test_continuing_equals_an_undisturbed_run(tmp_path):  # case H5
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-1, 3, 10))

    @jax.jit
    def step(state):
        noise = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), (4,))
        loss, grads = jax.value_and_grad(lambda w: jnp.sum((w - noise) ** 2))(state["w"])
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = optimizer.update(grads, state["opt"], state["w"])
        new = {"w": optax.apply_updates(state["w"], updates), "opt": opt}
        return new | {"key": state["key"], "step": state["step"] + jnp.int32(1)}, loss

    def run(state, count):
        losses = []
        for _ in range(count):
            state, loss = step(state)
            losses.append(float(loss))
        return state, losses

    w = jnp.zeros((4,))
    start = {"w": w, "opt": optimizer.init(w), "key": jax.random.key(0), "step": jnp.int32(0)}
    whole, losses = run(start, 10)
    half, first = run(start, 5)
    Checkpoints(tmp_path).save(5, half, {})
    rest, second = run(Checkpoints(tmp_path).restore(5, abstract(start)), 5)
    assert first + second == losses
    assert_same(rest, whole)


def test_shardings_come_back_over_eight_devices(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(array, *names):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    w = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    state = {
        "split": place(w, "data", "model"),
        "half": place(w.astype(jnp.bfloat16), None, "model"),
        "everywhere": place(jnp.arange(3)),
        "keys": place(jax.random.split(jax.random.key(1), 8), "data"),
        "empty": place(jnp.zeros((0, 8)), None, "model"),
        "alone": jnp.ones(()),
    }
    Checkpoints(tmp_path).save(1, state, {})
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding if x.committed else None
        ),
        state,
    )
    for like in (state, shapes):
        restored = Checkpoints(tmp_path).restore(1, like)
        assert_same(restored, state)
        for name, leaf in state.items():
            assert restored[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
            assert restored[name].committed == leaf.committed, name
    other = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model"))
    )
    moved = Checkpoints(tmp_path).restore(1, state | {"split": other})  # another layout is fine
    assert moved["split"].sharding == other.sharding
    assert (np.asarray(moved["split"]) == np.asarray(w)).all()


# Another state


def replace(state, **values):
    return {name: leaf for name, leaf in (state | values).items() if leaf is not ...}


@pytest.mark.parametrize(
    ("values", "leaf", "saved", "now"),
    [
        ({"w": ...}, "['w']", '"float32[4,3]"', "nothing"),
        ({"new": jnp.ones(2)}, "['new']", "nothing", '"float32[2]"'),
        ({"w": jnp.ones((3, 4))}, "['w']", '"float32[4,3]"', '"float32[3,4]"'),
        ({"w": jnp.ones((5, 3))}, "['w']", '"float32[4,3]"', '"float32[5,3]"'),
        ({"b": jnp.ones(4)}, "['b']", '"bfloat16[4]"', '"float32[4]"'),
        ({"epoch": 3.0}, "['epoch']", '"int"', '"float"'),
        ({"epoch": True}, "['epoch']", '"int"', '"bool"'),
        ({"epoch": jnp.int32(3)}, "['epoch']", '"int"', '"int32[]"'),
        ({"key": jax.random.key(0, impl="rbg")}, "['key']", '"key<fry>[]"', '"key<rbg>[]"'),
        ({"layers": {"3": jnp.ones(1)}}, "['layers'][3]", '"float32[1]"', "nothing"),
    ],
)
def test_another_leaf_is_an_error_that_names_it(tmp_path, values, leaf, saved, now):  # case H6
    state = {
        "w": jnp.ones((4, 3)),
        "b": jnp.ones(4, jnp.bfloat16),
        "key": jax.random.key(0),
        "epoch": 3,
        "layers": {3: jnp.ones(1)},
    }
    Checkpoints(tmp_path).save(1, state, {})
    with pytest.raises(ValueError, match=re.escape(f"  {leaf}: saved {saved}, now {now}")):
        Checkpoints(tmp_path).restore(1, replace(state, **values))


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    with pytest.raises(TypeError, match=r"\['x'\]\['f'\] is a float32"):
        checkpoints.save(1, {"x": {"f": np.float32(1)}}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, small(1), {"seed": jnp.ones(())})
    with pytest.raises(ValueError, match="no arrays"):
        checkpoints.save(1, {"x": 1}, {})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    assert not (tmp_path / "c").exists()
    assert checkpoints.latest() is None


# What is kept


def test_the_best_is_kept_beside_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.best() is None
    for step, metric in [(1, float("nan")), (2, 1.5), (3, 2.5), (4, None), (5, 2.5), (6, 2.0)]:
        checkpoints.save(step, small(step), {}, metric=metric)
    assert checkpoints.best() == 3
    assert checkpoints.steps() == [3, 5, 6]
    checkpoints.save(7, small(7), {}, metric=3.0)
    assert checkpoints.best() == 7
    assert checkpoints.steps() == [6, 7]


def test_a_step_that_is_not_past_the_latest_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, small(5), {})
    for step in (5, 4, -1):
        with pytest.raises(ValueError, match=f"step {step} is not past the latest .*5: remove"):
            checkpoints.save(step, small(step), {})
    assert_same(checkpoints.restore(5, small(0)), small(5))


# Meta


def test_meta_comes_back_and_a_change_is_shown_line_by_line(tmp_path):
    meta = {"config": {"lr": 1e-3, "taps": (1, 4)}, "target": "ab12", "old": 1}
    Checkpoints(tmp_path).save(1, small(1), meta)
    saved = Checkpoints(tmp_path).meta(1)
    assert saved == {"config": {"lr": 1e-3, "taps": [1, 4]}, "target": "ab12", "old": 1}
    check_meta(saved, meta)
    now = {"config": {"lr": 2e-3, "taps": (1, 5), "seed": 0}, "target": "ab12"}
    with pytest.raises(ValueError, match="other settings") as caught:
        check_meta(saved, now)
    assert str(caught.value).split("\n")[1:] == [
        "  config.lr: saved 0.001, now 0.002",
        "  config.taps: saved [1, 4], now [1, 5]",
        "  config.seed: saved nothing, now 0",
        "  old: saved 1, now nothing",
    ]


# Cost


def test_a_save_leaves_no_thread(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, small(0), {})
    before = set(threading.enumerate())
    checkpoints.save(1, small(1), {})
    checkpoints.restore(1, small(1))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive(), thread


def test_the_state_may_be_donated_after_a_save(tmp_path):
    state = small(1)
    Checkpoints(tmp_path).save(1, state, {})
    jax.jit(lambda w: w + 1, donate_argnums=0)(state["w"]).block_until_ready()
    assert_same(Checkpoints(tmp_path).restore(1, small(0)), small(1))
