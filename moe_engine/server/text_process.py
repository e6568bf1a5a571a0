"""Worker process for large request bodies, one at a time. Started by `text_processes`.

It exits when the server exits, after `IDLE_SECONDS` without work, and after work that used much memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from moe_engine import logs
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.frontend import Frontend
from moe_engine.processes.background import yield_to_steps, yielding
from moe_engine.processes.stop_signals import ignore_stop_signals
from moe_engine.processes.watched_thread import start_watched
from moe_engine.server.bodies import Plan, Work
from moe_engine.server.body_work import body_work
from moe_engine.server.errors import Problem, problem_of
from moe_engine.server.state import ServerState
from moe_engine.server.text_frames import FRAME_BYTES, HEADER, Kind, frame
from moe_engine.server.text_processes import TextSpec

IDLE_SECONDS = 60.0
MAX_MEMORY_BYTES = 4 * 2**30
KEPT_MEMORY_BYTES = 2**30
"""A process whose peak memory exceeds this exits after its work, to return the memory."""
PROMPTS_PER_FRAME = 64


def main() -> None:
    ignore_stop_signals()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    connection = socket.socket(fileno=os.dup(0))
    start_watched("server watch", lambda: _exit_with_server(connection), lambda message: os._exit(1))
    server = Server(connection)
    spec: TextSpec = pickle.loads(server.receive()[1])
    logs.setup_logging(spec.settings.args.logging.log_level)
    work = body_work(_state(spec))
    yield_to_steps()  # only now: its first body waits for the start
    gc.disable()  # it would repeatedly scan millions of decoded objects, and JSON has no cycles
    while server.work_on_next(work):
        gc.collect()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > KEPT_MEMORY_BYTES:
            break


def _exit_with_server(connection: socket.socket) -> None:
    """Ends this process, also while it computes, when the server closes its side or dies."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()
    os._exit(1)


class _NoEngine(NamedTuple):
    """Stands in for the engine's client: body work only needs its `info`."""

    info: EngineInfo


def _state(spec: TextSpec) -> ServerState:
    engine: Any = _NoEngine(spec.info)
    tokenizer = spec.tokenizer.load() if spec.tokenizer else None
    frontend = Frontend(engine, tokenizer, spec.settings.frontend)
    return ServerState(frontend, engine, spec.settings, spec.chat_template)


class Server:
    """This process's side of the socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def receive(self) -> tuple[int, bytes]:
        """The next frame. Raises EOFError if the server has closed its side."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            raise EOFError
        kind, length = HEADER.unpack(header)
        return kind, self._stream.read(length)

    def send(self, kind: Kind, payload: bytes | bytearray = b"") -> None:
        self._connection.sendall(frame(kind, payload))

    def work_on_next(self, work: dict[str, Work]) -> bool:
        """Processes one body. False: no body within `IDLE_SECONDS`, or the server has closed the connection."""
        try:
            name = self._next_job()
            if name is None:
                return False
            self.send(Kind.READY)
            body = self._body()
            try:
                with yielding():
                    self._answer(work[name](body))
            except MemoryError:
                self.send(Kind.PROBLEM, pickle.dumps(_TOO_MUCH))
            except OSError:
                raise
            except Exception as exc:
                self.send(Kind.PROBLEM, pickle.dumps(problem_of(exc)))
        except (EOFError, OSError):  # the server exited, or closed its side because its client disconnected
            return False
        return True

    def _next_job(self) -> str | None:
        self._connection.settimeout(IDLE_SECONDS)
        try:
            kind, payload = self.receive()
        except TimeoutError:
            return None
        self._connection.settimeout(None)
        assert kind == Kind.JOB
        return payload.decode()

    def _body(self) -> bytearray:
        body = bytearray()
        while True:
            kind, payload = self.receive()
            if kind == Kind.BODY_END:
                return body
            assert kind == Kind.BODY
            body += payload

    def _answer(self, done: Plan | Iterator[bytes]) -> None:
        if isinstance(done, Plan):
            prompts, done.read.prompts = done.read.prompts, []
            self.send(Kind.HEAD, pickle.dumps(done))
            for at in range(0, len(prompts), PROMPTS_PER_FRAME):
                self.send(Kind.PROMPTS, pickle.dumps(prompts[at : at + PROMPTS_PER_FRAME]))
        else:
            waiting = bytearray()
            for part in done:
                waiting += part
                while len(waiting) >= FRAME_BYTES:
                    self.send(Kind.PART, waiting[:FRAME_BYTES])
                    del waiting[:FRAME_BYTES]
            self.send(Kind.PART, waiting)
        self.send(Kind.END)


_TOO_MUCH = Problem(
    413,
    f"processing the request body needs more than {MAX_MEMORY_BYTES >> 30} GB of memory; send smaller requests",
    "invalid_request_error",
    None,
    413,
)

if __name__ == "__main__":
    main()
