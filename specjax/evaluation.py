"""What a drafter is worth: acceptance length, stage times, speed-up, and proof of equal output.

Every prompt is decoded with and without the drafter in one process, the two arms in turn, by the
same loop under the same settings. Outputs are compared: a difference counts as a near tie where
the two best scores of plain decoding are closer than `NEAR_TIE`, else as a violation.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import loop, request
from specjax.decoding.generate import compiles, generate, started
from specjax.decoding.sampling import filtered, make_sampling, position_noise, row_keys
from specjax.decoding.stats import PromptStats, summary
from specjax.models import reuse
from specjax.models import target as networks
from specjax.models.hub import Target

DRAFTING = ("num_draft", "verify", "reuse", "stop_below")  # settings that plain decoding has not
NEAR_TIE = 1e-3  # gap of the two best scores below which float32 rounding may swap them


@dataclass
class Arm:
    """The rounds and times of one way of decoding."""

    stats: list[PromptStats] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, stats: PromptStats, seconds: float) -> None:
        """Counts one decoded prompt."""
        self.stats.append(stats)
        self.seconds.append(seconds)
        self.tokens += stats.new_tokens - 1  # the first one comes from the prefill

    @property
    def tokens_per_s(self) -> float:
        """Total new tokens over total time, prefills excluded."""
        return self.tokens / sum(self.seconds) if sum(self.seconds) else 0.0


@dataclass
class Equality:
    """Whether the answers of two arms are the same, and where not, why."""

    identical: int = 0
    ties: int = 0
    violations: list[int] = field(default_factory=list)
    promised: bool = True

    def add(
        self,
        target: Target,
        index: int,
        ids: list[int],
        want: Any,
        got: Any,
        shared: dict[str, Any],
    ) -> None:
        """Compares one answer `got` with plain decoding's `want`."""
        if got.settings["rule"] != "match" and got.settings["mode"] != "greedy":
            self.promised = False  # such a rule keeps the law of the text, not the text
        elif got.tokens == want.tokens:
            self.identical += 1
        elif _near_tie(target, ids, want.tokens, got.tokens, shared):
            self.ties += 1
        else:
            self.violations.append(index)

    def counts(self) -> dict[str, Any]:
        """For the report; None where equality was not promised."""
        return {
            "identical": self.identical if self.promised else None,
            "near_ties": self.ties if self.promised else None,
            "violations": len(self.violations) if self.promised else None,
            "violating_prompts": self.violations[:20],
        }


def read_prompts(file: str | Path, limit: int | None = None) -> list[list[Any]]:
    """Prompts of a JSON lines file with `prompt`, `messages` or `turns`, each as a list of turns.

    Raises:
      ValueError: a line with none of the keys, or a file without prompts.
    """
    prompts: list[list[Any]] = []
    # Not splitlines: a prompt may hold one of the rarer line separators as it is.
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or (limit is not None and len(prompts) >= limit):
            continue
        row = json.loads(line)
        if "turns" in row:
            prompts.append(list(row["turns"]))
        elif "messages" in row:
            prompts.append([row["messages"]])
        elif "prompt" in row:
            prompts.append([row["prompt"]])
        else:
            raise ValueError(f"{file}:{number} has none of prompt, messages, turns: {sorted(row)}")
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def evaluate(
    target: Target,
    drafter: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 128,
    repeats: int = 1,
    progress: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Decodes every prompt with and without the drafter and says what was gained.

    Args:
      target: the model.
      drafter: as for `generate`; None measures plain decoding alone.
      prompts: text, messages or ids; or lists of turns from `read_prompts`.
      max_new_tokens: per answer.
      repeats: timed passes over all prompts.
      progress: called with (done, total) after every answer.
      **settings: temperature, top_k, top_p, seed, num_draft, verify, ... of `generate`.

    Returns:
      One JSON object: `tau` (pooled over rounds, bonus included), `tau_macro` (mean over answers),
      `acceptance_per_position`, `conditional_acceptance`, `tokens_per_s`, `plain_tokens_per_s`,
      `speedup` (ratio of totals), `identical`, `near_ties`, `violations`, `rounds`, `stage_ms`,
      and what was measured. The three counts are None where a rule promises the target's law and
      not its text (the token rule, sampled).
    """
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts must be a list of at least one prompt, not {prompts!r}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    speculative, plain, equality = Arm(), Arm(), Equality()
    shared = {k: v for k, v in settings.items() if k not in DRAFTING}
    total = repeats * sum(len(turns) for turns in map(_turns, prompts))
    for repeat in range(repeats):
        for index, ids in _dialogues(target, prompts, max_new_tokens, shared):
            limit = {"max_new_tokens": max_new_tokens}
            want = _without_compiling(target, ids, shared | limit)
            plain.add(want.stats, want.seconds)
            if drafter is not None:
                got = _without_compiling(target, ids, settings | limit | {"drafter": drafter})
                speculative.add(got.stats, got.seconds)
                if repeat == 0:
                    equality.add(target, index, ids, want, got, shared)
            if progress is not None:
                progress(len(plain.stats), total)
    arm = plain if drafter is None else speculative
    report = summary(arm.stats) | {"tokens_per_s": round(arm.tokens_per_s, 2)}
    if drafter is not None:
        speedup = speculative.tokens_per_s / plain.tokens_per_s if plain.tokens else None
        report |= {
            "plain_tokens_per_s": round(plain.tokens_per_s, 2),
            "speedup": None if speedup is None else round(speedup, 3),
            **equality.counts(),
            "stage_ms": stage_ms(target, drafter, ids, max_new_tokens=max_new_tokens, **settings),
            "settings": got.settings,
        }
    return report | {
        "target": target.name,
        "drafter": getattr(drafter, "name", type(drafter).__name__) if drafter else None,
        "answers": len(plain.stats) // repeats,
        "repeats": repeats,
        "max_new_tokens": max_new_tokens,
        "asked": {key: _plain(value) for key, value in settings.items() if value is not None},
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return reuse.to_json(value) if isinstance(value, reuse.ReAnchor) else value


def _without_compiling(target: Target, ids: list[int], call: dict[str, Any]) -> Any:
    """One answer whose time holds no compilation: an answer that compiled is made again."""
    while True:
        before = compiles()
        out = generate(target, ids, **call)
        if compiles() == before:
            return out


def draft_lengths(most: int) -> list[int]:
    """The draft lengths worth trying for a block of `most` drafts: 1, 2, 3, then ever wider."""
    lengths = [1, 2, 3, 4, 5, 7, 10, 15]
    return sorted({length for length in lengths if length < most} | {most})


def as_table(reports: Sequence[dict[str, Any]]) -> str:
    """The figures a person compares, one line per report."""
    head = f"{'drafts':>6} {'tau':>6} {'tok/s':>8} {'plain':>8} {'speedup':>8} {'draft ms':>9}"
    head += f" {'verify ms':>9} {'other ms':>9} {'identical':>10} {'ties':>5} {'wrong':>6}"
    lines = [head]
    for row in reports:
        if "speedup" not in row:
            lines.append(f"{0:>6} {'-':>6} {row['tokens_per_s']:>8.1f}")
            continue
        stages = row["stage_ms"]
        tau = "-" if row["tau"] is None else f"{row['tau']:.2f}"
        speed = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
        equal, ties, wrong = ("-", "-", "-")
        if row["identical"] is not None:
            equal = f"{row['identical']}/{row['answers']}"
            ties, wrong = row["near_ties"], row["violations"]
        lines.append(
            f"{row['settings']['num_draft']:>6} {tau:>6} {row['tokens_per_s']:>8.1f} "
            f"{row['plain_tokens_per_s']:>8.1f} {speed:>8} {stages['draft']:>9.2f} "
            f"{stages['verify']:>9.2f} {stages['other']:>9.2f} {equal:>10} {ties:>5} {wrong:>6}"
        )
    return "\n".join(lines)


def stage_ms(
    target: Target, drafter: Any, prompt: Any, *, rounds: int = 12, **settings: Any
) -> dict[str, float]:
    """Median milliseconds of the stages of one round, from a pass of its own with barriers.

    Barriers slow the loop down, so these never come from the pass that gives the speed-up.
    """
    decoder, weights, sampling, stops, state = started(target, prompt, drafter=drafter, **settings)
    drafting = jax.jit(loop.draft, static_argnums=0)
    verifying = jax.jit(loop.verify, static_argnums=0)
    committing = jax.jit(loop.commit, static_argnums=0)
    times: dict[str, list[float]] = {"draft": [], "verify": [], "other": []}

    def timed(stage: str, function: Any, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        times[stage].append((time.perf_counter() - begin) * 1e3)
        return result

    for _ in range(rounds):
        proposal, context = timed("draft", drafting, decoder, weights, sampling, state)
        verdict, verified = timed(
            "verify", verifying, decoder, weights, sampling, stops, state, proposal
        )
        state, _ = timed(
            "other", committing, decoder, stops, state, proposal, context, verdict, verified
        )
        state = replace(state, done=jnp.zeros_like(state.done))
    return {stage: round(statistics.median(values[2:]), 3) for stage, values in times.items()}


def _turns(prompt: Any) -> list[Any]:
    return prompt if isinstance(prompt, list) and prompt and _is_prompt(prompt[0]) else [prompt]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str | list)


def _dialogues(
    target: Target, prompts: Sequence[Any], max_new_tokens: int, shared: dict[str, Any]
) -> Iterator[tuple[int, list[int]]]:
    """Token ids of every turn; the history of a later turn is plain decoding's own answer, so
    that all arms see the same prompts."""
    for index, prompt in enumerate(prompts):
        turns = _turns(prompt)
        history: list[dict[str, str]] = []
        for number, turn in enumerate(turns):
            asked: Any = turn
            if isinstance(turn, str) and (len(turns) > 1 or _chats(target)):
                history.append({"role": "user", "content": turn})
                asked = history
            yield index, request.token_ids(target, asked, enable_thinking=False)
            if number + 1 < len(turns):
                out: Any = generate(target, asked, max_new_tokens=max_new_tokens, **shared)
                history.append({"role": "assistant", "content": out.text})


def _chats(target: Target) -> bool:
    return target.has_tokenizer and bool(target.tokenizer.chat_template)


def _near_tie(
    target: Target, ids: list[int], want: list[int], got: list[int], shared: dict[str, Any]
) -> bool:
    """Whether the first difference stands where plain decoding nearly ties."""
    at = next((i for i, pair in enumerate(zip(want, got)) if pair[0] != pair[1]), None)  # noqa: B905
    if at is None:
        return False  # one is a prefix of the other: no rounding does that
    text = [*ids, *want[:at]]
    size = 128
    while size < len(text):
        size *= 2
    padded = np.zeros((1, 1, size), np.int32)
    padded[0, 0, : len(text)] = text
    positions = jnp.arange(size, dtype=jnp.int32)[None, None]
    out = _whole(target.config, target.params, jnp.asarray(padded), positions)
    last = out.hidden[:, 0, len(text) - 1][:, None]
    logits = networks.unembed(networks.vocabulary(target.params), last)
    values = request.sampling_values(
        target, shared.get("temperature"), shared.get("top_k"), shared.get("top_p"), 1
    )
    V = target.config.vocab_size
    sampling = make_sampling(**values, batch=1, vocab_size=V, drafting="greedy")
    scores = filtered(logits, sampling)
    if sampling.mode != "greedy":
        keys = row_keys(shared.get("seed", 0), jnp.zeros(1, jnp.uint32))
        noise = position_noise(keys, jnp.full((1, 1), len(text), jnp.int32), V)
        scores = scores + sampling.temperature[:, None, None] * noise
    best = jax.lax.top_k(scores, 2)[0][0, 0]
    return bool(best[0] - best[1] < NEAR_TIE)


_whole = jax.jit(networks.forward, static_argnums=0)
