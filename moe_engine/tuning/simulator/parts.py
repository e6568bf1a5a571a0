"""A long load in parts, each simulated by a process of its own (time-parallel simulation).

The load is cut into windows of some hundred requests or more; a part begins with the first request of a window, in an
empty engine. The part before it goes on over the same requests until both agree on them: requests from before the cut
have ended, and times and cache hits of the last `COMPARED` requests are equal within `LATENCY`, `TTFT` and `CACHED`.
At this seam the results of the earlier part end and those of the later part begin. What a part computes before its seam
is its warm-up. A part that never agrees with the next one simulates the rest of the load alone: a queue that grows, or
prefixes from long ago, then take the time of one process and are not wrong.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.gap_histogram import GapHistogram
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.fleet import Counts, Fleet, Outcome, Sample
from moe_engine.tuning.simulator.recorder import Recorder
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Workload

LATENCY, TTFT, CACHED = 0.01, 0.02, 0.005
"""Largest distance of two parts over these requests: of the mean latency and the mean time to first token, over their
size; of the cached tokens, over the prompt tokens."""
FIRST_TOKENS = 1e-3
"""Seconds of the mean time to first token that always count as equal."""
COMPARED = 1024
"""Requests that are compared, and two windows at least. The mean times of fewer differ more by chance."""
WINDOWS = 128
"""Windows of a part."""
LEAST_WINDOW = 256
"""Least requests of a window."""
LEAST_PART = 4096
"""Least requests of a part: with fewer its warm-up would be most of it."""


@dataclass(slots=True)
class Tally:
    """The requests of a window: their number, and sums over those that have ended."""

    num: int = 0
    ended: int = 0
    failed: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.ended += 1
        self.failed += not answer.success
        self.ttft += answer.ttft
        self.latency += answer.latency
        self.prompt_tokens += answer.prompt_len
        self.cached_tokens += answer.cached_tokens

    def __add__(self, other: Tally) -> Tally:
        return Tally(*[getattr(self, field.name) + getattr(other, field.name) for field in fields(self)])

    def agrees(self, other: Tally) -> bool:
        """Whether two simulations of the same requests are equal within the bounds of this module."""
        return (
            (self.num, self.failed) == (other.num, other.failed)
            and abs(self.latency - other.latency) <= LATENCY * self.latency
            and abs(self.ttft - other.ttft) <= max(TTFT * self.ttft, FIRST_TOKENS * self.num)
            and abs(self.cached_tokens - other.cached_tokens) <= CACHED * self.prompt_tokens
        )


@dataclass(slots=True)
class Window:
    """Requests that arrive from `seconds` on, and the state of the part's run at that time: its counts, and the lengths
    of its lists and its log. `older`: requests from before the next part that had not ended."""

    number: int
    seconds: float
    counts: Counts
    num_samples: int
    num_details: int
    log_position: int
    older: int
    gaps: GapHistogram = field(default_factory=GapHistogram)
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class PartResult:
    """All that a part has simulated, also before its seam and behind the next one. `cpu_seconds`: of its process."""

    windows: list[Window]
    outcome: Outcome
    counts: Counts
    cpu_seconds: float = 0.0


def requests_from(workload: Workload, size: int, first: int, begins: deque[tuple[int, float]]) -> Fixed:
    """The requests from window `first` on. A window has `size` requests; those that arrive together are not separated.

    Args:
        begins: gets the number and the first arrival of each window, before its first request.
    """

    def drawn() -> Iterator[Arrival]:
        number, before = -1, -1.0
        arrivals = workload.behind(first * size) if isinstance(workload, Fixed) else workload.first()
        for index, arrival in enumerate(arrivals):
            begin = arrival.seconds > before and index // size > number
            number, before = index // size if begin else number, arrival.seconds
            if number >= first:
                if begin:
                    begins.append((number, arrival.seconds))
                yield arrival

    return Fixed(drawn(), workload.total)


class PartRun:
    """Simulates a part.

    Args:
        fleet: has the requests of `requests_from`, with these `begins`.
        later: first window of the next part; None: there is none.
        complete: gets each window in order when its requests have ended, and `Window.older` of the next one; if it
            returns True the results of the part end with this window.
        position: length of the log.
    """

    def __init__(
        self,
        fleet: Fleet,
        begins: deque[tuple[int, float]],
        later: int | None,
        complete: Callable[[int, Tally, int], bool],
        position: Callable[[], int] = lambda: 0,
    ) -> None:
        self._fleet, self._begins, self._later = fleet, begins, later
        self._complete, self._position = complete, position
        self._windows: list[Window] = []
        self._seconds: list[float] = []
        self._num_known = self._num_complete = 0

    def run(self, progress: Callable[[int], None], interval: float = 0.0) -> PartResult:
        """`progress`, `interval`: of `Fleet.run`."""

        def advance(count: int) -> None:
            self._count()
            progress(count)

        outcome = self._fleet.run(advance, interval, self._arrived)
        return PartResult(self._windows, outcome, self._fleet.counts())

    def _arrived(self, arrival: Arrival) -> None:
        if self._begins and arrival.seconds >= self._begins[0][1]:
            self._open(*self._begins.popleft())
        self._windows[-1].tally.num += 1

    def _open(self, number: int, seconds: float) -> None:
        self._count()
        fleet, recorder = self._fleet, self._fleet.recorder
        running = [window.tally.num - window.tally.ended for window in self._windows if self._is_before_next(window)]
        window = Window(
            number, seconds, fleet.counts(), len(fleet.samples), len(recorder.steps), self._position(), sum(running)
        )
        recorder.gaps = window.gaps
        self._windows.append(window)
        self._seconds.append(seconds)

    def _is_before_next(self, window: Window) -> bool:
        return self._later is None or window.number < self._later

    def _count(self) -> None:
        """Counts the requests that have ended, and reports complete windows."""
        answers = self._fleet.recorder.answers
        for answer in answers[self._num_known :]:
            self._windows[bisect_right(self._seconds, answer.started) - 1].tally.add(answer)
        self._num_known = len(answers)
        while self._num_complete + 1 < len(self._windows) and not self._fleet.halted:
            window, behind = self._windows[self._num_complete : self._num_complete + 2]
            if window.tally.ended < window.tally.num:
                break
            self._num_complete += 1
            self._fleet.halted = self._complete(window.number, window.tally, behind.older)


class Reply(Enum):
    """To a part that has completed a window of the next part."""

    ON = "go on to the next window"
    END = "the results of the part end with this window"
    ALONE = "go on to the end of the load"


class Seams:
    """Decides where the results of each part end.

    Args:
        firsts: first window of each part.
    """

    def __init__(self, firsts: Sequence[int]) -> None:
        self._firsts = list(firsts)
        self.report: list[dict[str, Any]] = []
        """Of each seam: requests before it that two parts have simulated, and the distances of the later part from the
        earlier one over the last of them."""
        self._tallies: list[dict[int, Tally]] = [{} for _ in firsts]
        self._waiting: dict[int, tuple[int, int]] = {}
        self._found: dict[int, int] = {}
        self.alone: int | None = None
        """The part that simulates the rest of the load, if it is known."""

    def is_shared(self, part: int, number: int) -> bool:
        """Whether a window of a part is also one of the next part, and waits for a reply."""
        return part + 1 < len(self._firsts) and number >= self._firsts[part + 1]

    def completed(self, part: int, number: int, tally: Tally, older: int) -> None:
        """A part has completed a window; `older`: of the next window."""
        self._tallies[part][number] = tally
        if self.is_shared(part, number):
            self._waiting[part] = number, older

    def replies(self) -> Iterator[tuple[int, Reply]]:
        """Replies to the parts whose last window the next part has completed too."""
        for part, (number, older) in list(self._waiting.items()):
            if number not in self._tallies[part + 1]:
                continue
            del self._waiting[part]
            pair = self._compared(part, number)
            if older == 0 and pair is not None and pair[0].agrees(pair[1]):
                self._note(part, number, *pair)
                yield part, Reply.END
            elif self.is_shared(part + 1, number + 1):
                self._stays_alone(part)
                yield part, Reply.ALONE
            else:
                yield part, Reply.ON

    def ended(self, part: int) -> None:
        """A part has ended: with its seam, or with the load."""
        if part not in self._found:
            self._stays_alone(part)

    def _stays_alone(self, part: int) -> None:
        self.alone = part if self.alone is None else min(part, self.alone)

    def used(self) -> list[int]:
        """First window of each part whose results count."""
        parts = len(self._firsts) if self.alone is None else self.alone + 1
        return [self._firsts[0], *[self._found[part] for part in range(parts - 1)]]

    def _compared(self, part: int, number: int) -> tuple[Tally, Tally] | None:
        """The last windows up to `number`, by a part and by the next one; None if these have too few requests."""
        ours, theirs, count = Tally(), Tally(), 0
        for seen in sorted(self._tallies[part + 1], reverse=True):
            if seen <= number:
                ours, theirs, count = (
                    ours + self._tallies[part][seen],
                    theirs + self._tallies[part + 1][seen],
                    count + 1,
                )
            if count >= 2 and ours.num >= COMPARED:
                return ours, theirs
        return None

    def _note(self, part: int, number: int, ours: Tally, theirs: Tally) -> None:
        self._found[part] = number + 1
        self.report.append(
            {
                "part": part + 1,
                "requests_twice": sum(tally.num for seen, tally in self._tallies[part + 1].items() if seen <= number),
                "latency": theirs.latency / ours.latency - 1 if ours.latency else 0.0,
                "ttft": theirs.ttft / ours.ttft - 1 if ours.ttft else 0.0,
                "cached_tokens": (theirs.cached_tokens - ours.cached_tokens) / max(ours.prompt_tokens, 1),
            }
        )


def merged(results: Sequence[PartResult], firsts: Sequence[int]) -> Outcome:
    """The results of the whole load.

    Args:
        results: of the parts that count. firsts: the first window of each that counts (`Seams.used`).
    """
    recorder, samples, counts, faults = Recorder(), list[Sample](), Counts(), list[Fault]()
    for index, result in enumerate(results):
        begin, end = span(result, firsts[index], firsts[index + 1] if index + 1 < len(firsts) else None)
        theirs, windows = result.outcome.recorder, result.windows
        until = windows[end].seconds if end < len(windows) else None
        since = windows[begin].seconds if index else None
        recorder.answers += [answer for answer in theirs.answers if _is_within(answer.started, since, until)]
        faults += [fault for fault in result.outcome.faults if _is_within(fault.seconds, since, until)]
        for window in windows[begin:end]:
            recorder.gaps.add_all(window.gaps)
        last = windows[end] if end < len(windows) else None
        offset = counts.generated - windows[begin].counts.generated
        first_sample = windows[begin].num_samples if index else 0  # one comes before the first request
        for sample in result.outcome.samples[first_sample : last.num_samples if last else None]:
            samples.append(replace(sample, generated_tokens=sample.generated_tokens + offset))
        recorder.steps += theirs.steps[windows[begin].num_details : last.num_details if last else None]
        counts = _added(counts, windows[begin].counts, last.counts if last else result.counts)
    recorder.ended_at = max(
        results[-1].outcome.recorder.ended_at,
        max((answer.started + answer.latency for answer in recorder.answers), default=0.0),
    )
    recorder.retractions = sum(answer.retractions for answer in recorder.answers)
    recorder.refused = [answer.error for answer in recorder.answers if not answer.success]
    missed, load = results[-1].outcome.missed, results[-1].outcome.expert_load
    outcome = Outcome(recorder, samples, faults=faults, missed=missed, expert_load=load)
    outcome.take(counts)
    outcome.process_seconds = [result.cpu_seconds for result in results]
    return outcome


def span(result: PartResult, first: int, end: int | None) -> tuple[int, int]:
    """Indices of the windows `first` up to `end` of a part, or to its last one."""
    numbers = [window.number for window in result.windows]
    return bisect_left(numbers, first), len(numbers) if end is None else bisect_left(numbers, end)


def _is_within(seconds: float, since: float | None, until: float | None) -> bool:
    return (since is None or seconds >= since) and (until is None or seconds < until)


def _added(counts: Counts, begin: Counts, end: Counts) -> Counts:
    """Counts with those between two moments of a part."""
    ours, before, after = asdict(counts), asdict(begin), asdict(end)
    return Counts(**{name: ours[name] + after[name] - before[name] for name in ours})
