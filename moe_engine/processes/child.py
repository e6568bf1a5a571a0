"""Child processes of the engine: started without re-importing the user's script, monitored, never orphaned.

The child receives its specification as a pickle on standard input and keeps that pipe open: when the parent dies in any
way, the pipe closes and the child exits. When the child dies, a thread of the parent is notified immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from moe_engine.errors import EngineDeadError, GenerationError, InputError
from moe_engine.processes.stop_signals import ignore_stop_signals
from moe_engine.processes.watched_thread import start_watched

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildProcess:
    """Runs ``python -m module`` with a pickled specification.

    Args:
        name: of the process, for logs and errors.
        module: the module to run; its `main` reads the specification with `read_spec`.
        on_exit: called once, from a watcher thread, with a sentence (the process and how it ended) and its return code.

    Raises:
        EngineDeadError: the system starts no further process.
    """

    def __init__(self, name: str, module: str, spec: Any, on_exit: Callable[[str, int], None]) -> None:
        self.name = name
        self.returncode: int | None = None
        """None while it runs and until `on_exit` has returned; negative: killed by that signal."""
        self._on_exit = on_exit
        try:
            self._popen = start_interpreter(module)
        except OSError as error:
            raise EngineDeadError(
                f"{name}: {sys.executable} cannot be started: {error.strerror}; check its permissions, `ulimit -u` and "
                "the container's limits of processes and memory"
            ) from None
        assert self._popen.stdin is not None
        try:
            pickle.dump(spec, self._popen.stdin)
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # it died immediately; the watcher thread reports it
        # Only `on_exit` itself can fail here, so the failure can only be logged.
        start_watched(f"watch {name}", self._watch, lambda message: None)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _watch(self) -> None:
        code = self._popen.wait()
        self._on_exit(f"{self.name} (pid {self.pid}) {describe_exit(code)}", code)
        self.returncode = code

    def kill(self) -> None:
        self._popen.kill()

    def stop(self, grace: float) -> None:
        """Waits up to `grace` seconds for the process to exit, then kills it."""
        try:
            self._popen.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()


def start_interpreter(module: str) -> subprocess.Popen[bytes]:
    """``python -m module`` with a pipe as its standard input. Tests replace it by forks of an imported engine."""
    folder = None
    try:
        os.getcwd()
    except FileNotFoundError:  # it was removed, and oneMKL loads nothing there
        folder = "/"
    return subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, process_group=0, cwd=folder)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """`preexec_fn` of a program without the pipe: on Linux it gets this signal when its parent ends in any way."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(PR_SET_PDEATHSIG, number)


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def ended_at_start(name: str, code: int) -> InputError | GenerationError:
    """The error for clients of two processes that ended before they were ready, the last one with `code`. A signal is
    worth another try."""
    message = f"{name} {describe_exit(code)} before it was ready"
    if code < 0:
        return InputError(f"{message}, and so did a second one; try again", status=503)
    return GenerationError(f"{message}; see the server's log")


def read_spec() -> Any:
    """In the child: reads the specification. From then on a thread exits the process when the parent dies.

    Stop signals are ignored: a supervisor sends them to every process of a group, and the parent drains first.
    """
    ignore_stop_signals()
    stream = os.fdopen(os.dup(0), "rb")
    spec = pickle.load(stream)

    def exit_with_parent() -> None:
        while stream.read(1):
            pass
        os._exit(1)

    start_watched("parent watch", exit_with_parent, lambda message: os._exit(1))
    return spec
