"""The autopilot's trials. A trial is a window before, a change, a pause, a window after it; then the change is kept or
undone.

One change at a time, except changes that relax limits within those of the launch: these are made together. A change
that was undone, or that reverts an earlier one, is not tried again for a time that doubles. The number of changes an
hour is bounded.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_engine.scheduler.autopilot.proposals import OVERLOADED, RULES, Proposal
from moe_engine.scheduler.autopilot.window import LatencyLimits, Window
from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.stats import Totals

logger = logging.getLogger("moe_engine")

LEAST_SECONDS, LEAST_ENDED = 3.0, 24
"""Minimum of a window: time with requests, and requests that ended."""
EARLY_SECONDS, EARLY_ENDED = 12.0, 6
"""Changes that relax limits while requests wait need only one of the two."""
SERVICE_TIMES = 2.0
"""A window lasts this many times as long as a request runs."""
MOST_SECONDS = 120.0
"""A window with fewer requests ends after this time."""
TOLERANCE = 0.05
"""A relative change of the figures below this is noise."""
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 7200.0
"""Seconds until a change that was undone is tried again."""
CHANGES_AN_HOUR = 24
HOUR = 3600.0


@dataclass
class _History:
    """History of a setting. `direction` of its last change: +1, -1 or 0."""

    direction: int = 0
    pause: float = FIRST_PAUSE
    until: float = 0.0


@dataclass
class _Trial:
    """Changes whose effect is measured. `settled_at`: time at which the window after them begins."""

    proposals: list[Proposal]
    before: Window
    settled_at: float


@dataclass
class AutopilotCounts:
    """Changes so far."""

    tried: int = 0
    kept: int = 0
    undone: int = 0
    by_setting: dict[str, int] = field(default_factory=dict)


class Autopilot:
    """Owns the decisions; the values are those of `table.settings`.

    Attributes:
        counts: changes so far.
    """

    def __init__(self, table: RequestTable, totals: Totals, now: float) -> None:
        self._table, self._totals = table, totals
        self._limits = LatencyLimits(table.config.ttft_slo, table.config.itl_slo)
        self._settings = table.settings
        self._window = Window(table, totals, self._limits, now, 0)
        self._next_look = LEAST_SECONDS
        self._trial: _Trial | None = None
        self._histories: dict[str, _History] = {}
        self._changes: deque[float] = deque()
        self._latest: dict[str, object] = self._settings.values()
        self.counts = AutopilotCounts()

    def adopt(self) -> None:
        """Adopts the settings in force as the start."""
        self._latest = self._settings.values()

    def after_step(
        self, events: Sequence[RequestEvent], now: float, decode_steps: int, memory_blocked: bool, with_prompts: bool
    ) -> None:
        """Accounts for a result; arguments as those of `Window.step`."""
        window = self._window
        window.step(events, now, decode_steps, memory_blocked, with_prompts)
        trial = self._trial
        if trial is not None and trial.settled_at:
            if now >= trial.settled_at:
                trial.settled_at = 0.0
                self._begin(now, decode_steps)
            return
        if not self._is_long_enough(window):
            if trial is None and window.seconds >= self._next_look:
                self._next_look += LEAST_SECONDS
                if window.counts.ended >= EARLY_ENDED or window.seconds >= EARLY_SECONDS:
                    self._relieve(window, now, decode_steps)
            return
        window.count_waiting()
        if self._settings.values() != self._latest:  # changed from outside: these values are kept
            self._trial = None
        elif trial is not None:
            self._judge(trial, window, now)
        if self._trial is None:
            self._propose(window, now)
        self._latest = self._settings.values()
        self._begin(now, decode_steps)

    def _relieve(self, window: Window, now: float, decode_steps: int) -> None:
        """Requests already wait: limits are relaxed, within those of the launch, before the window is over."""
        window.count_waiting()
        if window.is_backlogged and self._settings.values() == self._latest:
            self._try([p for p in self._found(window, now) if p.relieves], window, now)
        if self._trial is not None:
            self._latest = self._settings.values()
            self._begin(now, decode_steps)

    def _begin(self, now: float, decode_steps: int) -> None:
        self._next_look = LEAST_SECONDS
        self._window = Window(self._table, self._totals, self._limits, now, decode_steps)

    def _is_long_enough(self, window: Window) -> bool:
        if window.seconds >= MOST_SECONDS:
            return True
        if window.seconds < LEAST_SECONDS or window.counts.ended < LEAST_ENDED:
            return False
        return window.seconds >= min(SERVICE_TIMES * window.service_seconds, MOST_SECONDS)

    # -- changes

    def _propose(self, window: Window, now: float) -> None:
        proposals = self._found(window, now)
        relief = [p for p in proposals if p.relieves]
        if relief and (relief[0] is proposals[0] or window.late_share > OVERLOADED):
            self._try(relief, window, now)
        else:
            self._try(proposals[:1], window, now)

    def _found(self, window: Window, now: float) -> list[Proposal]:
        """Proposals of the rules, by precedence."""
        found = [rule(window, self._settings, self._limits) for rule in RULES]
        return [p for p in found if p is not None and self._may_try(p, now)]

    def _try(self, proposals: list[Proposal], window: Window, now: float) -> None:
        while self._changes and self._changes[0] <= now - HOUR:
            self._changes.popleft()
        if not proposals or len(self._changes) + len(proposals) > CHANGES_AN_HOUR:
            return
        self._settings.set({p.setting: p.new for p in proposals})
        self._changes.extend([now] * len(proposals))
        self._trial = _Trial(proposals, window, now + min(window.service_seconds, MOST_SECONDS))
        for proposal in proposals:
            self.counts.tried += 1
            self.counts.by_setting[proposal.setting] = self.counts.by_setting.get(proposal.setting, 0) + 1
            logger.info("Autopilot: %s %s -> %s: %s.", proposal.setting, proposal.old, proposal.new, proposal.reason)

    def _may_try(self, proposal: Proposal, now: float) -> bool:
        history = self._histories.setdefault(proposal.setting, _History())
        return _direction(proposal) == history.direction or now >= history.until

    def _judge(self, trial: _Trial, window: Window, now: float) -> None:
        """Keeps the changes or undoes them."""
        self._trial = None
        gain, noise, words = gain_of(trial.before, window, self._limits)
        for proposal in trial.proposals:
            history = self._histories.setdefault(proposal.setting, _History())
            if gain < max(TOLERANCE / 2, noise) if proposal.must_gain else gain < -max(TOLERANCE, 2 * noise):
                self._settings.set({proposal.setting: proposal.old})
                history.direction, history.until = 0, now + history.pause
                history.pause = min(2 * history.pause, LONGEST_PAUSE)
                self.counts.undone += 1
                logger.info("Autopilot: %s back to %s: %s.", proposal.setting, proposal.old, words)
                continue
            direction = _direction(proposal)
            if history.direction and direction != history.direction:
                history.pause = min(2 * history.pause, LONGEST_PAUSE)
            history.direction, history.until = direction, now + history.pause
            self.counts.kept += 1
            why = ", a loss within the noise" if gain < -TOLERANCE else ""
            logger.info("Autopilot: %s stays %s: %s%s.", proposal.setting, proposal.new, words, why)


def _direction(proposal: Proposal) -> int:
    if isinstance(proposal.new, str):
        return 1 if proposal.new == "lpm" else -1
    return 1 if proposal.new > proposal.old else -1


def gain_of(before: Window, after: Window, limits: LatencyLimits) -> tuple[float, float, str]:
    """Relative gain of `after`, its standard error as far as it is known, and the figures in words.

    If requests wait, the engine limits the throughput, and tokens a second are compared. Otherwise the load limits it,
    and the seconds that requests spend per token are compared. If the load changed from one case to the other, the
    better figure counts. With an SLO the shares outside its limits count first, except late first tokens behind a
    queue: they depend on the length of the queue, not on the speed of the engine.
    """
    missed = [window.slow_share for window in (before, after)]
    if not before.is_backlogged and not after.is_backlogged:
        missed = [window.slow_share + window.late_share for window in (before, after)]
    if limits != LatencyLimits() and abs(missed[0] - missed[1]) > TOLERANCE / 2:
        return missed[0] - missed[1], 0.0, f"outside the SLO {missed[0]:.1%} -> {missed[1]:.1%}"
    old, new = before.throughput, after.throughput
    noise = math.hypot(before.throughput_noise, after.throughput_noise)
    by_throughput = new / max(old, 1e-9) - 1, noise, f"{old:.1f} -> {new:.1f} token/s"
    old, new = before.latency_per_token, after.latency_per_token
    noise = math.hypot(before.latency_noise, after.latency_noise)
    by_latency = old / max(new, 1e-9) - 1, noise, f"{old * 1e3:.3g} -> {new * 1e3:.3g} ms a token"
    if before.is_backlogged and after.is_backlogged:
        return by_throughput
    if not before.is_backlogged and not after.is_backlogged:
        return by_latency
    return max(by_throughput, by_latency)
