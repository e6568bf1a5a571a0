"""The value of holding a session's KV until its next turn: measured pauses, measured costs of steps, and the rule
derived from them.

Throughput depends on free space in the KV pool and on compute time; in a closed system its relative sensitivities to
both add up to 1. Holding a session's L tokens for tau seconds takes the share L / P of a pool of P tokens for that
time; dropping them costs the time to recompute them if the session returns. At the margin KV is therefore held as long
as there is a moment to drop it with

    expected time until the return or that moment  <  P(return until then) * horizon,
    horizon = P * seconds to compute a token * (1 - sensitivity to space) / (sensitivity to space),

a "five-minute rule" (Gray and Putzolu, SIGMOD 1987) with measured prices: an engine that idles because the pool is full
drops KV soon; an engine limited by compute keeps it. The expectation is over the observed pauses and the share of
requests that never returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from moe_engine.scheduler.step_sums import MEMORY, SHORT_MEMORY, Steps, weights

MAX_PAUSES = 256
PRIOR = 1e-3
"""Seconds that the first measurements outweigh."""
PATIENCE = 4.0
"""A session counts as lost after this many times its longest likely pause."""


Sums = tuple[float, float, float, float, float]
"""Of observations (x, y) of a `Line`: the weights, x, y, x * x and x * y."""


class Line:
    """Least squares of seconds over a count, older observations with less weight."""

    def __init__(self) -> None:
        self.sums: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, x: float, *ys: float) -> None:
        """Adds observations at one count, the oldest first."""
        keep, square = 1 - MEMORY, x * x
        w, sum_x, sum_y, sum_xx, sum_xy = self.sums
        for y in ys:
            w = w * keep + 1
            sum_x = sum_x * keep + x
            sum_y = sum_y * keep + y
            sum_xx = sum_xx * keep + square
            sum_xy = sum_xy * keep + x * y
        self.sums = w, sum_x, sum_y, sum_xx, sum_xy

    def add_many(self, x: float, count: int, y: float) -> None:
        """Adds `count` observations at one count; `y`: the weighted sum of their seconds (`Steps.weighted`)."""
        keep = (1 - MEMORY) ** count
        all_of = (1 - keep) / MEMORY
        w, sum_x, sum_y, sum_xx, sum_xy = self.sums
        self.sums = (
            w * keep + all_of, sum_x * keep + x * all_of, sum_y * keep + y, sum_xx * keep + x * x * all_of,
            sum_xy * keep + x * y,
        )  # fmt: skip

    @property
    def is_known(self) -> bool:
        return self.sums[0] > 0

    @property
    def ratio(self) -> float:
        """Mean seconds for one."""
        return self.sums[2] / self.sums[1] if self.sums[1] else 0.0

    @property
    def slope(self) -> float:
        """At least 0; also 0 if all counts are equal."""
        return _slope(self.sums)

    def at(self, x: float) -> float:
        return _at(self.sums, x)


def _slope(sums: Sums) -> float:
    w, x, y, xx, xy = sums
    spread = xx * w - x * x
    if spread <= 1e-9 * xx * w:
        return 0.0
    return max((xy * w - x * y) / spread, 0.0)


def _at(sums: Sums, x: float) -> float:
    w, sum_x, sum_y = sums[:3]
    return max((sum_y + _slope(sums) * (x * w - sum_x)) / w, 0.0) if w else 0.0


class StepTimes:
    """Seconds of steps, and the value of more space in the KV pool.

    Args:
        max_running: requests that may run concurrently.
    """

    def __init__(self, max_running: int = 1) -> None:
        self._last, self._max_running = 0.0, max_running
        self._prefill, self._decode = Line(), Line()
        self._spare, self._total = 0.5 * PRIOR, PRIOR
        self._decodes, self._before = 0, self._decode.sums
        """Requests of the steps since the last prompt or change, and the observations of decodes before."""
        self._fixed: float | None = None
        """The part of a step that did not depend on their number before, once it is needed."""

    def add(self, launched: float, now: float, prompt_tokens: int, decodes: int, contended: bool) -> None:
        """A step has ended. Steps in flight run one after the other.

        Args:
            contended: requests wait.
        """
        idle = max(launched - self._last, 0.0) if self._last else 0.0
        seconds, self._last = now - max(launched, self._last), now
        if seconds <= 0:
            return
        spare = idle
        if not prompt_tokens:
            self._note(decodes)
            spare += self._spare_of(decodes) if contended else 0.0
            self._decode.add(decodes, seconds)
        else:
            self._decodes = 0
            if decodes and self._decode.is_known:
                seconds = max(seconds - self._decode.at(decodes), 0.0)
            self._prefill.add(prompt_tokens, seconds)
        if contended:
            keep = 1 - SHORT_MEMORY
            self._spare = self._spare * keep + spare
            self._total = self._total * keep + idle + seconds

    def add_prompts(self, prompt_tokens: int, spans: Sequence[tuple[float, float]], contended: int) -> None:
        """As `add` for steps of the same number of prompt tokens without decodes.

        Args:
            spans: `launched` and `now` of each step. contended: the last of them, during which requests waited.
        """
        if not spans:
            return
        keep, first, found = 1 - SHORT_MEMORY, len(spans) - contended, list[float]()
        last, spare, total = self._last, self._spare, self._total
        for number, (launched, now) in enumerate(spans):
            idle = launched - last if last and launched > last else 0.0
            seconds, last = now - (launched if launched > last else last), now
            if seconds <= 0:
                continue
            found.append(seconds)
            if number >= first:
                spare = spare * keep + idle
                total = total * keep + idle + seconds
        self._last, self._spare, self._total = last, spare, total
        if found:
            self._decodes = 0
            self._prefill.add(prompt_tokens, *found)

    def add_decodes(self, decodes: int, steps: Steps, contended: Steps, now: float) -> None:
        """As `add` for steps of `decodes` requests without a pause, which ended at `now`.

        Args:
            contended: the last of the steps, during which requests waited.
        """
        if not steps.count:
            return
        self._last = now
        self._note(decodes)
        self._decode.add_many(decodes, steps.count, steps.weighted)
        if contended.count:
            keep = (1 - SHORT_MEMORY) ** contended.count
            self._spare = self._spare * keep + self._spare_of(decodes) * weights(1 - SHORT_MEMORY, contended.count)
            self._total = self._total * keep + contended.recent

    def _note(self, decodes: int) -> None:
        """Steps of `decodes` requests follow."""
        if decodes != self._decodes:
            self._decodes, self._before, self._fixed = decodes, self._decode.sums, None

    def _spare_of(self, decodes: int) -> float:
        """Seconds of a decode step that more requests would not have made longer."""
        if self._fixed is None:
            self._fixed = _at(self._before, 0)
        return self._fixed if decodes < self._max_running else 0.0

    @property
    def per_token(self) -> float:
        """Seconds for a further prompt token; the mean seconds of a token until that is known."""
        return self._prefill.slope or self._prefill.ratio

    @property
    def price(self) -> float:
        """The value of compute in units of pool space: (1 - s) / s. The relative sensitivity s of the throughput to the
        space is the share of the time in which further requests would have run at no cost: idle time, and the part of
        decode steps that does not depend on their number."""
        return max(self._total - self._spare, 0.0) / max(self._spare, 0.01 * self._total)


class ReturnTimes:
    """Pauses of sessions between two turns."""

    def __init__(self) -> None:
        self.pauses: deque[float] = deque(maxlen=MAX_PAUSES)
        self._returned = self._lost = 0.0
        self.num_doubted = 0.0
        """Silent sessions that have ended, by expectation (`follows`)."""
        self._horizon = 0.0
        self._num_seen = self._num_used = 0
        self._sorted: list[float] = []
        self._values: dict[float, list[float]] = {}
        """By share of sessions that return: `_table`."""

    @property
    def share(self) -> float:
        """Share of ended requests that return."""
        seen = self._returned + self._lost + self.num_doubted
        return self._returned / seen if seen else 0.0

    def returned(self, pause: float) -> None:
        self.pauses.append(pause)
        self._observe(1.0)

    def lost(self) -> None:
        self._observe(0.0)

    def found(self) -> None:
        """Records the return of a session that counted as lost."""
        self._lost = max(self._lost - 1, 0.0)

    def follows(self, silence: float, share: float) -> float:
        """Probability that a session returns that has been silent for so long.

        Args:
            share: that probability at the beginning of its silence.
        """
        count = len(self._sorted)
        longer = share * (count - bisect_right(self._sorted, silence)) / count if count else share
        return longer / (longer + 1 - share) if longer else 0.0

    def _observe(self, returned: float) -> None:
        keep = 1 - MEMORY
        self._returned = self._returned * keep + returned
        self._lost = self._lost * keep + 1 - returned
        self._num_seen += 1

    @property
    def patience(self) -> float:
        """Silence after which a session counts as lost."""
        return PATIENCE * max(self.pauses, default=0.0)

    def update(self, horizon: float) -> None:
        """Sets the horizon in seconds; recomputes the values if they have become inexact."""
        stale = self._num_seen - self._num_used >= min(8, self._num_used + 1)
        if stale or abs(horizon - self._horizon) > 0.1 * self._horizon:
            self._horizon, self._num_used = horizon, self._num_seen
            self._sorted = sorted(self.pauses)
            self._values.clear()

    def _table(self, share: float) -> list[float]:
        """Value of holding right after each pause of `_sorted`, preceded by the value at 0: solves backwards over the
        pauses, for the better of dropping now and waiting for the next possible return."""
        values = self._values.get(share)
        if values is None:
            pauses, count = self._sorted, len(self._sorted)
            values = self._values[share] = [0.0] * (count + 1)
            for k in range(count - 1, -1, -1):
                wait = pauses[k] - (pauses[k - 1] if k else 0.0)
                values[k] = max(0.0, self._gain(k, wait, share, values[k + 1]))
        return values

    def _gain(self, k: int, wait: float, share: float, later: float) -> float:
        """Gain of waiting `wait` seconds for pause number k, when it and later pauses are possible; `later`: the value
        after it."""
        count = len(self._sorted)
        mass = share / count
        hazard = mass / (mass * (count - k) + 1 - share)
        return hazard * self._horizon + (1 - hazard) * later - wait

    def value(self, silence: float, share: float | None = None) -> float:
        """Value of holding a session that has been silent for this long, in seconds of the pool; 0: not worth its
        space.

        Args:
            share: share of such sessions that return; None: that of all.
        """
        k = bisect_right(self._sorted, silence)
        if k >= len(self._sorted):
            return 0.0
        share = self.share if share is None else share
        return max(0.0, self._gain(k, self._sorted[k] - silence, share, self._table(share)[k + 1]))
