"""Delays prompts so that they share steps (``--enable-prefill-delayer``), by SGLang's rules.

A step with prompts delays the next token of all running requests of all attention groups. Before a step with prompts
the delayer looks at all groups: prompts wait while only some groups have prompts, and while the free rows of the
busiest group would not take a prefill batch of the usual size. Waits are limited by a number of steps.

Deterministic in the groups' facts: every scheduler comes to the same decision. Prompts never wait while no request
decodes, nor while a group is in the middle of a prompt.

The rules are those of SGLang 0.5.23 (`PrefillDelayer`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from moe_engine.types.prefill_delay import DelayerSettings, DelayFacts

WINDOW = 16
"""Prefill batches whose largest size counts as the usual one."""


class Outcome(NamedTuple):
    """A decision.

    `groups`: whether ``all``, ``none`` or some (``mixed``) groups have prompts; `passes` and `seconds`: the wait that
    ends with it; `is_first`: prompts would wait, but never have before: the first ones fill the rows.
    """

    groups: str
    allow: bool
    reason: str
    passes: int = 0
    seconds: float = 0.0
    is_first: bool = False


class Histogram:
    """Counts of values by bucket. `bounds`: rising upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def state(self) -> dict[str, Any]:
        """Cumulative counts, the last one of all values."""
        return {"bounds": list(self.bounds), "counts": list(accumulate(self.counts)), "sum": self.sum}


class PrefillDelayer:
    """Call `decide` before a step, then `advance` once the step is planned, and `planned` with its prompts.

    Args:
        max_rows: max running requests of a group.
    """

    def __init__(self, settings: DelayerSettings, max_rows: int, clock: Callable[[], float]) -> None:
        self.settings, self._max_rows, self._clock = settings, max_rows, clock
        self._sizes: deque[int] = deque(maxlen=WINDOW)
        self._passes, self._since = 0, 0.0
        """Steps that the present wait has lasted, and its begin; 0: no wait."""
        self._skips_first = True
        self.outcomes: dict[tuple[str, bool, str, bool], int] = {}
        """Decisions by groups, allow, reason, and whether the step had prompts."""
        most = settings.max_delay_passes
        passes = {bound for bound in settings.passes_buckets if bound < most} | {0.0, float(most - 1)}
        self._waited_passes = Histogram(sorted(passes))
        self._waited_seconds = Histogram(sorted({0.0, *settings.seconds_buckets}))

    def facts(self, waiting: int, running: int, token_usage: float, in_prompt: bool) -> DelayFacts:
        """This group's facts."""
        mark = self.settings.token_usage_low_watermark
        waited_ms = (self._clock() - self._since) * 1000 if self._passes else 0.0
        return DelayFacts(
            waiting,
            running,
            max(self._sizes, default=0),
            low_usage=bool(waiting) and mark is not None and token_usage < mark,
            overdue=self.settings.queue_min_ratio is not None and waited_ms >= self.settings.max_delay_ms,
            in_prompt=in_prompt,
        )

    def decide(self, groups: Sequence[DelayFacts]) -> Outcome:
        """Whether the next step may have prompts."""
        waiting = sum(group.waiting > 0 for group in groups)
        name = "none" if not waiting else "all" if waiting == len(groups) else "mixed"
        if not waiting:
            return Outcome(name, True, "")
        if any(group.low_usage for group in groups):
            return self._ends(name, "token_watermark")
        free_to_go = any(group.in_prompt for group in groups) or not any(group.running for group in groups)
        is_early = not free_to_go and (name == "mixed" or self._is_early(groups))
        is_first = is_early and name == "all" and self._skips_first
        if not is_early or is_first:
            return self._ends(name, "wait_success" if self._passes else "no_wait")._replace(is_first=is_first)
        if self._passes < self.settings.max_delay_passes - 1:
            return Outcome(name, False, "delay")
        return self._ends(name, "wait_timeout")

    def advance(self, outcome: Outcome) -> None:
        """The step after this decision is planned."""
        if outcome.allow:
            self._skips_first &= not outcome.is_first
            self._passes = 0
        else:
            self._since = self._since if self._passes else self._clock()
            self._passes += 1

    def planned(self, outcome: Outcome, own: DelayFacts, num_prompts: int) -> None:
        """Counts a step: its decision, this group's facts before it, and the prompts that it has."""
        key = (outcome.groups, outcome.allow, outcome.reason, num_prompts > 0)
        self.outcomes[key] = self.outcomes.get(key, 0) + 1
        if num_prompts:
            self._sizes.append(num_prompts)
            if outcome.allow:
                self._waited_passes.observe(outcome.passes)
                self._waited_seconds.observe(outcome.seconds)
        elif own.waiting and not outcome.allow:
            self._sizes.append(min(own.waiting, max(self._max_rows - own.running, 1)))

    def forget(self) -> None:
        """Ends the present wait without a step."""
        self._passes = 0

    def state(self) -> dict[str, Any]:
        """For metrics: decisions and histograms since the start."""
        return {
            "outcomes": [[*key, count] for key, count in self.outcomes.items()],
            "passes": self._waited_passes.state(),
            "seconds": self._waited_seconds.state(),
        }

    def _is_early(self, groups: Sequence[DelayFacts]) -> bool:
        """Whether more prompts, or more free rows, are worth a wait."""
        running, usual = max(group.running for group in groups), max(group.usual for group in groups)
        if self._max_rows - running < usual:
            return True
        ratio = self.settings.queue_min_ratio
        if ratio is None or any(group.overdue for group in groups):
            return False
        most = self.settings.prefill_max_requests
        return max(group.waiting for group in groups) < min(int(running * ratio), usual if most is None else most)

    def _ends(self, groups: str, reason: str) -> Outcome:
        seconds = self._clock() - self._since if self._passes else 0.0
        return Outcome(groups, True, reason, self._passes, seconds)
