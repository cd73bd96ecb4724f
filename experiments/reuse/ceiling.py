"""What reuse could give at most: the next plain draft against the verifier's stale choices.

    python experiments/reuse/ceiling.py --target stories260k --drafter stories260k-dflash \
        --prompts experiments/prompts/stories-test.jsonl --limit 20

Decodes with a plain drafter and looks, behind every rejection, at each slot of the next draft: was
it right, and was the token right that the last verification, behind a wrong prefix, put there? The
acceptance length of whoever always knew the better of the two is the ceiling. One JSON line goes to
`ceiling.jsonl` beside this file.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import specjax
from specjax import evaluation
from specjax.decoding import loop, request
from specjax.decoding.drafting import DFlash
from specjax.models import drafter as backbone
from specjax.models import target as networks

HERE = Path(__file__).parent
TOP = 16  # of the drafter, for its recall


@dataclass(frozen=True)
class Watched(DFlash):
    """Plain drafting that keeps the verifier's stale choices and uses none of them."""

    @property
    def keeps(self):
        return frozenset({"argmax", "draft_hidden"})


def rounds_of(target, drafter, prompts, settings):
    """Some prompts together: of every round of each the drafts, their top tokens, the stale
    choices, how many of them there are, and the tokens that are the truth of its slots."""
    network = Watched(replace(drafter.config, reuse=None), drafter.config.num_drafts)
    decoder, weights, sampling, stops, state = specjax.started(
        target, prompts, drafter=(network, drafter.params), **settings
    )
    rounds = []
    while not bool(state.done.all()):
        before = (state.rejected.argmax, state.rejected.count, state.length, state.done)
        proposal, context = DRAFT(decoder, weights, sampling, state)
        top = TOPS(network.config, weights, proposal.hidden)
        verdict, verified = VERIFY(decoder, weights, sampling, stops, state, proposal)
        rounds.append(jax.device_get((proposal.tokens, top, *before)))
        state, _ = COMMIT(decoder, stops, state, proposal, context, verdict, verified)
    tokens, lengths = jax.device_get((state.tokens, state.length))
    for drafts, top, stale, count, length, done in rounds:
        for b in np.flatnonzero(~done):
            end = min(length[b] + network.num_draft, lengths[b])
            yield drafts[b], top[b], stale[b], count[b], tokens[b, length[b] : end]


def groups_of(prompts, settings, size):
    """Prompts that are decoded together: what is drawn for one depends on its number in the call,
    so that drawn answers are all made in one, which makes the texts of `generate`."""
    size = len(prompts) if settings["temperature"] else size
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def tops(config, weights, hidden):
    """The drafter's most likely tokens [B, K, TOP]."""
    vocabulary = networks.vocabulary(weights.target)
    ids = jax.lax.top_k(backbone.unembed(config, weights.drafter, vocabulary, hidden), TOP)[1]
    return backbone.target_ids(weights.drafter, ids)


TOPS = jax.jit(tops, static_argnums=0)
DRAFT = jax.jit(loop.draft, static_argnums=0)
VERIFY = jax.jit(loop.verify, static_argnums=0)
COMMIT = jax.jit(loop.commit, static_argnums=0)


def measure(target, drafter, prompts, settings, batch_size=8):
    """Sums over all rounds behind a rejection, by slot; and lengths of every round."""
    K = drafter.config.num_drafts
    plain, either, stale_right, known, top = (np.zeros(K) for _ in range(5))
    exists = np.zeros(K)
    lengths = {"after rejection": [], "after acceptance": []}
    best = []
    for group in tqdm(groups_of(prompts, settings, batch_size), unit="batch"):
        for drafts, likely, stale, count, truth in rounds_of(target, drafter, group, settings):
            n = len(truth)
            right = drafts[:n] == truth
            # Row r of the buffer stands for a' + r and chose the token of a' + r + 1.
            there = np.arange(n) < count
            old = there & (stale[:n] == truth)
            name = "after rejection" if count else "after acceptance"
            lengths[name].append(1 + int(np.cumprod(right).sum()))
            if not count:
                continue
            best.append(1 + int(np.cumprod(right | old).sum()))
            known[:n] += 1
            exists[:n] += there
            plain[:n] += right
            either[:n] += right | old
            stale_right[:n] += old
            top[:n] += (likely[:n] == truth[:, None]).any(axis=1)
    after = lengths["after rejection"]
    everything = after + lengths["after acceptance"]
    ceiling = best + lengths["after acceptance"]
    return {
        "rounds": len(everything),
        "rounds_after_rejection": len(after),
        "tau": mean(everything),
        "tau_ceiling": mean(ceiling),
        "tau_after_rejection": mean(after),
        "tau_after_rejection_ceiling": mean(best),
        "tau_after_acceptance": mean(lengths["after acceptance"]),
        "right": share(plain, known),
        "right_or_stale_right": share(either, known),
        "stale_right_where_it_exists": share(stale_right, exists),
        f"recall_at_{TOP}": share(top, known),
    }


def first_turns(target, prompts):
    """Token ids of the first turn of every prompt."""
    chats = target.has_tokenizer and target.tokenizer.chat_template
    turns = [turns[0] for turns in prompts]
    if chats:
        turns = [[{"role": "user", "content": x}] if isinstance(x, str) else x for x in turns]
    return [request.token_ids(target, turn, enable_thinking=False) for turn in turns]


def mean(values):
    return round(float(np.mean(values)), 4) if values else None


def share(part, whole):
    return [round(float(a / b), 4) if b else None for a, b in zip(part, whole, strict=True)]


def asked(description, drafter):
    """The command line, and from it the arguments of `measure`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", default="stories260k")
    parser.add_argument("--drafter", default=drafter)
    parser.add_argument("--prompts", default="experiments/prompts/stories-test.jsonl")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    target = specjax.load_target(args.target)
    settings = {name: getattr(args, name) for name in ("temperature", "max_new_tokens")}
    return args, (
        target,
        specjax.load_drafter(args.drafter, target),
        first_turns(target, evaluation.read_prompts(args.prompts, args.limit)),
        settings | {"verify": "match"},
        args.batch_size,
    )


def main():
    args, given = asked(__doc__.splitlines()[0], "stories260k-dflash")
    found = vars(args) | {"block": given[1].config.block_size} | measure(*given)
    with open(HERE / "ceiling.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(table(found))


def table(found):
    lines = [
        f"{found['target']}, {Path(found['prompts']).stem}, T = {found['temperature']:g}: "
        f"acceptance length {found['tau']:.3f}, ceiling {found['tau_ceiling']:.3f} "
        f"({found['tau_ceiling'] / found['tau'] - 1:+.1%}); behind a rejection "
        f"{found['tau_after_rejection']:.3f}, ceiling {found['tau_after_rejection_ceiling']:.3f}",
        f"{'slot':>6} {'right':>7} {'or stale':>9} {'stale':>7} {'top ' + str(TOP):>7}",
    ]
    rows = zip(
        found["right"],
        found["right_or_stale_right"],
        found["stale_right_where_it_exists"],
        found[f"recall_at_{TOP}"],
        strict=True,
    )
    for slot, row in enumerate(rows, 1):
        a, b, c, d = (f"{x:.3f}" if x is not None else "-" for x in row)
        lines.append(f"{slot:>6} {a:>7} {b:>9} {c:>7} {d:>7}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
