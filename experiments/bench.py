"""What a speculative round costs, on SmolLM2-135M in float32: `make bench`.

Arms run in turn in one process; every figure is a median over the pairs, every ratio comes with a
95% bootstrap interval over pairs. The drafter has three random layers, so its drafts are wrong:
it gives the cost of a round, not its worth. Scripted drafters give the floor and the ceiling.

    parts: round    a round and what in it is neither target nor drafter
           auto     num_draft="auto" with an always-wrong drafter against plain decoding
           perfect  a drafter that is always right against the model tau t_plain / (t_d + t_v)
           context  a round at 256 to 8k used rows of the same capacity
           rules    a sampled round under each rule, against the token rule
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding import loop
from specjax.models import drafter as backbone
from specjax.models import hub, params
from specjax.models import target as networks
from specjax.models.layers import LayerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from scripted import Scripted, script

PROMPT = "Gravity is"


def random_drafter(target: hub.Target, layers: int = 3, block: int = 8) -> hub.Drafter:
    """A DFlash drafter of the target's shapes with random weights."""
    own = target.config.layers
    config = backbone.DrafterConfig(
        layers=LayerConfig(
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            rms_norm_eps=own.rms_norm_eps,
            rope=own.rope,
            windows=(None,) * layers,
            qk_norm=True,
        ),
        causal=(False,) * layers,
        taps=(1, 8, 14, 20, 27),
        mask_token_id=16,
        block_size=block,
        layout="fill",
        target_hidden_size=own.hidden_size,
        vocab_size=target.config.vocab_size,
        max_positions=target.config.max_positions,
    )
    weights = params.init(backbone.table(config), jax.random.key(0))
    return hub.Drafter("random", target.directory, config, weights)


def interleaved(arms: dict[str, Callable[[], float]], pairs: int) -> dict[str, np.ndarray]:
    """Runs every arm once to warm up, then all in turn; their times by name."""
    for arm in arms.values():
        arm()
    times = [[arm() for arm in arms.values()] for _ in range(pairs)]
    return dict(zip(arms, np.array(times).T, strict=True))


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95% bootstrap interval."""
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return float(np.median(values)), *(float(q) for q in np.quantile(draws, (0.025, 0.975)))


def report(part: str, **figures: Any) -> None:
    """One JSON line, numbers rounded."""
    tidy = {
        key: [round(v, 3) for v in value] if isinstance(value, tuple) else value
        for key, value in figures.items()
    }
    print(json.dumps({"part": part, **tidy}), flush=True)


def rounds_arm(
    target: hub.Target,
    drafter: Any,
    rounds: int = 8,
    *,
    max_new_tokens: int = 1000,
    **settings: Any,
) -> Callable:
    """An arm that runs rounds of an endless row; returns milliseconds a round."""
    arguments = specjax.started(
        target,
        PROMPT,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        eos_token_id=[],
        **settings,
    )
    *fixed, state = arguments
    held = [state]

    def arm() -> float:
        begin = time.perf_counter()
        state, log = loop.run_rounds(*fixed, held[0], rounds)
        jax.block_until_ready(log)
        seconds = time.perf_counter() - begin
        again = jnp.full_like(state.length, 40)  # back to the start: the text does not matter
        held[0] = replace(
            state, length=again, target=replace(state.target, length=again - 1), fresh=again * 0
        )
        if state.draft != ():
            held[0] = replace(held[0], draft=replace(state.draft, length=again - 1))
        return seconds / rounds * 1e3

    return arm


def forwards_arm(target: hub.Target, drafter: hub.Drafter, which: str, rounds: int = 8) -> Callable:
    """An arm with nothing but the forward passes of a round, head included."""
    decoder, weights, _, _, state = specjax.started(
        target, PROMPT, drafter=drafter, max_new_tokens=1000
    )
    W = decoder.drafter.num_draft + 1
    rows = jnp.arange(W, dtype=jnp.int32)[None, None]

    def verify(cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        positions = cache.length[:, None, None] + rows
        out = networks.forward(
            decoder.target,
            weights_in[0],
            tokens,
            positions,
            context=cache,
            taps=decoder.drafter.taps,
        )
        logits = networks.unembed(networks.vocabulary(weights_in[0]), out.hidden)
        return replace(cache, k=out.k, v=out.v), logits

    def draft(cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        config = drafter.config
        block = backbone.draft_block(config, tokens[:, 0, 0], cache.length)
        words = networks.vocabulary(weights_in[0])
        hidden = backbone.forward(config, weights_in[1], words, block, cache)[:, :, 1:]
        return cache, backbone.unembed(config, weights_in[1], words, hidden)

    weights_in: Any = None

    @partial(jax.jit, donate_argnums=1)
    def many(both: Any, cache: Any, tokens: jax.Array) -> Any:
        nonlocal weights_in
        weights_in = both

        def body(_: Any, carry: Any) -> Any:
            cache, tokens = carry
            cache, logits = (verify if which == "verify" else draft)(cache, tokens)
            return cache, tokens + (jnp.max(logits) > 1e9).astype(jnp.int32)

        return jax.lax.fori_loop(0, rounds, body, (cache, tokens))

    held = [state.target if which == "verify" else state.draft]
    tokens = jnp.ones((1, 1, W), jnp.int32)

    def arm() -> float:
        begin = time.perf_counter()
        cache, _ = jax.block_until_ready(many(tuple(weights), held[0], tokens))
        held[0] = cache
        return (time.perf_counter() - begin) / rounds * 1e3

    return arm


def part_round(target: hub.Target, pairs: int) -> None:
    """A round against plain steps, and the time in it outside both networks."""
    drafter = random_drafter(target)
    times = interleaved(
        {
            "plain": rounds_arm(target, None),
            "round": rounds_arm(target, drafter),
            "verify": forwards_arm(target, drafter, "verify"),
            "draft": forwards_arm(target, drafter, "draft"),
        },
        pairs,
    )
    other = times["round"] - times["verify"] - times["draft"]
    report(
        "round",
        pairs=pairs,
        **{f"{name}_ms": interval(values) for name, values in times.items()},
        other_ms=interval(other),
        other_share=interval(other / times["round"]),
        round_over_plain=interval(times["round"] / times["plain"]),
    )


def answer_arm(target: hub.Target, count: int, **arguments: Any) -> Callable:
    """An arm that decodes one answer; returns milliseconds a token."""

    def arm() -> float:
        out = specjax.generate(target, PROMPT, max_new_tokens=count, eos_token_id=[], **arguments)
        return out.seconds / (count - 1) * 1e3

    return arm


def part_auto(target: hub.Target, pairs: int) -> None:
    """What "auto" loses with a drafter that is never right."""
    answer = specjax.generate(target, PROMPT, max_new_tokens=128, eos_token_id=[]).tokens
    ids = target.tokenizer(PROMPT).input_ids
    wrong = (Scripted(7), script([ids], [answer], 0, target.config.vocab_size))
    times = interleaved(
        {
            "plain": answer_arm(target, 128),
            "auto": answer_arm(target, 128, drafter=wrong, num_draft="auto"),
        },
        pairs,
    )
    report("auto", pairs=pairs, auto_over_plain=interval(times["auto"] / times["plain"]))


def part_perfect(target: hub.Target, pairs: int) -> None:
    """A drafter that is never wrong and costs nothing, against the model of the speed-up."""
    count = 129
    answer = specjax.generate(target, PROMPT, max_new_tokens=count, eos_token_id=[]).tokens
    ids = target.tokenizer(PROMPT).input_ids
    right = (Scripted(7), script([ids], [answer], 7, target.config.vocab_size))
    times = interleaved(
        {
            "plain": answer_arm(target, count),
            "perfect": answer_arm(target, count, drafter=right),
            "verify": forwards_arm(target, random_drafter(target), "verify"),
        },
        pairs,
    )
    model = 8 * times["plain"] / times["verify"]
    speedup = times["plain"] / times["perfect"]
    report(
        "perfect",
        pairs=pairs,
        speedup=interval(speedup),
        model=interval(model),
        speedup_over_model=interval(speedup / model),
    )


def part_context(target: hub.Target, pairs: int) -> None:
    """Rounds of one capacity at different used lengths."""
    drafter = random_drafter(target)
    *fixed, state = specjax.started(
        target, [1] * 100, drafter=drafter, max_new_tokens=8000, eos_token_id=[]
    )
    held = [state]
    figures = {}
    for used in (256, 1024, 4096, 8000):
        times = []
        for _ in range(pairs + 1):
            at = jnp.full_like(held[0].length, used)
            state = replace(
                held[0],
                length=at,
                limit=at + 90,
                done=jnp.zeros_like(held[0].done),
                fresh=at * 0,
                target=replace(held[0].target, length=at - 1),
                draft=replace(held[0].draft, length=at - 1),
            )
            begin = time.perf_counter()
            held[0], log = loop.run_rounds(*fixed, state, 4)
            jax.block_until_ready(log)
            times.append((time.perf_counter() - begin) / 4 * 1e3)
        figures[str(used)] = round(statistics.median(times[1:]), 2)
    report("context", capacity=held[0].tokens.shape[1], round_ms_by_used_rows=figures)


def part_rules(target: hub.Target, pairs: int) -> None:
    """What verification costs by rule, at temperature 1."""
    drafter = random_drafter(target)
    rules = ("token", "block", "match", "match-independent")
    times = interleaved(
        {rule: rounds_arm(target, drafter, verify=rule, temperature=1.0) for rule in rules}, pairs
    )
    base = times["token"]
    report(
        "rules",
        pairs=pairs,
        **{f"{rule}_ms": interval(values) for rule, values in times.items()},
        **{f"{rule}_over_token": interval(times[rule] / base) for rule in rules[1:]},
        **{f"{rule}_less_token_ms": interval(times[rule] - base) for rule in rules[1:]},
    )


PARTS = {
    "round": part_round,
    "auto": part_auto,
    "perfect": part_perfect,
    "context": part_context,
    "rules": part_rules,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    args = parser.parse_args()
    target = specjax.load_target("smollm2-135m", dtype="float32")
    for name, part in PARTS.items():
        if args.part in (name, "all"):
            part(target, min(args.pairs, 5) if name == "context" else args.pairs)


if __name__ == "__main__":
    main()
