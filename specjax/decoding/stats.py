"""Counts of one decoded prompt and the figures that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PromptStats:
    """What happened while one prompt was decoded; lists have one entry per round.

    The first new token comes from the prefill and belongs to no round, so that
    `sum(emitted) + 1 == new_tokens`. `accepted` counts drafts as verification saw them; `emitted`
    is what remained after stops and limits, the bonus token included. `rule` is the verification
    rule that ran.
    """

    prompt_tokens: int
    new_tokens: int = 1
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    rule: str = "match"

    @property
    def rounds(self) -> int:
        """Target passes after the prefill."""
        return len(self.emitted)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, bonus included; None where no round ran."""
        return acceptance_length(self.emitted)


def acceptance_length(emitted: Sequence[int]) -> float | None:
    """Tokens per round, the bonus token included; None without rounds."""
    return sum(emitted) / len(emitted) if emitted else None


def acceptance_rate(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """Share of drafts that were accepted; falls as blocks grow, so compare equal blocks only."""
    return sum(accepted) / sum(drafted) if sum(drafted) else None


def acceptance_per_position(accepted: Sequence[int], slots: int) -> list[float]:
    """Share of rounds that accepted more than i drafts, for slots i = 0, 1, ...; they sum to the
    mean number of accepted drafts."""
    if not accepted:
        return []
    return [sum(a > i for a in accepted) / len(accepted) for i in range(slots)]


def conditional_acceptance(accepted: Sequence[int], slots: int) -> list[float | None]:
    """Of the rounds that reached slot i, the share that accepted it; None where none did."""
    reached = [sum(a >= i for a in accepted) for i in range(slots)]
    passed = [sum(a > i for a in accepted) for i in range(slots)]
    return [p / r if r else None for p, r in zip(passed, reached, strict=True)]


def verify_efficiency(emitted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """Share of verified rows that became output: committed / (drafted + rounds)."""
    rows = sum(drafted) + len(emitted)
    return sum(emitted) / rows if rows else None


def summary(stats: Sequence[PromptStats]) -> dict[str, Any]:
    """The acceptance of many answers: `tau` (pooled over rounds, bonus included), `tau_macro` (mean
    over answers) with its `standard_error`, `tau_untruncated` (stops and limits not counted), and
    the other figures of this file."""
    emitted = [n for one in stats for n in one.emitted]
    accepted = [n for one in stats for n in one.accepted]
    drafted = [n for one in stats for n in one.drafted]
    slots = max(drafted, default=0)
    each = [one.tau for one in stats if one.tau is not None]
    spread = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    tau = acceptance_length(emitted)
    return {
        "tau": None if tau is None else round(tau, 4),
        "tau_macro": round(statistics.fmean(each), 4) if each else None,
        "standard_error": None if spread is None else round(spread, 4),
        "tau_untruncated": round(1 + sum(accepted) / len(accepted), 4) if accepted else None,
        "acceptance_rate": acceptance_rate(accepted, drafted),
        "acceptance_per_position": acceptance_per_position(accepted, slots),
        "conditional_acceptance": conditional_acceptance(accepted, slots),
        "verify_efficiency": verify_efficiency(emitted, drafted),
        "rounds": len(emitted),
        "new_tokens": sum(one.new_tokens for one in stats),
    }
