"""Adaptive draft depth: chooses the number of draft tokens of each step by the expected tokens per second.

For each batch size (in powers of two) a table of the mean seconds of a step by depth and the mean acceptance rate of
each draft position are learned while serving. A step of depth d yields 1 + a1 + a1 a2 + ... tokens per request. The
depth with the most tokens per second is chosen. Unknown values are optimistic, and values that are not measured any
more become optimistic slowly, so each depth is tried again in time, the worse ones less often.

If a plain step, without the drafter's overhead, is faster than every depth, drafting is disabled for this batch size:
the drafter runs no draft extend and costs nothing. Drafting is tried again after a backoff, doubled after each failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from moe_engine.types import SpeculationConfig


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step with decodes.

    `plain`: the step was planned without speculation. `seconds` is 0 if unknown, or if the step had prompts too;
    `model_seconds` is the part of the model's forward, a lower bound of a plain step.
    """

    num_requests: int
    depth: int
    accepted: list[tuple[int, int]]
    """Of each request with drafts: (drafts verified, drafts accepted)."""
    seconds: float = 0.0
    model_seconds: float = 0.0
    plain: bool = False


class DepthPolicy(Protocol):
    """Chooses the depth of each step and learns from the results."""

    @property
    def enabled(self) -> bool:
        """Whether drafting is enabled: the drafter runs a draft extend in the next step."""

    def choose(self, num_requests: int, num_draftable: int) -> int:
        """Depth of a step of `num_requests` decodes, of which `num_draftable` can get drafts."""

    def observe(self, step: StepOutcome) -> None:
        """Takes in the result of a step with decodes."""


class FixedDepth:
    """A constant depth, ``--speculative-num-steps N``."""

    enabled = True

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, num_requests: int, num_draftable: int) -> int:
        return self._depth

    def observe(self, step: StepOutcome) -> None:
        return None


KEEP = 3
"""Steps of each choice: one to be planned while the step before runs, and two measurements."""
MARGIN = 1.02
"""Factor by which drafting must be faster than plain steps."""
PATIENCE = 2
"""Choices in a row that find drafting slower than plain steps, after which drafting is disabled."""
FIRST_BACKOFF, LONGEST_BACKOFF = 256, 2048
"""Steps without drafting before the next trial."""
MAX_UNMEASURED = 3
"""Choices without a measured step (all steps had prompts too) after which a single draft token is used."""
WINDOW = 64
"""Measurements of a mean."""
OUTLIER = 2.0
"""Factor to the mean: a longer measurement counts as this long; after one shorter by this factor the mean restarts."""
OPTIMISM = 0.999
"""Factor of the mean seconds of a depth at each choice of another depth."""
DISCOUNT = 0.98
"""Factor of older steps in the acceptance rates."""
PRIOR_RATE, PRIOR_TRIES = 0.7, 2.0
"""Acceptance rate of the first position without measurements, and its weight."""


class MeanSeconds:
    """Mean seconds of the recent steps of one kind."""

    def __init__(self) -> None:
        self.mean = self.weight = 0.0

    def add(self, seconds: float) -> None:
        if self.weight:
            seconds = min(seconds, OUTLIER * self.mean)
        if OUTLIER * seconds < self.mean:  # the mean was of outliers: first steps, which compile kernels
            self.weight = 0.0
        self.weight = min(self.weight + 1, WINDOW)
        self.mean += (seconds - self.mean) / self.weight

    def age(self, factor: float) -> None:
        """For a time without measurements: the next one counts more."""
        self.mean *= factor
        self.weight *= 0.9


class DepthTable:
    """Estimates and choices for one batch size."""

    def __init__(self, max_depth: int) -> None:
        self.enabled = True
        self._max = max_depth
        self._plain = MeanSeconds()
        self._model = MeanSeconds()
        self._backoff = FIRST_BACKOFF
        self._steps = self._next_choice = 0
        self._measuring_plain = False
        self._forget()

    def _forget(self) -> None:
        """Drops all estimates except of plain steps."""
        self._seconds = [MeanSeconds() for _ in range(self._max + 1)]
        self._hits, self._tries = [0.0] * self._max, [0.0] * self._max
        self._depth = self._deepest = self._losses = self._unmeasured = 0
        self._enabled_at = self._steps

    # -- choices

    def choose(self, share: float) -> int:
        """Depth of a step in which this share of the requests can get drafts."""
        self._steps += 1
        if self._steps >= self._next_choice:
            if not self.enabled:
                self._retry()
            if self.enabled and share:
                self._next_choice = self._steps + KEEP
                self._depth = self._best_depth(share)
        return self._depth if self.enabled and share else 0

    def _best_depth(self, share: float) -> int:
        if not self._seconds[0].weight:
            self._unmeasured += 1
            return 0 if self._unmeasured <= MAX_UNMEASURED else 1
        for depth, measured in enumerate(self._seconds):
            if depth != self._depth:
                measured.age(OPTIMISM)
        self._plain.age(1.0)
        seconds, tokens = self._expected_seconds(), self._expected_tokens()
        if self._drafts_pay(seconds, tokens):
            self._losses = 0
            if self._steps - self._enabled_at > FIRST_BACKOFF:
                self._backoff = FIRST_BACKOFF
        else:
            self._losses += 1
            if self._losses >= PATIENCE:
                self._disable()
                return 0
        speeds = [(1 - share + share * t) / s for t, s in zip(tokens, seconds[: max(1, 2 * self._deepest) + 1])]
        return speeds.index(max(speeds))

    def _drafts_pay(self, seconds: list[float], tokens: list[float]) -> bool:
        """Whether a depth is faster than a plain step, if all requests get drafts."""
        plain = min((self._plain if self._plain.weight else self._model).mean, seconds[0])
        return max(t / s for t, s in zip(tokens, seconds)) * plain > MARGIN

    def _disable(self) -> None:
        self.enabled = False
        self._measuring_plain = self._plain.weight < 1
        if self._measuring_plain:
            self._next_choice = self._steps + 2 * KEEP
            return
        self._next_choice = self._steps + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _retry(self) -> None:
        """Enables drafting after a backoff, or after plain steps were measured, if drafts pay."""
        if not self._measuring_plain:
            self._forget()
        elif not self._drafts_pay(self._expected_seconds(), self._expected_tokens()):
            self._disable()
            return
        self.enabled, self._losses = True, 0

    def observe(self, step: StepOutcome) -> None:
        if step.accepted:
            self._hits = [DISCOUNT * hits for hits in self._hits]
            self._tries = [DISCOUNT * tries for tries in self._tries]
            for verified, good in step.accepted:
                for i in range(good):
                    self._hits[i] += 1
                for i in range(min(verified, good + 1)):
                    self._tries[i] += 1
        if not step.seconds:
            return
        if step.plain:
            self._plain.add(step.seconds)
        else:
            self._seconds[step.depth].add(step.seconds)
            self._deepest = max(self._deepest, step.depth)
            if not step.depth:
                self._model.add(step.model_seconds)

    # -- estimates

    def _expected_seconds(self) -> list[float]:
        """Seconds of a step by depth: at most those of a deeper one; of an unknown depth those of the one before it."""
        found: list[float] = []
        for seconds in self._seconds:
            found.append(seconds.mean if seconds.weight else found[-1])
        return list(accumulate(reversed(found), min))[::-1]

    def _expected_tokens(self) -> list[float]:
        """Tokens of a request by depth. An unknown rate is that of the position before it."""
        rates, rate = [1.0], PRIOR_RATE
        for hits, tries in zip(self._hits, self._tries):
            rate = (hits + PRIOR_TRIES * rate) / (tries + PRIOR_TRIES)
            rates.append(rate)
        return list(accumulate(accumulate(rates, mul)))


class AutoDepth:
    """The adaptive policy of the module docstring."""

    def __init__(self, max_depth: int) -> None:
        self._max = max_depth
        self._tables: dict[int, DepthTable] = {}
        self._current = self._table(1)

    @property
    def enabled(self) -> bool:
        return self._current.enabled

    def choose(self, num_requests: int, num_draftable: int) -> int:
        self._current = self._table(num_requests)
        return self._current.choose(num_draftable / num_requests)

    def observe(self, step: StepOutcome) -> None:
        self._table(step.num_requests).observe(step)

    def _table(self, num_requests: int) -> DepthTable:
        size = (num_requests - 1).bit_length()
        table = self._tables.get(size)
        if table is None:
            table = self._tables[size] = DepthTable(self._max)
        return table


def make_policy(config: SpeculationConfig) -> DepthPolicy:
    return AutoDepth(config.num_steps) if config.auto_depth else FixedDepth(config.num_steps)
