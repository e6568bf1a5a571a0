"""``moe-engine simulate --processes N``: a long load in parts, each in a process (`moe_engine.tuning.simulator.parts`).

The processes are forked, because the launch and the load are ready then. Each sends the number of ended requests, its
complete windows and its result; this process replies where the results of a part end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moe_engine.errors import MoeEngineError
from moe_engine.processes.child import end_with_parent
from moe_engine.processes.stop_signals import ignore_stop_signals
from moe_engine.tuning.simulator.fleet import Fleet, Outcome
from moe_engine.tuning.simulator.parts import (
    COMPARED,
    LEAST_WINDOW,
    WINDOWS,
    PartResult,
    PartRun,
    Reply,
    Seams,
    Tally,
    merged,
    requests_from,
    span,
)
from moe_engine.tuning.simulator.rank_log import RankLog
from moe_engine.tuning.simulator.workload import Workload

FORK = multiprocessing.get_context("fork")
CHUNK = 1 << 20
TWICE = 2 * COMPARED
"""Requests that a part usually simulates beyond the start of the next one. The last part has none, so it begins
earlier."""

MakeFleet = Callable[[Workload, RankLog | None], Fleet]
OpenLog = Callable[[str | None], contextlib.AbstractContextManager[RankLog | None]]


@dataclass(frozen=True)
class Division:
    """A load in parts.

    Args:
        size: requests of a window.
        firsts: first window of each part.
    """

    size: int
    firsts: list[int]

    @classmethod
    def of(cls, total: int, processes: int) -> Division:
        size = max(-(-total // (processes * WINDOWS)), LEAST_WINDOW)
        windows = -(-total // size)
        twice = min(TWICE // size, windows // (2 * processes))  # of few requests at most half a part
        return cls(size, [part * (windows - twice) // processes for part in range(processes)])

    def name(self, part: int) -> str:
        return f"process {part + 1} of {len(self.firsts)} (from request {self.firsts[part] * self.size} on)"


class Parts:
    """The processes of a simulation.

    Args:
        workload: no request of it depends on an answer, and nothing has been taken from it.
        make_fleet: the fleet for some of the requests and a log.
        open_log: the log in a file.
        log_file: where all lines of the log are written in the end.
        interval: of `Fleet.run`.
    """

    def __init__(
        self,
        workload: Workload,
        processes: int,
        make_fleet: MakeFleet,
        open_log: OpenLog,
        log_file: str | None,
        interval: float,
    ) -> None:
        self._workload, self._division = workload, Division.of(workload.total, processes)
        self._make_fleet, self._open_log = make_fleet, open_log
        self._log_file, self._interval = log_file, interval

    @contextlib.contextmanager
    def started(self) -> Iterator[Callable[[Callable[[int], None]], Outcome]]:
        """Starts the processes; they end with the block. Gives a function that waits for the outcome: its argument is
        `progress` of `Fleet.run`.

        Raises:
            MoeEngineError: a process failed; names it and its requests.
        """
        folder = None if self._log_file is None else Path(self._log_file).absolute().parent
        started: list[tuple[BaseProcess, Connection]] = []
        with tempfile.TemporaryDirectory(dir=folder) as logs:
            try:
                for part in range(len(self._division.firsts)):
                    ours, theirs = FORK.Pipe()
                    others = [ours, *[connection for _, connection in started]]
                    process: BaseProcess = FORK.Process(
                        target=self._child, args=(part, theirs, others, logs), daemon=True
                    )
                    process.start()
                    started.append((process, ours))
                    theirs.close()
                yield lambda progress: self._outcome(started, logs, progress)
            finally:
                for process, connection in started:
                    process.kill()
                    process.join()
                    connection.close()

    def _outcome(
        self, processes: Sequence[tuple[BaseProcess, Connection]], logs: str, progress: Callable[[int], None]
    ) -> Outcome:
        seams = Seams(self._division.firsts)
        results = _Exchange(processes, seams, self._division, progress).results()
        firsts = seams.used()
        used = [results[part] for part in range(len(firsts))]
        if self._log_file is not None:
            self._join_logs([Path(logs, str(part)) for part in range(len(firsts))], used, firsts)
        if len(firsts) < len(self._division.firsts):
            print(
                f"note: --processes {len(self._division.firsts)}: the later parts never agreed with process "
                f"{len(firsts)}, which simulated the rest alone: the load has no steady state, or needs older prefixes",
                file=sys.stderr,
            )
        outcome = merged(used, firsts)
        outcome.seams = seams.report
        return outcome

    def _child(self, part: int, connection: Connection, others: Sequence[Connection], logs: str) -> None:
        """A part's process. It leaves without freeing the requests and caches one by one."""
        ignore_stop_signals()
        end_with_parent(signal.SIGKILL)  # it may compute for hours before it writes to the pipe
        for other in others:  # else the end of this program would not be seen
            other.close()
        try:
            path = None if self._log_file is None else os.path.join(logs, str(part))
            with self._open_log(path) as log:
                message: tuple[str, Any] = "result", self._simulate(part, connection, log)
        except MoeEngineError as error:
            message = "failed", str(error)
        except (EOFError, BrokenPipeError):
            os._exit(1)
        except BaseException:
            message = "failed", traceback.format_exc()
        connection.send(message)
        connection.close()
        os._exit(0)

    def _simulate(self, part: int, connection: Connection, log: RankLog | None) -> PartResult:
        firsts, seams = self._division.firsts, Seams(self._division.firsts)
        begins: deque[tuple[int, float]] = deque()
        load = requests_from(self._workload, self._division.size, firsts[part], begins)
        fleet = self._make_fleet(load, log)
        alone = False

        def complete(number: int, tally: Tally, older: int) -> bool:
            nonlocal alone
            if alone:
                return False
            connection.send(("window", (number, tally, older)))
            if not seams.is_shared(part, number):
                return False
            reply = connection.recv()
            alone = reply is Reply.ALONE
            return reply is Reply.END

        later = firsts[part + 1] if part + 1 < len(firsts) else None
        run = PartRun(fleet, begins, later, complete, lambda: 0 if log is None else log.position)
        result = run.run(lambda count: connection.send(("ended", count)), self._interval)
        result.cpu_seconds = time.process_time()
        return result

    def _join_logs(self, paths: Sequence[Path], results: Sequence[PartResult], firsts: Sequence[int]) -> None:
        assert self._log_file is not None
        with open(self._log_file, "wb") as target:
            for index, (path, result) in enumerate(zip(paths, results)):
                begin, end = span(result, firsts[index], firsts[index + 1] if index + 1 < len(firsts) else None)
                last = result.windows[end].log_position if end < len(result.windows) else path.stat().st_size
                first = result.windows[begin].log_position if index else 0  # the lines of the start come once
                with path.open("rb") as source:
                    source.seek(first)
                    for _ in range(first, last, CHUNK):
                        target.write(source.read(min(CHUNK, last - source.tell())))


class _Exchange:
    """Messages of the processes until all results that count have arrived."""

    def __init__(
        self,
        processes: Sequence[tuple[BaseProcess, Connection]],
        seams: Seams,
        division: Division,
        progress: Callable[[int], None],
    ) -> None:
        self._processes, self._seams, self._division, self._progress = processes, seams, division, progress
        self._parts = {connection: part for part, (_, connection) in enumerate(processes)}
        self._results: dict[int, PartResult] = {}

    def results(self) -> dict[int, PartResult]:
        while self._pending():
            for connection in wait([self._processes[part][1] for part in self._pending()]):
                assert isinstance(connection, Connection)
                self._receive(self._parts[connection])
        return self._results

    def _pending(self) -> list[int]:
        """Parts whose results may count and have not arrived."""
        last = len(self._processes) - 1 if self._seams.alone is None else self._seams.alone
        return [part for part in range(last + 1) if part not in self._results]

    def _receive(self, part: int) -> None:
        process, connection = self._processes[part]
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            code = process.exitcode or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise MoeEngineError(
                f"--processes: {self._division.name(part)} ended with {how}; each process has caches of its own, so "
                "memory may be short: use fewer"
            ) from None
        if kind == "failed":
            raise MoeEngineError(f"--processes: {self._division.name(part)} failed: {value}")
        if kind == "ended":
            self._progress(value)
        elif kind == "result":
            self._results[part] = value
            self._seams.ended(part)
        else:
            self._seams.completed(part, *value)
            for waiting, reply in self._seams.replies():
                with contextlib.suppress(BrokenPipeError):  # it died: the next message is the end
                    self._processes[waiting][1].send(reply)
