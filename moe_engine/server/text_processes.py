"""Pool of worker processes for large request bodies: started on demand, reused, stopped when idle."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.processes.child import describe_exit, ended_at_start
from moe_engine.processes.stopped import HELD_SECONDS, LOOK_SECONDS, StoppedProcessDetector
from moe_engine.processes.watched_thread import start_watched
from moe_engine.server.settings import ServerSettings
from moe_engine.server.text_frames import HEADER, Kind, frame
from moe_engine.tokenizer.chat_messages import ChatEncoder
from moe_engine.tokenizer.tokenizer import TokenizerSource

logger = logging.getLogger("moe_engine")

MAX_PROCESSES = 2


@dataclass(frozen=True)
class TextSpec:
    """Specification of a process: everything that body work depends on."""

    tokenizer: TokenizerSource | None
    chat_template: ChatEncoder | None
    settings: ServerSettings
    info: EngineInfo


class TextProcesses:
    """At most `MAX_PROCESSES` processes. Further requests wait in order of arrival."""

    def __init__(self, spec: TextSpec) -> None:
        self._spec = spec
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[TextProcess] = []
        self._busy: set[TextProcess] = set()

    @asynccontextmanager
    async def session(self, name: str) -> AsyncGenerator[TextProcess]:
        """A process ready for a body of the endpoint `name`; killed if the block exits before the response ends."""
        async with self._slots:
            process = await self._borrow(name)
            self._busy.add(process)
            try:
                yield process
            finally:
                self._busy.discard(process)
                if process.finished:
                    self._idle.append(process)
                else:
                    process.kill()

    async def _borrow(self, name: str) -> TextProcess:
        while self._idle:
            process = self._idle.pop()
            if await process.begin(name):
                return process
            process.kill()  # it has exited after idling, or was stopped by a signal
        for _ in range(2):  # the kernel may have killed the first one for other processes' memory
            process = await TextProcess.start(self._spec)
            if await process.begin(name):
                return process
            code = await process.exit_code()
            process.kill()
            pid, end = process.pid, describe_exit(code)
            logger.error("the process for large bodies (pid %d) %s before it was ready", pid, end)
        raise ended_at_start("the process for large bodies", code)

    def close(self) -> None:
        for process in (*self._idle, *self._busy):
            process.kill()
        self._idle.clear()


class TextProcess:
    """The server's side of one process. `finished`: it has responded and waits for the next body."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._stopped_for = ""
        self.finished = False

    @classmethod
    async def start(cls, spec: TextSpec) -> TextProcess:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "moe_engine.server.text_process"]
        with theirs:
            popen = await asyncio.to_thread(subprocess.Popen, command, stdin=theirs.fileno(), stdout=2, process_group=0)
        process = cls(popen, *await asyncio.open_unix_connection(sock=ours))
        start_watched("request body process", process._watch, lambda message: popen.kill())
        process._writer.write(frame(Kind.SPEC, pickle.dumps(spec)))
        return process

    async def begin(self, name: str) -> bool:
        """Announces a body for the endpoint `name`; whether the process is alive and ready for it. Kills it if the
        request is cancelled meanwhile."""
        self.finished = False
        try:
            await self._write(frame(Kind.JOB, name.encode()))
            return (await self._read())[0] == Kind.READY
        except (OSError, asyncio.IncompleteReadError):
            return False
        except asyncio.CancelledError:
            self.kill()
            raise

    async def send(self, part: bytes) -> None:
        """Sends the next part of the body. Raises like `receive`."""
        try:
            await self._write(frame(Kind.BODY, part))
        except OSError:
            raise await self._death() from None

    async def end(self) -> None:
        """Marks the body as complete. Raises like `receive`."""
        try:
            await self._write(frame(Kind.BODY_END))
        except OSError:
            raise await self._death() from None

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: kind and payload.

        Raises:
            InputError: 413, the process died while processing the body, most likely because of its size; 503, a signal
                had stopped it.
        """
        try:
            kind, payload = await self._read()
        except (OSError, asyncio.IncompleteReadError):
            raise await self._death() from None
        self.finished = kind in (Kind.END, Kind.PROBLEM)
        return kind, payload

    def kill(self) -> None:
        self._writer.close()
        self._popen.kill()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _read(self) -> tuple[int, bytes]:
        kind, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return kind, await self._reader.readexactly(length)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def exit_code(self) -> int:
        """Waits for the end of the process."""
        return await asyncio.to_thread(self._popen.wait)

    async def _death(self) -> InputError:
        end = describe_exit(await self.exit_code())
        if self._stopped_for:
            return InputError(f"the process for this large body {end}: {self._stopped_for}; try again", status=503)
        return InputError(f"the process for this large body {end}; send smaller requests", status=413)

    def _watch(self) -> None:
        """Reaps the process; kills it once a signal has stopped it for `HELD_SECONDS`, as it would never answer."""
        stopped = StoppedProcessDetector(self._popen.pid)
        while self._popen.poll() is None:
            if (held := stopped.seconds()) > HELD_SECONDS:
                self._stopped_for = f"it had been stopped by a signal for {held:.1f} s"
                logger.error("request body process (pid %d) is killed: %s", self._popen.pid, self._stopped_for)
                self._popen.kill()
                self._popen.wait()
            time.sleep(LOOK_SECONDS)
