"""num_draft="auto": drafts as many tokens as pay on this device, or none.

A round with K drafts takes t(K), measured once per shape on a copy of the state, and yields
1 + sum_{i<K} P(more than i drafts are accepted) tokens, followed while decoding. The length with
the most tokens per second is used for the next rounds; where that is 0, decoding goes on plainly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import jax
import numpy as np

from specjax.decoding import loop
from specjax.decoding.drafting import Plain
from specjax.decoding.state import Decoder, Weights, resized
from specjax.types import Array, RoundInfo, Sampling, SpecState

ROUNDS = 4  # rounds between two decisions: few, since the first ones may be wasted
REPEATS = 3  # timed chunks of rounds per length
MEMORY = 0.9  # weight of what was seen before, per decision
MARGIN = 1.03  # another length must promise so much more than the present one
RETRY = 16  # calls after which a drafter that did not pay is tried again


@dataclass
class Adaptive:
    """What is known about one drafter at one shape; lives as long as the process.

    Attributes:
      longest: the decoder with all drafts.
      seconds: time of a round, by number of drafts.
      hits, trials: rounds that accepted more than i drafts, and rounds that could have.
      calls: how often decoding has begun.
    """

    longest: Decoder
    seconds: dict[int, float] = field(default_factory=dict)
    hits: np.ndarray = field(init=False)
    trials: np.ndarray = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.hits, self.trials = np.zeros((2, self.longest.drafter.num_draft))

    @property
    def lengths(self) -> list[int]:
        """The draft lengths in question: none, about half, all."""
        most = self.longest.drafter.num_draft
        return sorted({0, (most + 1) // 2, most})

    def decoder(self, length: int) -> Decoder:
        """The decoder with so many drafts."""
        if length == 0:
            return replace(self.longest, drafter=Plain())
        return replace(self.longest, drafter=replace(self.longest.drafter, num_draft=length))

    def first(self) -> int:
        """The length to begin a call with."""
        self.calls += 1
        if not self.measured or not self.trials.any() or self.calls % RETRY == 0:
            return self.longest.drafter.num_draft
        return self.best(self.longest.drafter.num_draft)

    @property
    def measured(self) -> bool:
        """Whether a round of every length has been timed."""
        return set(self.lengths) <= set(self.seconds)

    def best(self, present: int) -> int:
        """The length with the most tokens per second, the present one unless clearly beaten."""
        if not self.measured:
            return present
        rate = {k: self.tokens(k) / self.seconds[k] for k in self.lengths}
        top = max(rate, key=lambda k: rate[k])
        return top if rate[top] > MARGIN * rate[present] else present

    def tokens(self, length: int) -> float:
        """Expected tokens of a round with so many drafts; slots never tried follow the trend."""
        total, survival, last = 1.0, 1.0, 0.5
        for i in range(length):
            if self.trials[i] > 0:
                now = self.hits[i] / self.trials[i]
                last = now / survival if survival > 0 else 0.0
                survival = now
            else:
                survival *= min(last, 1.0)
            total += survival
        return total

    def observe(self, log: RoundInfo, length: int) -> None:
        """Counts the rounds of a host copy of stacked infos [n, B] that could draft `length`.

        A round that proposed less counts as one that accepted no more: it took its time too.
        """
        accepted = log.accepted[log.emitted > 0]
        self.hits *= MEMORY
        self.trials *= MEMORY
        self.hits[:length] += [(accepted > i).sum() for i in range(length)]
        self.trials[:length] += len(accepted)


@cache
def known(name: str, decoder: Decoder, batch: int, capacity: int, mode: str) -> Adaptive:
    """The one `Adaptive` of a drafter at a shape."""
    del name, batch, capacity, mode  # they only tell one from the other
    return Adaptive(decoder)


def decode(
    adaptive: Adaptive,
    weights: Weights,
    sampling: Sampling,
    stops: Array,
    state: SpecState,
    resume: Callable[[SpecState], SpecState],
) -> Iterator[tuple[RoundInfo, float]]:
    """Yields (host copy of the infos, seconds) of one chunk of rounds after the other, forever.

    `resume` may mark rows as done before a chunk runs. A call that has gone over to plain decoding
    stays there: the drafter's context is not kept up. The measurement, once per shape, is in no
    chunk's seconds.
    """
    _measure(adaptive, weights, sampling, stops, state)
    present = adaptive.longest
    length = adaptive.first()
    while True:
        begin = time.perf_counter()
        decoder = adaptive.decoder(length)
        if decoder != present:
            state, present = resized(present, decoder, weights, state), decoder
        state, log = loop.run_rounds(decoder, weights, sampling, stops, resume(state), ROUNDS)
        log = jax.device_get(log)
        yield log, time.perf_counter() - begin
        if length:
            adaptive.observe(log, length)
            length = adaptive.best(length)


def _measure(
    adaptive: Adaptive,
    weights: Weights,
    sampling: Sampling,
    stops: Array,
    state: SpecState,
) -> None:
    """Times a round of every length on copies of `state`, once."""
    for length in adaptive.lengths:
        if length in adaptive.seconds:
            continue
        decoder = adaptive.decoder(length)
        copy = resized(adaptive.longest, decoder, weights, state)
        times = []
        for _ in range(1 + REPEATS):  # the first one compiles
            begin = time.perf_counter()
            copy, log = loop.run_rounds(decoder, weights, sampling, stops, copy, ROUNDS)
            ran = int((np.asarray(log.emitted) > 0).any(axis=1).sum())
            if ran:
                times.append((time.perf_counter() - begin) / ran)
        if len(times) > 1:  # else the answer is too short to tell: the next call tries again
            adaptive.seconds[length] = min(times[1:])
