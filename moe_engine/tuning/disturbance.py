"""Other programs that compute during a measurement: their share of the cores, and their names.

A measurement while other programs run is wrong, and repeats with the same programs agree with each other. The kernel
counts the time of all cores: what the measured processes did not use, others did, or the host of a virtual machine took
it (steal).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

MOST = 0.05
"""Share of the cores' time that other programs may take."""
LEAST_QUIET, MOST_SPREAD = 2, 0.15
"""Quiet rounds that a measurement needs; the largest difference between their times."""
NAMED, MOST_NAMED = 0.01, 4
"""Least share of a program that is named; max number of them."""
IDLE = ("idle", "iowait")
CONTAINED = ("guest", "guest_nice")
"""Times that are parts of others."""


@dataclass(frozen=True)
class Disturbance:
    """Shares of the time of all cores: of other programs, and stolen by the host; `programs`: by name, the largest
    first, as far as they ran at the start and the end."""

    others: float
    steal: float
    programs: dict[str, float]

    @property
    def is_strong(self) -> bool:
        return self.others + self.steal > MOST

    def __str__(self) -> str:
        parts = [f"{name} {share:.0%}" for name, share in self.programs.items()]
        parts += [f"stolen by the host {self.steal:.0%}"] if self.steal >= NAMED else []
        named = f" ({', '.join(parts)})" if parts else ""
        return f"other programs took {self.others + self.steal:.0%} of the cores' time{named}"


@dataclass(frozen=True)
class _Counts:
    """CPU seconds so far. `by_process`: of each other process, with its name."""

    moment: float
    all_cores: float
    steal: float
    own: float
    by_process: dict[tuple[int, float], tuple[str, float]]


class Watch:
    """
    Args:
        own: the processes of the measurement besides this one.
    """

    def __init__(self, own: Callable[[], Iterable[psutil.Process]]) -> None:
        self._own, self._cores = own, psutil.cpu_count() or 1
        self._begin = self._counts()

    def begin(self) -> None:
        """Begins a measurement."""
        self._begin = self._counts()

    def end(self) -> Disturbance:
        """The disturbance since `begin`."""
        before, now = self._begin, self._counts()
        whole = max(now.moment - before.moment, 1e-3) * self._cores
        steal = max(now.steal - before.steal, 0.0) / whole
        others = max(now.all_cores - before.all_cores - (now.own - before.own), 0.0) / whole
        shares = defaultdict[str, float](float)
        for key, (name, seconds) in now.by_process.items():
            if key in before.by_process:
                shares[name] += (seconds - before.by_process[key][1]) / whole
        largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST_NAMED]
        return Disturbance(others, steal, {name: share for name, share in largest if share >= NAMED})

    def _counts(self) -> _Counts:
        times = psutil.cpu_times()._asdict()
        busy = sum(seconds for name, seconds in times.items() if name not in (*IDLE, *CONTAINED, "steal"))
        own, seconds = {psutil.Process().pid}, time.process_time()
        for process in self._own():
            own.add(process.pid)
            seconds += _seconds(process)
        others = {
            (process.pid, process.info["create_time"]): (named(process.info), sum(process.info["cpu_times"][:2]))
            for process in psutil.process_iter(["name", "cmdline", "cpu_times", "create_time"])
            if process.pid not in own and process.info["cpu_times"] is not None
        }
        return _Counts(time.perf_counter(), busy, times.get("steal", 0.0), seconds, others)


def conditions_of(rounds: Sequence[Disturbance], spread: float, slowness: Sequence[float]) -> dict[str, Any]:
    """What a result says of its measurement; `disturbed`: why it may be wrong, empty if nothing speaks for it.

    Args:
        spread: how much longer the slowest of the quiet rounds took than the fastest one, less 1.
        slowness: for each round, how much longer everything took than in the median of the quiet rounds.
    """
    quiet = sum(not found.is_strong for found in rounds)
    disturbed = ""
    if quiet < min(LEAST_QUIET, len(rounds)):
        worst = max(rounds, key=lambda found: found.others + found.steal)
        disturbed = f"{worst}, and more than {MOST:.0%} in {len(rounds) - quiet} of {len(rounds)} rounds"
    elif spread > MOST_SPREAD:
        disturbed = f"the times of the rounds differ by {spread:.0%}: the machine's speed changed"
    shares = [
        {"others": found.others, "steal": found.steal, "programs": found.programs, "slowness": factor}
        for found, factor in zip(rounds, slowness, strict=True)
    ]
    return {"disturbed": disturbed, "spread": spread, "rounds": shares}


def named(info: Mapping[str, Any]) -> str:
    """The program of a process; of a Python process, the module that it runs."""
    words, name = info["cmdline"] or [], str(info["name"])
    if name.startswith("python") and "-m" in words[:-1]:
        return f"{name} -m {words[words.index('-m') + 1]}"
    return name


def _seconds(process: psutil.Process) -> float:
    """CPU seconds of a process; 0 if it has ended."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        return 0.0
