"""The step: micro-batches and devices change nothing, precision is kept, objectives compose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import Mesh

import specjax
from specjax.models import hub
from specjax.models import target as networks
from specjax.training import config, trainer
from specjax.training.features import clean_pass
from specjax.training.network import drafter_config
from specjax.training.objectives import Objective
from specjax.training.packing import Batch
from specjax.training.run import placed
from specjax.training.trainer import Plan, States

ROWS, LENGTH = 8, 48


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    made = tiny.target_config("qwen3", vocab_size=96)
    return tiny.write(folder / "target", made, tiny.target_tensors(made))


@pytest.fixture(scope="module")
def target(directory):
    return specjax.load_target(directory)


def network(target, **changes):
    shape = config.Shape(layers=2, taps=(0, 2), mask_token_id=95, **changes)
    return drafter_config(shape, target)


def plan(target, **changes):
    arguments = {"objective": Objective(), "anchors": 5, "head_chunk": 4} | changes
    return Plan(target=target.config, drafter=network(target), **arguments)


def batch(seed=0, rows=ROWS):
    """Two documents a row, of 20 and 24 tokens, and some padding."""
    rng = np.random.default_rng(seed)
    position = np.concatenate([np.arange(20), np.arange(24), np.zeros(4)]).astype(np.int32)
    document = np.repeat(np.int32([0, 1, -1]), [20, 24, 4])
    start = np.repeat(np.int32([0, 20, 44]), [20, 24, 4])
    shape = (rows, LENGTH)
    # Rows differ in how much they supervise: 5 tokens in one half, 36 in the other.
    first = np.where(np.arange(rows) % 2, 4, 15)[:, None]
    supervised = (position >= first) & (position < 24) & (document >= 0)
    supervised[::2] &= document == 0
    return Batch(
        tokens=rng.integers(0, 95, shape).astype(np.int32),
        positions=np.broadcast_to(position, shape),
        start=np.broadcast_to(start, shape),
        document=np.broadcast_to(document, shape),
        supervised=supervised,
        source=np.full(shape, -1, np.int32),
    )


ADAM = config.Optimizer(learning_rate=1e-2, warmup=0.0)


def curve(plan, target, *, mesh=None, steps=3, optimizer=ADAM, states=None):
    """Losses and the last state of a few steps."""
    update = trainer.make_optimizer(optimizer, 100)
    state = trainer.fresh_state(plan, update, mesh=mesh)
    step = trainer.make_step(plan, update)
    losses = []
    for i in range(steps):
        arrays = placed(mesh, batch(i), states(i) if states else None)
        state, metrics = step(state, target.params, *arrays, None)
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state)


@pytest.fixture(scope="module")
def whole(target):
    """The curve of one device and one big batch, and the state behind it."""
    return curve(plan(target), target)


def close(one, two, atol=1e-5):
    """Equal gradients, by Adam's first moments.

    Where a gradient is all rounding, Adam's update is a sign: the parameters themselves may differ.
    """
    one, two = (optax.tree.get(state.opt_state, "mu") for state in (one, two))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one, two)


def test_micro_batches_change_nothing(target, whole):
    """H4: the mean is over all labels, however unequal the micro-batches are."""
    parts, state = curve(plan(target, accumulate=4), target)
    np.testing.assert_allclose(parts, whole[0], rtol=1e-5)
    close(state, whole[1])


@pytest.mark.parametrize("shape", [(8, 1), (2, 2)])
def test_a_mesh_gives_the_curve_of_one_device(target, whole, directory, shape):
    mesh = Mesh(np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))
    spread = specjax.load_target(directory, mesh=mesh)
    parts, state = curve(plan(spread), spread, mesh=mesh)
    np.testing.assert_allclose(parts, whole[0], rtol=1e-5)
    close(state, whole[1])


def test_the_loss_falls_on_one_batch(target):
    update = trainer.make_optimizer(ADAM, 40)
    state = trainer.fresh_state(plan(target), update)
    step = trainer.make_step(plan(target), update)
    first, losses = placed(None, batch(), None)[0], []
    for _ in range(40):
        state, metrics = step(state, target.params, first, None, None)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0], losses
    assert metrics["tau"] > 1.05


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_small_updates_are_not_lost_in_bfloat16(target, name):
    """H8: arithmetic in bfloat16, but parameters and moments in float32."""
    _, state = curve(
        plan(target, compute="bfloat16"),
        target,
        steps=1,
        optimizer=config.Optimizer(name=name, learning_rate=1e-4, warmup=0.0),
    )
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {str(x.dtype) for x in floats} == {"float32"}
    moving = trainer.make_optimizer(config.Optimizer(learning_rate=1e-4, warmup=0.0), 10**9)
    params = {"w": jnp.ones(())}
    opt_state = moving.init(params)

    def push(_, carry):
        params, opt_state = carry
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = moving.update({"w": jnp.full((), 0.5)}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, _ = jax.lax.fori_loop(0, 1000, push, (params, opt_state))
    assert abs(float(params["w"]) - 0.9) < 0.01


def test_norms_do_not_decay(target):
    decaying = config.Optimizer(learning_rate=1e-2, warmup=0.0, weight_decay=0.5)
    update = trainer.make_optimizer(decaying, 100)
    params = trainer.fresh_state(plan(target), update).params
    nothing = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = update.update(nothing, update.init(params), params)
    assert float(jnp.abs(updates["norm"]).max()) == 0
    assert float(jnp.abs(updates["fc"]).max()) > 0


def test_the_schedule_warms_up_and_ends_at_zero():
    rate = trainer.schedule(config.Optimizer(learning_rate=2.0, warmup=0.1), 100)
    rates = [float(rate(step)) for step in (0, 10, 100)]
    assert rates == pytest.approx([2 / 11, 2.0, 0.0])


def test_given_states_replace_the_pass_over_the_target(target):
    made = plan(target, objective=Objective(losses=(("ce", 0.1), ("kl", 0.9)), weights="dpace"))
    online, one = curve(made, target)

    def states(i):
        clean = clean_pass(target.config, target.params, batch(i), made.drafter.taps)
        return States(clean.features, clean.final_hidden)

    given, two = curve(made, target, states=states)
    np.testing.assert_allclose(given, online, rtol=1e-5)
    close(one, two)
    with pytest.raises(ValueError, match="needs the target's final states"):
        curve(made, target, states=lambda i: States(states(i).features, None))


def test_a_batch_without_labels_changes_nothing(target):
    """And training, which donates its state, leaves the drafter that it started from whole."""
    update = trainer.make_optimizer(ADAM, 10)
    start = trainer.fresh_state(plan(target), update).params
    state = trainer.fresh_state(plan(target), update, params=start)
    empty = batch().replace(supervised=np.zeros((ROWS, LENGTH), bool))
    step = trainer.make_step(plan(target), update)
    state, metrics = step(state, target.params, *placed(None, empty, None), None)
    assert float(metrics["loss"]) == 0
    assert float(metrics["labels"]) == 0
    jax.tree.map(np.testing.assert_array_equal, start, jax.device_get(state.params))


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.slow
def test_block_verification_s_loss_needs_little_more_memory_than_cross_entropy(tmp_path):
    """A compiled step at the sizes of SmolLM2-135M, arguments included; nothing is allocated."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    large = networks.config_from_hf(
        tiny.target_config("llama", vocab_size=49152, intermediate_size=768, **sizes)
    )
    drafter = drafter_config(
        config.Shape(layers=3, taps=(0, 1, 2), mask_token_id=0),
        hub.Target("large", tmp_path, large, {}, (), {}),
    )
    rows, length, E = 4, 352, 576
    ints = shaped(rows, length, dtype=jnp.int32)
    known = Batch(ints, ints, ints, ints, shaped(rows, length, dtype=jnp.bool_), ints)
    states = States(shaped(rows, length, 3 * E), shaped(rows, length, E))
    optimizer = trainer.make_optimizer(ADAM, 100)

    def peak(*losses):
        made = Plan(large, drafter, Objective(losses), anchors=32)
        state = jax.eval_shape(lambda: trainer.fresh_state(made, optimizer))
        step = trainer.make_step(made, optimizer)
        lowered = step.lower(state, {"embed": shaped(49152, E)}, known, states, None)
        needs = lowered.compile().memory_analysis()
        both = needs.argument_size_in_bytes + needs.output_size_in_bytes
        return needs.temp_size_in_bytes + both - needs.alias_size_in_bytes

    least = peak(("ce", 1.0))
    assert peak(("bv", 1.0)) < 1.3 * least
    assert peak(("ce", 0.1), ("bv_linear", 0.9)) < 1.3 * least
