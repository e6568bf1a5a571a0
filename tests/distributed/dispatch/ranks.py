"""Ranks for tests: processes joined by gloo over loopback, which always end.

`run_ranks(n, function, ...)` calls `function(rank, ...)` on n ranks and returns the results. `Ranks` reuses the
processes for many calls, because their start takes time. They are forked by `tests/fork_server.py`, which has imported
torch and dispatch. A rank that raises, dies or hangs ends the call: the others are killed and `RanksFailed` has the
position of each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from tests.fork_server import ENGINE_SERVER, ForkedProcess

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "100")  # a waiting thread yields its core soon
GLOO_TIMEOUT_S = 60.0
ENDED = (EOFError, ConnectionResetError)
"""Of a pipe to a process that has ended; reset: it had not read all that was sent."""
CALL_SECONDS = 90.0
"""Default limit of a call, far above the real durations."""
GRACE_S = 1.0  # between the request for a hung rank's stack and its end


class RanksFailed(AssertionError):
    """The error of each rank that did not return."""


class Ranks:
    """`n` ranks of one world: ``with Ranks(4) as ranks: ranks.call(function, ...)``.

    Args:
        gloo_timeout_s: timeout of the world's process group, torch's default group on each rank.
        environment: variables set only in the ranks.
    """

    def __init__(
        self, n: int, gloo_timeout_s: float = GLOO_TIMEOUT_S, environment: dict[str, str] | None = None
    ) -> None:
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        _compile_kernels()
        self._pipes: list[Connection] = []
        self._processes: list[ForkedProcess] = []
        for rank in range(n):
            ours, theirs = connection.Pipe()
            process = ForkedProcess(ENGINE_SERVER.address, [__name__], (theirs.fileno(), 2))
            theirs.close()
            ours.send((rank, n, self._folder.name, gloo_timeout_s, environment or {}))
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_SECONDS) -> list[Any]:
        """function(rank, *args) on every rank; both must be picklable (a function of a module).

        Raises:
            RanksFailed: with every traceback; all ranks have ended.
        """
        self.start(function, *args)
        return self.finish(timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """The first half of `call`, for tests that disturb running ranks."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def finish(self, timeout_s: float = CALL_SECONDS, expect_dead: tuple[int, ...] = ()) -> list[Any]:
        """The second half: the results; None for a rank of `expect_dead`."""
        results: list[Any] = [None] * self.n
        failures: dict[int, str] = {}
        pending = {rank for rank in range(self.n) if rank not in expect_dead}
        deadline = time.monotonic() + timeout_s
        while pending and not failures:
            ready = connection.wait([self._pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in pending if self._pipes[rank] in ready]:
                pending.discard(rank)
                try:
                    ok, results[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except ENDED:
                    ok, results[rank] = False, f"died with exit code {_exit_code(self._processes[rank], CALL_SECONDS)}"
                if not ok:
                    failures[rank] = results[rank]
        if failures or pending:
            self._fail(failures, pending, timeout_s)
        return results

    def _fail(self, failures: dict[int, str], pending: set[int], timeout_s: float) -> None:
        if pending and failures:  # one rank raised: the errors of the others often name the cause
            for pipe in connection.wait([self._pipes[rank] for rank in pending], GRACE_S):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pickle.loads(self._pipes[rank].recv_bytes())
                except ENDED:
                    ok, value = False, "died"
                pending.discard(rank)
                if not ok:
                    failures[rank] = value
        for rank in pending:
            self._processes[rank].send_signal(signal.SIGUSR1)
        for rank in pending:
            stack = self._stack(rank)
            failures[rank] = f"had not returned (limit {timeout_s:g} s); it was at\n{stack}"
        for process in self._processes:
            process.kill()
        self.close()
        raise RanksFailed("\n".join(f"rank {rank} of {self.n}: {text}" for rank, text in sorted(failures.items())))

    def _stack(self, rank: int) -> str:
        """Output of faulthandler at the signal; empty if the rank cannot write it (stopped, in a system call)."""
        file = Path(self._folder.name, f"stack{rank}")
        for _ in range(50):
            if file.exists() and file.stat().st_size:
                time.sleep(0.05)  # the rest of the output
                return file.read_text()
            time.sleep(GRACE_S / 50)
        return ""

    def close(self) -> None:
        """Ends the ranks: by a message if they are idle, else by SIGKILL."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes):
            _exit_code(process)
            process.kill()
            process.wait()
            process.stdin.close()
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_SECONDS) -> list[Any]:
    """function(rank, *args) on n fresh ranks -> their results."""
    with Ranks(n) as ranks:
        return ranks.call(function, *args, timeout_s=timeout_s)


def _exit_code(process: ForkedProcess, seconds: float = GRACE_S) -> int | None:
    """The exit code; None if the process still runs after the wait."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode


@lru_cache
def _compile_kernels() -> None:
    """Compiles on first use, before a rank's call is timed."""
    from moe_engine.kernels.cpu.library import LibraryError, load

    with contextlib.suppress(LibraryError):
        load()


def main() -> NoReturn:
    """A rank: joins the world, then runs the functions that it receives. Standard output is the pipe."""
    pipe = Connection(os.dup(1))
    os.dup2(2, 1)
    rank, n, folder, gloo_timeout_s, environment = pipe.recv()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment})
    import torch
    import torch.distributed as dist

    stack = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=gloo_timeout_s))
    while (message := pipe.recv()) is not None:
        function, args = message
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_as_bytes(answer))
    os._exit(0)  # the destructors of a world with a lost rank would wait


def _as_bytes(answer: Any) -> bytes:
    """Pickled, tensors by value: a pipe's `send` creates a file in shared memory per tensor, which is slower than most
    calls."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.numel():
                return NotImplemented
            words = value.contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor_of, (bytearray(words), value.dtype, value.shape)

    written = io.BytesIO()
    Pickler(written).dump(answer)
    return written.getvalue()


def _tensor_of(content: bytearray, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(content, dtype=dtype).view(shape)


class World:
    """Ranks that are restarted after a failure, so that one failed case does not hide the others."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._ranks: Ranks | None = None

    @property
    def ranks(self) -> Ranks:
        if self._ranks is None or not self._ranks.alive:
            self._ranks = Ranks(self.n)
        return self._ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
