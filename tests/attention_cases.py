"""The ten passes of the library as random attention problems, with slow and obvious solutions.

Passes share their shapes where they can: every new shape is a compilation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_attention import block_attention

B = 2
SCALE = 0.3


class Case(NamedTuple):
    """One pass: the context's capacity and the arguments of `visibility`, in numpy."""

    capacity: int
    args: dict[str, Any]

    def for_jax(self) -> dict[str, Any]:
        return {
            key: jnp.asarray(value) if isinstance(value, np.ndarray) else value
            for key, value in self.args.items()
        }


def _case(rng, capacity, positions, context_end, *, causal, **more):
    window = rng.choice([0, 0, 1, 2, 5, 9, 1000])
    args = {"positions": positions, "context_end": context_end, "causal": bool(causal), **more}
    args = {k: v.astype(np.int32) if _is_int(v) else v for k, v in args.items()}
    return Case(capacity, {**args, "window": int(window) or None})


def _is_int(value):
    return isinstance(value, np.ndarray) and value.dtype.kind == "i"


def _blocks(anchor, rows):
    """Positions anchor, anchor + 1, ... of every block: [B, N] -> [B, N, rows]."""
    return anchor[:, :, None] + np.arange(rows)


def _packed(rng, capacity):
    """Start of the document of every row of packed texts, [B, capacity]."""
    starts = np.zeros((B, capacity), np.int64)
    for b in range(B):
        cuts = np.sort(rng.choice(np.arange(1, capacity), size=3, replace=False))
        for cut in cuts:
            starts[b, cut:] = cut
    return starts


def prefill(rng):
    done = rng.integers(0, 25, (B, 1))
    return _case(rng, 40, _blocks(done, 6), done, causal=True)


def clean_target_packed(rng):
    chunks, rows = 5, 8
    starts = _packed(rng, chunks * rows).reshape(B, chunks, rows)
    row = np.arange(chunks * rows).reshape(1, chunks, rows)
    return _case(
        rng,
        chunks * rows,
        row - starts,
        np.broadcast_to(row[:, :, 0], (B, chunks)),
        context_start=starts,
        causal=True,
        tail_valid=np.broadcast_to(row < 37, (B, chunks, rows)),  # the last rows are padding
    )


def draft(rng):
    anchor = rng.integers(0, 30, (B, 1))
    return _case(rng, 40, _blocks(anchor, 6), anchor, causal=rng.random() < 0.5)


def draft_carried(rng):
    anchor, kept = rng.integers(0, 30, (B, 1)), rng.integers(0, 5, (B, 1))
    carried, own = _blocks(anchor, 4), _blocks(anchor, 6)
    valid = np.concatenate([np.arange(4) < kept[:, :, None], np.ones((B, 1, 6), bool)], axis=2)
    return _case(
        rng,
        40,
        own,
        anchor,
        causal=rng.random() < 0.3,
        tail_positions=np.concatenate([carried, own], axis=2),
        tail_valid=valid,
    )


def draft_shifted(rng):
    anchor, shifts, stale = rng.integers(0, 30, (B, 1)), np.array([0, 2, 3, 1, 5, 4]), 3
    own = _blocks(anchor + shifts, 4)
    carried = np.broadcast_to(_blocks(anchor, stale), (B, 6, stale))
    before = carried < own[:, :, :1]  # stale rows in front of a block's own anchor
    return _case(
        rng,
        40,
        own,
        np.broadcast_to(anchor, (B, 6)),
        causal=False,
        tail_positions=np.concatenate([carried, own], axis=2),
        tail_valid=np.concatenate([before, np.ones((B, 6, 4), bool)], axis=2),
    )


def draft_branches(rng):
    anchor = np.broadcast_to(rng.integers(0, 30, (B, 1)), (B, 6))
    return _case(rng, 40, _blocks(anchor, 4), anchor, causal=rng.random() < 0.3)


def verify_chain(rng):
    length = rng.integers(0, 30, (B, 1))
    return _case(rng, 40, _blocks(length, 6), length, causal=True)


def verify_tree(rng):
    nodes = 5
    parents = np.stack([[rng.integers(-1, j) for j in range(nodes)] for _ in range(B)])
    related = np.zeros((B, 1, nodes + 1, nodes + 1), bool)
    depth = np.zeros((B, 1, nodes + 1), np.int64)
    related[:, :, 0, 0] = True
    for b in range(B):
        for j, parent in enumerate(parents[b]):  # row 0 is the anchor, row j + 1 is node j
            related[b, 0, j + 1] = related[b, 0, parent + 1]
            related[b, 0, j + 1, j + 1] = True
            depth[b, 0, j + 1] = depth[b, 0, parent + 1] + 1
    length = rng.integers(0, 30, (B, 1))
    positions = length[:, :, None] + depth
    return _case(rng, 40, positions, length, causal=True, tail_allowed=related)


def _anchors(rng, capacity, blocks, rows):
    starts = _packed(rng, capacity)
    row = rng.integers(0, capacity, (B, blocks))
    start = np.take_along_axis(starts, row, axis=1)
    return row, start, _blocks(row - start, rows)


def train_drafter(rng):
    row, start, positions = _anchors(rng, 40, 6, 4)
    carried = positions[:, :, :3]
    valid = np.arange(3) < rng.integers(0, 4, (B, 6, 1))
    return _case(
        rng,
        40,
        positions,
        row,
        context_start=start,
        causal=rng.random() < 0.3,
        tail_positions=np.concatenate([carried, positions], axis=2),
        tail_valid=np.concatenate([valid, np.ones(positions.shape, bool)], axis=2),
    )


def branch_target(rng):
    row, start, positions = _anchors(rng, 40, 6, 4)
    return _case(rng, 40, positions + 1, row + 1, context_start=start, causal=True)


PASSES = {
    build.__name__: build
    for build in (
        prefill,
        clean_target_packed,
        draft,
        draft_carried,
        draft_shifted,
        draft_branches,
        verify_chain,
        verify_tree,
        train_drafter,
        branch_target,
    )
}


def brute_force(
    capacity,
    *,
    positions,
    context_end,
    causal,
    context_start=None,
    window=None,
    tail_positions=None,
    tail_start=None,
    tail_valid=None,
    tail_allowed=None,
):
    """Who sees what, key by key: bool [B, N, T, capacity] and [B, N, T, R]."""
    batch, blocks, rows = positions.shape
    tail = positions if tail_positions is None else tail_positions
    count = tail.shape[2]

    def at(x, b, n, t):
        return 0 if x is None else int(x[b, n] if x.ndim == 2 else x[b, n, t])

    def near(ahead):  # ahead = k_pos - q_pos
        return window is None or (-ahead < window and (causal or ahead < window))

    context_sees = np.zeros((batch, blocks, rows, capacity), bool)
    tail_sees = np.zeros((batch, blocks, rows, count), bool)
    for b, n, t in np.ndindex(batch, blocks, rows):
        begin, position = at(context_start, b, n, t), int(positions[b, n, t])
        for s in range(capacity):
            if begin <= s < at(context_end, b, n, t):
                context_sees[b, n, t, s] = near(s - begin - position)
        for r in range(count):
            ahead = int(tail[b, n, r]) - position
            sees = near(ahead) and (ahead <= 0 or not causal)
            if tail_start is not None:
                sees &= at(tail_start, b, n, r) == begin
            elif tail_positions is None:
                sees &= at(context_start, b, n, r) == begin
            if tail_valid is not None:
                sees &= bool(tail_valid[b, n, r])
            if tail_allowed is not None:
                sees &= bool(tail_allowed[b % len(tail_allowed), n % tail_allowed.shape[1], t, r])
            tail_sees[b, n, t, r] = sees
    return context_sees, tail_sees


class Floats(NamedTuple):
    q: np.ndarray
    ctx_k: np.ndarray
    ctx_v: np.ndarray
    tail_k: np.ndarray
    tail_v: np.ndarray


def draw(rng, batch, blocks, rows, heads, kv_heads, capacity, tail, dim=8):
    """Random float64 inputs and cotangents of out and lse."""
    shapes = Floats(
        q=(batch, blocks, rows, heads, dim),
        ctx_k=(batch, kv_heads, capacity, dim),
        ctx_v=(batch, kv_heads, capacity, dim),
        tail_k=(batch, blocks, tail, kv_heads, dim),
        tail_v=(batch, blocks, tail, kv_heads, dim),
    )
    x = Floats(*(rng.normal(size=shape) for shape in shapes))
    return x, rng.normal(size=shapes.q), rng.normal(size=shapes.q[:-1])


def dense(x, context_sees, tail_sees, d_out, d_lse):
    """The definition, one query head at a time: out, lse and the gradients."""
    x = Floats(*(np.asarray(a, np.float64) for a in x))
    group, capacity = x.q.shape[3] // x.ctx_k.shape[1], x.ctx_k.shape[2]
    out, lse = np.zeros_like(x.q), np.zeros(x.q.shape[:-1])
    grads = Floats(*(np.zeros_like(a) for a in x))
    sees = np.concatenate([context_sees, tail_sees], axis=-1)
    for b, n, h in np.ndindex(x.q.shape[0], x.q.shape[1], x.q.shape[3]):
        g = h // group
        keys = np.concatenate([x.ctx_k[b, g], x.tail_k[b, n, :, g]])
        values = np.concatenate([x.ctx_v[b, g], x.tail_v[b, n, :, g]])
        query, d_o = x.q[b, n, :, h], d_out[b, n, :, h]
        weights = np.where(sees[b, n], np.exp(SCALE * query @ keys.T), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        probs = weights / np.where(total > 0, total, 1.0)
        out[b, n, :, h] = probs @ values
        with np.errstate(divide="ignore"):
            lse[b, n, :, h] = np.log(total[:, 0])
        d_probs = d_o @ values.T
        mean = (probs * d_probs).sum(axis=-1, keepdims=True)
        d_scores = SCALE * probs * (d_probs - mean + d_lse[b, n, :, h, None])
        grads.q[b, n, :, h] += d_scores @ keys
        grads.ctx_k[b, g] += (d_scores.T @ query)[:capacity]
        grads.tail_k[b, n, :, g] += (d_scores.T @ query)[capacity:]
        grads.ctx_v[b, g] += (probs.T @ d_o)[:capacity]
        grads.tail_v[b, n, :, g] += (probs.T @ d_o)[capacity:]
    return out, lse, grads


def attend(x, seen, name, **more):
    x = Floats(*map(jnp.asarray, x))
    return block_attention(
        x.q, x.ctx_k, x.ctx_v, *seen[:2], x.tail_k, x.tail_v, seen[2],
        scale=SCALE, implementation=name, return_lse=True, **more,
    )  # fmt: skip


def worst_error(got, expected):
    """Largest error of out, lse and gradients, each relative to its own largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a = np.asarray(a, np.float64)
        assert np.array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        assert np.isfinite(a[finite]).all()
        if finite.any():
            error = np.abs(a[finite] - b[finite]).max()
            worst = max(worst, error / max(np.abs(b[finite]).max(), 1e-3))
    return worst
