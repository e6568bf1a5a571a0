"""Times of a log on one clock: its lines may be of machines with different time zones, or of a zone whose clock is set
back in autumn. Lines state local time, mostly without the zone; only differences between times are used.
"""

from __future__ import annotations

from collections import deque

DAY = 86400.0
ZONE_STEP = 900.0
"""Seconds; differences of time zones are multiples."""
LEAST_JUMP = 800.0
"""Seconds between neighbors of different zones, at least: lines of one zone are out of order by less."""
CLOCK_ERROR = 20.0
"""Seconds between lines of several machines that are neighbors in a log under load."""
MAX_SHIFTS = 32


class LogClock:
    """Brings the times of successive lines onto the clock of the first line's zone.

    A time that differs from the last one by a multiple of `ZONE_STEP` is of another zone, and so are later times that
    fit the same difference. Other steps stay: a second log after the first, an idle server.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._last_of_day: float | None = None
        self._days = 0.0
        self._shifts: deque[float] = deque((0.0,), maxlen=MAX_SHIFTS)

    def __call__(self, time: float) -> float:
        """time: seconds since 1970, or of a day for lines with a clock time only. Returns seconds."""
        if time < DAY:
            return self._over_midnight(time)
        moment = time if self._last is None else time + self._shift(time, self._last)
        self._last = moment
        return moment

    def _shift(self, time: float, last: float) -> float:
        if abs(time + (shift := self._shifts[0]) - last) < LEAST_JUMP:
            return shift
        shift = min(self._shifts, key=lambda shift: abs(time + shift - last))
        steps = round((last - time) / ZONE_STEP) * ZONE_STEP
        if abs(time + shift - last) < LEAST_JUMP or abs(last - time - steps) > CLOCK_ERROR:
            return shift
        self._shifts.append(steps)
        return steps

    def _over_midnight(self, time: float) -> float:
        """Clock times without a date start again at midnight."""
        moment = time + self._days
        if self._last_of_day is not None and moment < self._last_of_day - DAY / 2:
            self._days += DAY
            moment += DAY
        self._last_of_day = moment
        return moment
