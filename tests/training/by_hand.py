"""Batches of packed documents filled by hand, and random states of a target for their rows."""

import jax.numpy as jnp
import numpy as np
import tiny

from specjax.training.packing import Batch

S, F = 40, 2 * 48


def packed(documents, rows=S, seed=0):
    """The batch of documents of (prompt, answer) tokens, a list per row; the rest is padding."""
    shape = (len(documents), rows)
    tokens = np.random.default_rng(seed).integers(0, tiny.VOCAB - 1, shape).astype(np.int32)
    position, start, supervised = (np.zeros(shape, kind) for kind in (np.int32, np.int32, bool))
    document = np.full(shape, -1, np.int32)
    for b, lengths in enumerate(documents):
        first = 0
        for d, (prompt, answer) in enumerate(lengths):
            end = first + prompt + answer
            position[b, first:end] = np.arange(prompt + answer)
            start[b, first:end] = first
            document[b, first:end] = d
            supervised[b, first + prompt : end] = True
            first = end
        assert first <= rows
    source = np.where(document < 0, -1, np.arange(rows)[None]).astype(np.int32)
    arrays = (tokens, position, start, document, supervised, source)
    names = ("tokens", "positions", "start", "document", "supervised", "source")
    return Batch(**{name: jnp.asarray(x) for name, x in zip(names, arrays, strict=True)})


def features_of(batch, seed=0):
    return jnp.asarray(tiny.tensor("features", (*batch.tokens.shape, F), seed))


def states_of(batch):
    return jnp.asarray(tiny.tensor("final", (*batch.tokens.shape, 48)))
