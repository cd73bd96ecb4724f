"""Counts of one decoded prompt and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PromptStats:
    """What happened while one prompt was decoded; lists have one entry per round.

    The first new token comes from the prefill and belongs to no round, so that
    `sum(emitted) + 1 == new_tokens`. `accepted` counts drafts as verification saw them; `emitted`
    is what remained after stops and limits, the bonus token included.
    """

    prompt_tokens: int
    new_tokens: int = 1
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

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
