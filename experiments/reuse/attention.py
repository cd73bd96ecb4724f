"""How much the drafter looks at carried rows: its attention mass on them, behind a rejection.

    python experiments/reuse/attention.py --target stories260k \
        --drafter runs/reuse-carryover-0/drafter

For a drafter trained with Carryover. The mass of some rows under a softmax follows from its
normaliser with and without them: 1 - exp(lse_without - lse_with). It is measured beside decoding,
on the very calls of the attention op, and averaged over mask slots, heads and layers. One JSON line
goes to `attention.jsonl` beside this file. (Published for Carryover, blocks of 16: 19.8% in the
mean, 23.4% where all 15 rows are there.)
"""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from ceiling import COMMIT, VERIFY, asked, groups_of
from tqdm import tqdm

import specjax
from pallas_kernels.block_attention import block_attention
from specjax.decoding import loop
from specjax.models import layers

HERE = Path(__file__).parent


@partial(jax.jit, static_argnums=0)
def watched(decoder, weights, sampling, state):
    """`loop.draft`, and the mass on carried rows [L, B] of its layers."""
    masses = []

    def attention(q, ctx_k, ctx_v, ctx_start, ctx_end, tail_k, tail_v, mask, *, scale):
        carried = jnp.arange(mask.shape[-1]) < tail_k.shape[2] - q.shape[2]
        run = partial(block_attention, scale=scale, return_lse=True)
        context = (ctx_k, ctx_v, ctx_start, ctx_end)
        out, whole = run(q, *context, tail_k, tail_v, mask)
        _, without = run(q, *context, tail_k, tail_v, mask & ~carried)
        slots = (1 - jnp.exp(without - whole))[:, 0, 1:]  # [B, slots, H]; the anchor is no mask
        masses.append(slots.mean(axis=(1, 2)))
        return out

    with mock.patch.object(layers, "block_attention", attention):
        proposal, context = loop.draft(decoder, weights, sampling, state)
    return proposal, context, jnp.stack(masses)


def measure(target, drafter, prompts, settings, batch_size=8):
    """The mean mass by layer and by number of carried rows, over all rounds behind a rejection."""
    by_count = {}
    for group in tqdm(groups_of(prompts, settings, batch_size), unit="batch"):
        decoder, weights, sampling, stops, state = specjax.started(
            target, group, drafter=drafter, reuse="carryover", **settings
        )
        while not bool(state.done.all()):
            proposal, context, masses = watched(decoder, weights, sampling, state)
            count, done, masses = jax.device_get((state.rejected.count, state.done, masses))
            for b in np.flatnonzero(~done & (count > 0)):
                by_count.setdefault(int(count[b]), []).append(masses[:, b])
            verdict, verified = VERIFY(decoder, weights, sampling, stops, state, proposal)
            state, _ = COMMIT(decoder, stops, state, proposal, context, verdict, verified)
    everything = np.concatenate([np.stack(found) for found in by_count.values()])
    return {
        "rounds": len(everything),
        "mass": round(float(everything.mean()), 4),
        "by_layer": [round(float(x), 4) for x in everything.mean(axis=0)],
        "by_rows": {n: round(float(np.mean(found)), 4) for n, found in sorted(by_count.items())},
    }


def main():
    args, given = asked(__doc__.splitlines()[0], "stories260k-carryover")
    found = vars(args) | measure(*given)
    with (HERE / "attention.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
