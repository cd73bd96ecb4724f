"""States to save, and their comparison bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax


def drafter_state(layers=12):
    """Parameters, optimizer state, key and counters, with a value of its own in every leaf."""
    params = {
        "layers": [{"w": jnp.full((3, 5), i, jnp.float32)} for i in range(layers)],
        "by_number": {i: jnp.full((2,), i, jnp.bfloat16) for i in range(layers)},
        "norm": jnp.asarray([1.0, -0.0, jnp.inf, jnp.nan, 3e-40], jnp.float32),
    }
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(3):
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32
            _, state = optimizer.update(grads, state, params)
    return {
        "params": params,
        "optimizer": state,
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "epoch": 2,
        "scale": 0.1,
        "done": False,
        "order": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "half": np.arange(4).astype(ml_dtypes.bfloat16),
        "empty": jnp.zeros((0, 4), jnp.bfloat16),
        "absent": None,
    }


def small(value):
    return {"w": jnp.full((64, 64), value, jnp.float32), "step": value}


def raw(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), raw(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray):
        return type(leaf), leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), leaf


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(found), jax.tree_util.tree_leaves_with_path(wanted), strict=True)
    for other, (path, leaf) in pairs:
        assert raw(other) == raw(leaf), jax.tree_util.keystr(path)
