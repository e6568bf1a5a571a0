"""``pytest --processes N``: the tests run in N processes, forked after the collection.

The collection (17 CPU seconds in a clean clone) happens once, and test processes share the imported modules. Each
process runs one file at a time; the files are distributed in the order of the collection. The main process shows the
reports. A test whose process dies has failed (and is repeated, as other failed tests); a new process continues. So has
a test that exceeds its time limit in a call that no signal interrupts, as of a kernel that waits forever.
`--session-timeout` ends the run with its reports.

Modules must not start threads when they are imported: a forked process has only the thread that forked it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import deque
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from tests import results_file
from tests.fork_server import start_servers

FORK = multiprocessing.get_context("fork")
ORACLES = "transformers.models.deepseek_v3.modeling_deepseek_v3"
"""Module of many files' oracles, which takes 3.7 CPU seconds."""
MANY_FILES = 100
NEXT = "next"
"""A process's request for a file: the answer is a list of places in `session.items`, or None at the end."""
LATE_S = 15.0
"""Seconds after its time limit at which a test is ended with its process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run the tests in N forked processes")
    parser.addoption("--results", type=Path, metavar="FILE", help="results so far; leaves out what has passed")


def pytest_configure(config: pytest.Config) -> None:
    results_file.register(config)


def several(config: pytest.Config) -> bool:
    return config.getoption("processes") > 1 and not config.option.collectonly and not config.option.usepdb


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not several(session.config) or session.testsfailed or not session.items:
        return None
    start_servers()
    if len({item.path for item in session.items}) > MANY_FILES:
        importlib.import_module(ORACLES)  # once, and not in each test process
        gc.freeze()
    TestProcesses(session).run(session.config.getoption("processes"))
    return True


class TestProcess:
    """The main process's view of one test process.

    Attributes:
        waiting: places of its file's tests that have not started.
        upcoming: its next file, requested before the last test of its file.
        running: place of the running test.
        ends: when it is ended, in `time.monotonic`'s seconds.
        stack: file in which the process writes why it ends, if Python knows it.
    """

    __test__ = False

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.number = number
        self.connection, other = FORK.Pipe()
        self.stack = tempfile.TemporaryFile("w+")  # noqa: SIM115
        arguments = session, other, self.connection, self.stack
        self.process = FORK.Process(target=_run, args=arguments, name=f"tests {number}")
        self.waiting: list[int] = []
        self.upcoming: list[int] = []
        self.running: int | None = None
        self.ends = math.inf
        self.process.start()
        other.close()

    def last_stack(self) -> str:
        self.stack.seek(0)
        return self.stack.read()

    def start_file_if_due(self) -> None:
        """Call when the process is known to have received `upcoming`."""
        if not self.waiting:
            self.waiting, self.upcoming = self.upcoming, []


class TestProcesses:
    """Distributes the files and passes the reports of the test processes to pytest's plugins."""

    __test__ = False

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        order = sorted(range(len(session.items)), key=_file_order(session.items))
        self._files = deque(list(places) for _, places in groupby(order, lambda place: _unit(session.items[place])))
        self._running: dict[Connection, TestProcess] = {}
        self._started = 0
        if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
            terminal.showfspath = False  # reports of several files arrive alternately

    def run(self, count: int) -> None:
        seconds = self._session.config.getoption("session_timeout", None) or math.inf
        over = time.monotonic() + seconds
        try:
            for _ in range(min(count, len(self._files))):
                self._start()
            while self._running:
                for connection in wait(list(self._running), 1.0):
                    assert isinstance(connection, Connection)
                    self._receive(self._running[connection])
                now = time.monotonic()
                for test_process in self._running.values():
                    if now > test_process.ends:
                        test_process.process.kill()  # the end of its connection is received
                if now > over:
                    self._session.shouldstop = f"{seconds:.0f} s are over: {self._left()} tests did not end"
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for test_process in self._running.values():
                test_process.process.kill()

    def _left(self) -> int:
        waiting = [*self._files, *(process.waiting + process.upcoming for process in self._running.values())]
        running = [process for process in self._running.values() if process.running is not None]
        return sum(map(len, waiting)) + len(running)

    def _start(self) -> None:
        self._started += 1
        test_process = TestProcess(self._session, self._started)
        self._running[test_process.connection] = test_process

    def _receive(self, test_process: TestProcess) -> None:
        try:
            kind, value = test_process.connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(test_process)
            return
        if kind == NEXT:
            test_process.start_file_if_due()
            test_process.upcoming = self._files.popleft() if self._files else []
            with contextlib.suppress(BrokenPipeError):  # it died: the next message is the end
                test_process.connection.send(test_process.upcoming)
        elif kind == "start":
            test_process.start_file_if_due()
            assert test_process.waiting.pop(0) == value
            test_process.running = value
            item = self._session.items[value]
            test_process.ends = time.monotonic() + _limit(item) + LATE_S
            self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=value)
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            test_process.running, test_process.ends = None, math.inf
            item = self._session.items[value]
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, test_process: TestProcess) -> None:
        del self._running[test_process.connection]
        test_process.process.join()
        left = test_process.waiting, test_process.upcoming
        if (place := test_process.running) is not None:
            if self._report_death(self._session.items[place], test_process) == "rerun":
                left = [place, *test_process.waiting], test_process.upcoming
        elif test_process.process.exitcode or any(left):
            why = f"{_end(test_process)}\n{test_process.last_stack()}"
            raise RuntimeError(f"test process {test_process.number} exited between tests, {why}")
        if remaining := [file for file in left if file]:
            self._files.extendleft(reversed(remaining))
            self._start()

    def _report_death(self, item: pytest.Item, test_process: TestProcess) -> str:
        """Returns the outcome: ``rerun`` or ``failed``."""
        late = time.monotonic() > test_process.ends
        why = f"no end after {_limit(item) + LATE_S:.0f} s" if late else f"the test process died, {_end(test_process)}"
        deaths = vars(item)["deaths"] = vars(item).get("deaths", 0) + 1  # a new process inherits it
        plugin = item.config.pluginmanager.get_plugin("rerunfailures")
        outcome: Any = "rerun" if plugin and deaths <= (plugin.get_reruns_count(item) or 0) else "failed"
        why = f"{why}\n{test_process.last_stack()}"
        report = pytest.TestReport(item.nodeid, item.location, {}, outcome, why, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return outcome  # type: ignore[no-any-return]


def _end(test_process: TestProcess) -> str:
    code = test_process.process.exitcode or 0
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _limit(item: pytest.Item) -> float:
    """Seconds of a test, by pytest-timeout's marker or option; infinite without."""
    config = item.config
    if not config.pluginmanager.hasplugin("timeout"):
        return math.inf
    given = config.getoption("timeout")
    seconds = config.getini("timeout") if given is None else given
    if mark := item.get_closest_marker("timeout"):
        seconds = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    return float(seconds or 0) or math.inf


def _unit(item: pytest.Item) -> Any:
    """Equal for tests that run in one process one after the other: those of a file, or of the files whose modules have
    the same `SHARED`, because their caches have the same content; or as the attribute `unit` of the tests says."""
    if (own := getattr(item, "unit", None)) is not None:
        return own
    return getattr(getattr(item, "module", None), "SHARED", item.path)


def _file_order(items: list[pytest.Item]) -> Any:
    """Key of a place: the files in the order of their first tests. A file's tests are then adjacent."""
    first: dict[Any, int] = {}
    for place, item in enumerate(items):
        first.setdefault(_unit(item), place)
    return lambda place: first[_unit(items[place])]


class Sender:
    """The plugin of a test process that sends the reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def _write_ends(stack: IO[str]) -> None:
    """Of this process: crashes, and calls of `os._exit`. A library's `exit` writes nothing."""
    own, leave = os.getpid(), os._exit

    def exit_with_stack(code: int) -> NoReturn:
        if os.getpid() == own:  # not a process that it has forked
            traceback.print_stack(file=stack)
            stack.flush()
        leave(code)

    os._exit = exit_with_stack
    faulthandler.enable(stack)


def _run(session: pytest.Session, connection: Connection, other: Connection, stack: IO[str]) -> None:
    """The main function of a test process."""
    other.close()
    _write_ends(stack)
    atexit._clear()  # the main process's
    config = session.config
    manager = config.pluginmanager
    capture, terminal = manager.get_plugin("capturemanager"), manager.get_plugin("terminalreporter")
    assert capture is not None and terminal is not None
    capture.stop_global_capturing()  # its files are the main process's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    terminal._tw._file = nowhere  # the reporter stays, because pytest-rerunfailures reads its counts
    manager.register(Sender(config, connection))
    try:
        _run_files(session, connection)
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
    except BaseException:
        traceback.print_exc(file=stack)
        os._exit(1)
    atexit._run_exitfuncs()


def _run_files(session: pytest.Session, connection: Connection) -> None:
    def requested() -> list[int]:
        connection.send((NEXT, None))
        return connection.recv()  # type: ignore[no-any-return]

    file = requested()
    while file:
        following: list[int] = []
        for place, after in zip(file, [*file[1:], None]):
            if after is None and (following := requested()):
                after = following[0]
            item = session.items[place]
            connection.send(("start", place))
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if after is None else session.items[after]
            )
            connection.send(("finish", place))
        file = following
