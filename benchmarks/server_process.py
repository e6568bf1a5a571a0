"""A server process of a benchmark: start, timed log lines, memory of its processes, stop.

No command; used by `benchmarks.startup`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import psutil

from moe_engine.processes.addresses import free_port
from moe_engine.processes.child import end_with_parent

READY_LINE = "The server is fired up and ready to roll!"
KEPT_LINES = 2000


class ServerProcess:
    """``moe-engine serve`` with these flags, on a free port. A context manager that stops the server on exit.

    `lines` holds (seconds since the start, text) of its output lines.
    """

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self._ready = threading.Event()
        self.ready_seconds: float | None = None
        command = [sys.executable, "-m", "moe_engine.cli.main", "serve", "--port", str(self.port), *flags]
        self._began = time.perf_counter()
        self._popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent
        )
        self._reader = threading.Thread(target=self._read, name="server output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._began

    def wait_ready(self, timeout: float = 300.0) -> float:
        """Seconds from the start of the process to its READY line.

        Raises:
            RuntimeError: the server exited before, or took longer than `timeout` seconds; with its last lines.
        """
        while not self._ready.wait(0.02):
            if self._popen.poll() is not None and not self._reader.is_alive():
                raise RuntimeError(f"the server ended with code {self._popen.returncode}:\n{self.tail()}")
            if self.seconds > timeout:
                raise RuntimeError(f"the server was not ready after {timeout:.0f} s:\n{self.tail()}")
        assert self.ready_seconds is not None
        return self.ready_seconds

    def first_line(self, part: str) -> float | None:
        """Time of the first line with `part`, in seconds since the start; None if there is none."""
        return next((moment for moment, line in self.lines if part in line), None)

    def tail(self, count: int = 15) -> str:
        return "\n".join(line for _, line in list(self.lines)[-count:])

    def memory(self) -> dict[str, int]:
        """Resident bytes of each of the server's processes, by name."""
        return memory_of(self._popen.pid)

    def stop(self) -> int:
        """Terminates the server; kills the server process alone after 30 s. Returns its exit code."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(30)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        self._reader.join(5)
        return self._popen.returncode

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            moment = self.seconds
            self.lines.append((moment, line.rstrip("\n")))
            if READY_LINE in line and self.ready_seconds is None:
                self.ready_seconds = moment
                self._ready.set()


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process and of each of its descendants, by role (``frontend``, ``core 1``, ...)."""
    try:
        parent = psutil.Process(pid)
        found = {"frontend": parent.memory_info().rss}
        for index, child in enumerate(parent.children(recursive=True), 1):
            found[f"core {index}"] = child.memory_info().rss
    except psutil.NoSuchProcess:
        return {}
    return found
