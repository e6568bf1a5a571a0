"""A log as a stream: lines -> events -> windows -> a diagnosis. Memory grows with a window, not with the log."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from moe_engine.tuning.doctor.clocks import LogClock
from moe_engine.tuning.doctor.diagnosis import Diagnosis
from moe_engine.tuning.doctor.launch import Launch
from moe_engine.tuning.doctor.log_lines import (
    FOREIGN,
    START_WORDS,
    BrokenLine,
    LogEvent,
    parse,
    phase_of,
    split_glued,
    unwrapped,
)
from moe_engine.tuning.doctor.window import Window

REMEMBERED = 60
"""Lines before an out-of-memory error that are searched for its phase: a traceback names the functions."""
MAX_LINE = 65536
"""Characters of a line that are read; a server_args line has some thousands."""
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception): \S")


@dataclass
class LogReader:
    """Feeds a diagnosis, a window of `window_seconds` after another; 0: the whole log is one window.

    Attributes:
        num_lines, num_broken, num_batches: lines read; known lines that were cut off or damaged; batch lines.
        foreign: engine whose lines were found, in a format that is not read.
        last_error: the last line that ends a traceback, with its number.
    """

    diagnosis: Diagnosis
    window_seconds: float = 300.0
    launch: Launch = field(default_factory=Launch)
    num_lines: int = 0
    num_broken: int = 0
    num_batches: int = 0
    foreign: str | None = None
    last_error: tuple[int, str] | None = None
    _window: Window = field(init=False)
    _before: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _last_phase: str | None = None
    _serves: bool = False
    """Whether the latest start was followed by batches."""
    _clock: LogClock = field(default_factory=LogClock)
    _leaders: dict[tuple[bool, str], str] = field(default_factory=dict)
    _oom_line: int = -REMEMBERED

    def __post_init__(self) -> None:
        self._window = Window(self.launch)

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.line(line)

    def line(self, line: str) -> None:
        """Reads a line of the log."""
        self.num_lines += 1
        line = unwrapped(line[:MAX_LINE])
        parts = split_glued(line) if line.count("batch") > 1 else (line,)
        for part in parts:
            try:
                event = parse(part)
            except BrokenLine:
                self.num_broken += 1
                continue
            if event is not None:
                self._event(event, part)
                continue
            if self.foreign is None:
                self.foreign = next((engine for words, engine in FOREIGN.items() if words in part), None)
            if ("Error" in part or "Exception" in part) and _ERROR.match(part):
                self.last_error = self.num_lines, part.strip()
        self._before.append(line)

    def end_window(self) -> None:
        """Evaluates what has been read since the last window."""
        if not self._window.is_empty:
            self.diagnosis.add(self._window.statistics())
        self._window = Window(self.launch)

    def finish(self) -> None:
        """Evaluates the last window; in a log without requests the start alone."""
        self.end_window()
        if not self.diagnosis.num_windows and self.launch.available_gb is not None:
            self.diagnosis.add(self._window.statistics())

    def current(self) -> Diagnosis:
        """A diagnosis of the window that is not complete yet."""
        diagnosis = Diagnosis(self.diagnosis.costs)
        if not self._window.is_empty:
            diagnosis.add(self._window.statistics())
        return diagnosis

    def _event(self, event: LogEvent, line: str) -> None:
        if event.time is not None:
            event = event._replace(time=self._clock(event.time))
        if event.kind in ("decode", "prefill", "retraction") and self._is_repeated(event):
            return
        if event.kind in ("decode", "prefill"):
            self.num_batches += 1
            self._serves = True
            self._last_phase = event.kind
        elif event.kind == "server_args":
            self._serves = False
        elif event.kind == "out_of_memory":
            if self.num_lines - self._oom_line < REMEMBERED:
                return  # the lines of one traceback
            self._oom_line = self.num_lines
            phase = event.values["phase"] or self._phase()
            event.values["after_loading"] = phase == "start"
            at_start = self.launch.is_starting and not self._serves
            event.values["phase"] = "start" if at_start else phase
        began = self._window.began
        ended = began is not None and event.time is not None and event.time - began >= self.window_seconds
        if ended and self.window_seconds:
            self.end_window()
        self.launch.take(event)
        self._window.add(event, self.num_lines, line)

    def _phase(self) -> str | None:
        """Phase of an out-of-memory error: by the functions in the traceback above it, else by the last batch."""
        traceback = [line for line in self._before if line.startswith((" ", "\t")) or '  File "' in line]
        if any(word in line for line in traceback for word in START_WORDS):
            return "start"
        found = (phase_of(line) for line in reversed(traceback))
        return next((phase for phase in found if phase), None) or self._last_phase

    def _is_repeated(self, event: LogEvent) -> bool:
        """Whether another rank of the same attention group has reported it: only the first rank counts. The ranks that
        report retractions may be others than those that report batches."""
        key = event.kind == "retraction", _group(event.rank)
        return self._leaders.setdefault(key, event.rank) != event.rank


@lru_cache(4096)
def _group(rank: str) -> str:
    return " ".join(word for word in rank.split() if word.startswith(("DP", "PP")))


def progress_lines(file: Iterable[bytes], report: Callable[[int], None] | None) -> Iterator[str]:
    """Decoded lines of a binary file; bytes that are not UTF-8 are replaced. `report`: gets the bytes of each step."""
    size = 0
    for number, raw in enumerate(file, 1):
        size += len(raw)
        if report is not None and number % 4096 == 0:
            report(size)
            size = 0
        yield raw.decode("utf-8", "replace")
    if report is not None:
        report(size)
