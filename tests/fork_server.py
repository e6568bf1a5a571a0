"""Engine processes forked from a server that has imported torch and the engine: 0.1 instead of 2.5 CPU seconds each.

For tests of an engine's results: ``pytestmark = pytest.mark.usefixtures("forked_processes")``. The fixture replaces
`start_interpreter` of `moe_engine/processes/child.py`. The forked cores start their ranks in the same way, and
`ServerProcess` forks the server. Tests of starts and process trees start interpreters, as the engine does.

A forked process gets the environment, the working directory, the standard input, output and error of the process that
starts it. A process whose environment differs in a variable that is read during imports is a new interpreter. The
server has one thread and never computes. Its processes share one seed of string hashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

import psutil
import pytest

from moe_engine.processes.child import end_with_parent

PRELOADED = (
    "torch.distributed",
    "moe_engine.cluster.core_main",
    "moe_engine.cluster.rank_main",
    "moe_engine.cluster.dp_rank",
    "moe_engine.executor.sharded_worker",
    "moe_engine.worker.worker",
    "moe_engine.cli.main",
    "moe_engine.cli.serve",
    "moe_engine.frontend.engine",
    "moe_engine.kernels.attention.cpu",
    "moe_engine.kernels.experts.cpu",
    "moe_engine.kernels.linear.cpu",
    "moe_engine.kernels.sampling.cpu",
    "moe_engine.models.families.deepseek",
    "moe_engine.server.app",
    "tests.distributed.dispatch.ranks",
    "tests.distributed.dispatch.worlds",
    "tests.distributed.models.worlds",
    "uvicorn",
)
READ_IN_IMPORTS = (
    "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "LD_", "PYTHON",
)  # fmt: skip
"""Prefixes of variables that are read during imports."""
SET_BY_SERVER = {"GOMP_SPINCOUNT": "1000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that cores and ranks set before they import torch."""
MAX_REQUEST = 128 << 10
"""Bytes of a request: a command and an environment."""
COMMAND_ROOM = 2000
"""Bytes of a forked process's command line in /proc."""
STARTED_BY = "--started-by=%d"
"""Last argument of such a command line."""


def read_in_imports(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_IN_IMPORTS)} | SET_BY_SERVER


class ForkedProcess:
    """The part of `subprocess.Popen` that `ChildProcess` uses. The server waits for the process and sends its return
    code."""

    def __init__(
        self, address: str, command: list[str], output: tuple[int, int] = (1, 2), environ: dict[str, str] | None = None
    ) -> None:
        read, write = os.pipe()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(address)
        request = pickle.dumps((command, os.getpid(), environ or dict(os.environ), os.getcwd()))
        socket.send_fds(self._server, [request], [read, *output])
        os.close(read)
        self.stdin = os.fdopen(write, "wb")
        self.pid: int = self._receive()
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def _receive(self) -> int:
        if not (message := self._server.recv(64)):
            raise RuntimeError("the fork server of the tests died")
        return int(message)

    def poll(self) -> int | None:
        return self._poll(0.0)

    def _poll(self, seconds: float | None) -> int | None:
        waiting = select.poll()
        if self.returncode is None:
            waiting.register(self._server, select.POLLIN)
            waiting.poll(None if seconds is None else seconds * 1000)
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(BlockingIOError):
                    self._server.setblocking(False)
                    self.returncode = self._receive()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._poll(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """The child processes, started as interpreters or by the fork server."""
    found = process.children()
    shown = STARTED_BY % process.pid
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if shown in other.cmdline():
                found.append(other)
    for child in list(found) if recursive else ():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += children(child, True)
    return found


class Starter:
    """Replaces `start_interpreter`."""

    def __init__(self, address: str, environ: dict[str, str], start_interpreter: Any) -> None:
        self._address, self._read, self._start_interpreter = address, read_in_imports(environ), start_interpreter

    def __call__(self, module: str) -> Any:
        if read_in_imports(dict(os.environ)) != self._read:
            return self._start_interpreter(module)
        return ForkedProcess(self._address, [module])

    def start_program(self, command: list[str], log: BinaryIO) -> Any:
        """Starts a ``python -m`` command with its output in `log`."""
        if read_in_imports(dict(os.environ)) != self._read:
            return subprocess.Popen(
                [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
            )
        return ForkedProcess(self._address, command, (log.fileno(), log.fileno()))


class ForkServer:
    """A constant of a module, because the test processes share it (`start_servers`). It starts with its first use and
    runs until the processes that have its standard input end: the process that started it and those forked from that.

    Args:
        environ: variables that differ from those of this process, in the server and in programs of `run`.
        preloaded: modules imported in addition to `PRELOADED`.
    """

    created: ClassVar[list[ForkServer]] = []

    def __init__(self, environ: dict[str, str] | None = None, preloaded: tuple[str, ...] = ()) -> None:
        self._changes, self._environ = environ or {}, dict(os.environ)
        self._preloaded = ",".join(preloaded)
        self._process: subprocess.Popen[bytes] | None = None
        self._address = f"\0moe-engine-tests-{os.getpid()}-{secrets.token_hex(8)}"
        self.created.append(self)

    @property
    def address(self) -> str:
        """Address of the server, which runs."""
        if self._process is None:
            self.start()
        return self._address

    def start(self) -> None:
        self._environ = os.environ | self._changes
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self._address)
            listening.listen(64)
            number = listening.fileno()
            command = [sys.executable, "-m", "tests.fork_server", self._address[1:], str(number), self._preloaded]
            self._process = subprocess.Popen(
                [*command, "-" * COMMAND_ROOM],
                stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True, env=self._environ | SET_BY_SERVER,
            )  # fmt: skip

    def run(self, command: list[str], folder: Path, timeout_s: float, **environ: str) -> tuple[int, str, str]:
        """Runs a ``python -m`` command in a forked process: returns return code, standard output and error. The process
        is killed at the time limit.

        Args:
            folder: folder of the output files.
            environ: further variables, except those that are read during imports.
        """
        paths = folder / "stdout", folder / "stderr"
        with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
            process = ForkedProcess(self.address, command, (out.fileno(), err.fileno()), self._environ | environ)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.stdin.close()
        return code, paths[0].read_text(), paths[1].read_text()


ENGINE_SERVER = ForkServer()


def start_servers() -> None:
    """Starts all servers, before test processes are forked from this process, so that they share the servers. A server
    imports its modules at its first request."""
    for server in ForkServer.created:
        server.start()


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    return ENGINE_SERVER


@pytest.fixture(scope="module")
def forked_processes(fork_server: ForkServer) -> Iterator[None]:
    """Engines in this file start their processes by the fork server, from the first test that uses the fixture."""
    from moe_engine.processes import child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "start_interpreter", Starter(fork_server.address, os.environ, child.start_interpreter))
        yield


def serve(listening: socket.socket) -> list[str]:
    """Returns in forked processes: module and arguments. The server exits when its standard input ends."""
    running: dict[int, tuple[int, socket.socket]] = {}
    """Process id and connection by the descriptor that becomes readable when the process exits."""
    while True:
        ready, _, _ = select.select([0, listening, *running], [], [])
        if 0 in ready:
            os._exit(0)
        for exited in running.keys() & set(ready):
            pid, connection = running.pop(exited)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):  # the process that started it may have exited
                connection.send(str(code).encode())
            connection.close()
            os.close(exited)
        if listening in ready:
            connection = listening.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
            command, parent, environ, folder = pickle.loads(message)
            assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the server's other threads"
            if not (pid := os.fork()):
                connection.close()
                listening.close()
                for exited, (_, other) in running.items():
                    os.close(exited)
                    other.close()
                show_command(["python", "-m", *command, STARTED_BY % parent])
                become(descriptors, environ, folder, parent)
                return command
            for number in descriptors:
                os.close(number)
            connection.send(str(pid).encode())
            running[os.pidfd_open(pid)] = pid, connection


def become(descriptors: list[int], environ: dict[str, str], folder: str, parent: int) -> None:
    """Gives this process the state of an interpreter started by the other process."""
    end_with_parent()  # the fork server, which ends with the tests
    os.getppid = lambda: parent
    os.setpgid(0, 0)  # no separate session: `sched_yield` of a rank yields the core only within its session
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ | SET_BY_SERVER)


def show_command(command: list[str]) -> None:
    """Overwrites the command line in /proc, up to the length of the old one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(number) for number in fields[45:47])  # arg_start and arg_end
    text = b"\0".join(part.encode() for part in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main() -> NoReturn:
    listening = socket.socket(fileno=int(sys.argv[2]))
    if 0 in select.select([0, listening], [], [])[0]:  # no process was requested
        os._exit(0)
    from moe_engine.processes import child

    for name in (*PRELOADED, *filter(None, sys.argv[3].split(","))):
        importlib.import_module(name)
    child.start_interpreter = Starter(f"\0{sys.argv[1]}", dict(os.environ), child.start_interpreter)
    gc.collect()
    gc.freeze()
    sys.argv = serve(listening)
    sys.exit(importlib.import_module(sys.argv[0]).main())


if __name__ == "__main__":
    main()
