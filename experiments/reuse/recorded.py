"""Longer training behind rejections that were recorded once: does reuse learn with more of them?

    python experiments/reuse/recorded.py record               # the base's rejections, to a file
    python experiments/reuse/recorded.py train carryover
    python experiments/reuse/recorded.py train control        # as many blocks, all of them plain
    R=runs/reuse-recorded
    python experiments/reuse/compare.py --target smollm2-135m --prompts \
        experiments/prompts/copying.jsonl --temperatures 0 --max-new-tokens 80 \
        control=$R/control carryover=$R/carryover off=$R/carryover@off

Two thirds of a step with branches is the target, which verifies the drafts of that very step. Here
the base drafter's drafts are verified once, at 128 anchors of every row, and a step takes some of
them: it costs a third, and what is carried is never quite what the trained drafter would have left
behind. Texts: copying prompts with their right answers (none of the held-out ones), and some of the
target's own answers of `train_arms.py smollm2`, which has to have run before.
"""

import argparse
import pickle
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import specjax
from specjax.models import drafter as backbone
from specjax.models.params import init
from specjax.models.reuse import Carryover, DFlow, ReTrace
from specjax.models.target import vocabulary
from specjax.models.text import render_chat
from specjax.training import blocks, branches, data, export, trainer
from specjax.training.config import Optimizer
from specjax.training.features import clean_pass
from specjax.training.objectives import Objective
from specjax.training.packing import Packing

sys.path.append("experiments/prompts")
import make_copying

RUNS = Path("runs/reuse-recorded")
BASE = "experiments/drafters/smollm2-135m-dflash"
ANSWERS = {"runs/reuse-smollm2/copying-answers": 0.5, "runs/reuse-smollm2/gsm8k-more": 0.125}
ROW, ANCHORS = 512, 128
# Of the 128 blocks of a step, the drafts behind a rejection, and the share of those without rows.
BRANCHES, EMPTY = 112, 0.1
METHODS = {"control": None, "carryover": Carryover(), "dflow": DFlow(), "retrace": ReTrace()}


@dataclass(frozen=True)
class Everything:
    """Keeps what any of the methods may want."""

    keeps = frozenset({"features", "final_hidden", "draft_hidden"})

    def table(self, config):
        return {}


# ------------------------------------------------------------------------------------------ texts
def copies(target):
    """Copying prompts of all kinds by turns with their right answers, as documents."""
    texts = [
        text
        for name in ("gsm8k-train-more.jsonl", "gsm8k-train.jsonl")
        for text in make_copying.statements(name)
    ]
    kinds = list(make_copying.KINDS.values())
    tokens, starts, prompts = [], [0], []
    for i, text in enumerate(texts):
        question, shown, answer = kinds[i % len(kinds)]
        asked = [{"role": "user", "content": f"{question}:\n\n{shown(text)}"}]
        prompt = render_chat(target.tokenizer, asked)
        said = target.tokenizer(answer(text), add_special_tokens=False)["input_ids"]
        tokens += [*prompt, *said, target.eos_token_ids[0]]
        starts.append(len(tokens))
        prompts.append(len(prompt))
    return data.Documents(np.array(tokens, np.int32), np.array(starts), np.array(prompts), {})


def sources(target):
    """All documents with their weights."""
    return [(copies(target), 1.0), *((data.load(file), w) for file, w in ANSWERS.items())]


# -------------------------------------------------------------------------------------- recording
def record(target, base, file):
    """Appends to `file`, row after row: the batch, the target's states, anchors, rejected rows."""
    config = replace(base.config, reuse=Everything())
    params = {"target": target.params, "drafter": base.params, "words": vocabulary(target.params)}

    def half(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    @jax.jit
    def rejections(params, batch, key):
        clean = clean_pass(target.config, params["target"], batch, config.taps)
        anchors = blocks.draw_anchors(key, batch, ANCHORS)
        own, words = params["drafter"], params["words"]
        hidden = blocks.hidden(config, own, words, batch, clean.features, anchors)
        tokens = backbone.target_ids(own, best(config, own, words, hidden))
        states = branches.verify(
            target.config, config, params["target"], batch, clean, anchors, tokens
        )
        labels = blocks.block_labels(config, batch, anchors)
        moved, accepted = branches.advance(batch, anchors, labels, tokens)
        rejected = branches.rejected_rows(config, tokens, hidden, states, accepted, moved.valid)
        states = trainer.States(clean.features, clean.final_hidden)
        return jax.tree.map(half, (states, moved, rejected))

    packing = Packing(sources(target), ROW, 1, 0)
    print(packing)
    with file.open("wb") as out:
        for i in tqdm(range(packing.packed), unit="row", mininterval=30):
            batch = packing.batch(i)
            made = rejections(params, jax.tree.map(jnp.asarray, batch), jax.random.key(i))
            pickle.dump((batch, *jax.device_get(made)), out, protocol=5)


def recorded(file, keeps):
    """The rows of `file`, without what no one wants."""
    rows = []
    with file.open("rb") as data:
        while True:
            try:
                batch, states, moved, rejected = pickle.load(data)
            except EOFError:
                return rows
            dropped = {
                name: np.zeros_like(getattr(rejected, name)[:, :, :0])
                for name in Everything.keeps - keeps
            }
            rows.append((batch, states, moved, replace(rejected, **dropped)))


def best(config, params, words, hidden):
    """The most likely tokens, as the drafter numbers them; a block has logits at a time."""
    return jax.lax.map(
        lambda one: jnp.argmax(backbone.unembed(config, params, words, one), -1), hidden[0]
    )[None]


# --------------------------------------------------------------------------------------- training
def train(target, base, name, steps, rate, file, folder):
    """Trains one arm on the recorded rows and writes its drafter."""
    method = METHODS[name]
    config = replace(base.config, reuse=method)
    params = dict(backbone.unrestricted(base.config, base.params))
    if method:
        params["reuse"] = init(backbone.table(config), jax.random.key(0))["reuse"]
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    words = vocabulary(target.params)
    texts = [documents for documents, _ in sources(target)]
    ids = np.unique(np.concatenate([one.occurring(target.config.vocab_size) for one in texts]))
    ids = jnp.asarray(np.union1d(ids, base.params.get("target_ids", ids)), jnp.int32)
    plain = ANCHORS - BRANCHES if method else ANCHORS
    objective = Objective(losses=(("kl", 1.0),), gamma=4.0)
    plan = trainer.Plan(target.config, config, objective, plain, steps=steps)
    optimizer = trainer.make_optimizer(Optimizer(learning_rate=rate), steps)

    def sums(params, batch, states, given, key):
        score = partial(trainer._score, plan, params, words, states, ids, 1.0)
        anchors = blocks.draw_anchors(key, batch, plain)
        hidden = blocks.hidden(config, params, words, batch, states.features, anchors)
        total = score(hidden, blocks.block_labels(config, batch, anchors))
        if method:
            moved, rejected = given
            context = blocks.context(config, params, states.features, batch.positions)
            block = blocks.block_inputs(config, batch, moved)
            block = branches.injected(config, params, words, rejected, block)
            hidden = backbone.forward(config, params, words, block, context)
            total += score(
                hidden[:, :, config.first_slot :], blocks.block_labels(config, batch, moved)
            )
        return total.loss, total

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, row, key):
        batch, states, moved, rejected = jax.tree.map(full, row)
        plain_key, some, empty = jax.random.split(key, 3)
        given = drawn(some, empty, moved, rejected) if method else None
        grads, total = jax.grad(sums, has_aux=True)(params, batch, states, given, plain_key)
        weight = jnp.maximum(total.weight, 1e-6)
        grads = jax.tree.map(lambda g: g / weight.reshape((1,) * g.ndim), grads)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (total.mean, total.seen.sum())

    rows, state = recorded(file, method.keeps if method else frozenset()), optimizer.init(params)
    rng, order, seen, started = np.random.default_rng(0), [], [], time.time()
    for i in tqdm(range(steps), unit="step", mininterval=30):
        order = order or list(rng.permutation(len(rows)))
        row = jax.tree.map(jnp.asarray, rows[order.pop()])
        params, state, found = step(params, state, row, jax.random.key(i))
        seen.append(jax.device_get(found))
        if (i + 1) % 100 == 0:
            loss, labels = np.mean(seen[-100:], axis=0)
            each = (time.time() - started) / (i + 1)
            print(f"{name} {i + 1}: loss {loss:.4f}, {labels:.0f} labels, {each:.2f} s a step")
            sys.stdout.flush()
    written = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params)
    made = replace(base, name=name, config=config, params=backbone.restrict(written, words, ids))
    export.replace(made, folder, target=target)


def drawn(some, empty, moved, rejected):
    """As many branches as a step trains, those that can be trained first; a few carry nothing."""
    luck = jnp.where(moved.valid, jax.random.uniform(some, moved.at.shape), -1.0)
    chosen = jnp.sort(jax.lax.top_k(luck, BRANCHES)[1], axis=1)

    def take(x):
        return jnp.take_along_axis(x, chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)), 1)

    moved, rejected = jax.tree.map(take, (moved, rejected))
    carries = jax.random.uniform(empty, rejected.count.shape) >= EMPTY
    return moved, replace(rejected, count=jnp.where(carries, rejected.count, 0))


def full(x):
    """bfloat16 as float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "train"])
    parser.add_argument("arm", nargs="?", choices=METHODS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    target = specjax.load_target("smollm2-135m")
    base = specjax.load_drafter(BASE, target)
    RUNS.mkdir(parents=True, exist_ok=True)
    file = RUNS / "rejections.pkl"
    if args.what == "record":
        return record(target, base, file)
    if args.arm is None:
        parser.error("train what? " + ", ".join(METHODS))
    train(target, base, args.arm, args.steps, args.rate, file, RUNS / args.arm)


if __name__ == "__main__":
    main()
