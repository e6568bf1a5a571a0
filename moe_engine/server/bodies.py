"""Processing of request bodies: decoding, checks, chat template, tokenization.

The cost grows with the body, so it is placed where it does not block other requests:

- up to `THREAD_CHARS` bytes: on the event loop, which is fastest;
- up to `PROCESS_BYTES`: in a small thread pool;
- beyond: in a small process pool (`text_processes`). Otherwise a single call of the JSON decoder, or the garbage
  collector with millions of objects, would hold the GIL for seconds. A body takes a process once it has arrived, so
  that slow clients do not hold up others.

The work of an endpoint is one function of the body and of facts that are constant while the server runs. It
returns a `Plan` for endpoints that generate, or the response's JSON in pieces.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.frontend.prepare import THREAD_CHARS, ReadRequest
from moe_engine.server.errors import RemoteProblemError
from moe_engine.server.http_io import Body, PartsResponse, cancel_on_disconnect
from moe_engine.server.text_frames import Kind
from moe_engine.server.text_processes import TextProcesses
from moe_engine.server.trace_context import mark_body_read

PROCESS_BYTES = 2**19
"""Larger bodies are sent to a process. Decoding this many bytes holds the GIL for at most 15 ms."""
THREADS = 4
MAX_WAITING, MAX_WAITING_BYTES = 64, 2**29
"""Max large bodies, and their bytes, that arrive or wait for a process; further ones are refused with 503."""
DP_RANK = "X-Data-Parallel-Rank"
"""Header of SGLang, vLLM and their routers; prevails over the body's routed_dp_rank."""


@dataclass(slots=True)
class Plan:
    """A request ready for the engine. `options`: what its endpoint needs to build the response."""

    read: ReadRequest
    options: Any = None


Work = Callable[[bytes | bytearray], Plan | Iterator[bytes]]


class Bodies:
    """Reads and processes request bodies.

    Args:
        work: the work function of each endpoint, by name.
        max_bytes: longer bodies are refused with 413.
        processes: pool for large bodies; None: threads process these too.
    """

    def __init__(self, work: Mapping[str, Work], max_bytes: int, processes: TextProcesses | None) -> None:
        self._work = work
        self._max_bytes = max_bytes
        self._processes = processes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="request bodies")
        self._waiting = self._waiting_bytes = 0

    async def plan(self, request: Request, name: str) -> Plan:
        """Raises InputError: the body is too large, not a JSON object, or invalid for the endpoint."""
        done = await self.plan_or_answer(request, name)
        assert isinstance(done, Plan)
        if (rank := request.headers.get(DP_RANK)) is not None:
            if not (rank.isascii() and rank.isdigit() and len(rank) <= 5):
                raise InputError.at(DP_RANK, f"expected the number of a rank, got {rank!r:.40}")
            done.read.inp.routed_dp_rank = int(rank)
        return done

    async def answer(self, request: Request, name: str) -> Response:
        """Raises like `plan`."""
        done = await self.plan_or_answer(request, name)
        assert isinstance(done, Response)
        return done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    async def plan_or_answer(self, request: Request, name: str) -> Plan | Response:
        """Raises like `plan`."""
        body = Body(request, self._max_bytes)
        begun = await body.read(self._max_bytes if self._processes is None else PROCESS_BYTES)
        mark_body_read()
        if not body.is_complete:
            return await self._run_large(request, body, begun, name)
        if len(begun) <= THREAD_CHARS:
            return self._run_here(name, begun)
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._run_here, name, begun)
        return await cancel_on_disconnect(request, work)

    def _run_here(self, name: str, body: bytes) -> Plan | Response:
        done = self._work[name](body)
        return done if isinstance(done, Plan) else Response(b"".join(done), media_type="application/json")

    async def _run_large(self, request: Request, body: Body, begun: bytes, name: str) -> Plan | Response:
        if self._waiting >= MAX_WAITING:
            raise self._queue_is_full()
        parts, size = [begun], len(begun)
        self._waiting += 1
        self._waiting_bytes += size
        try:
            async for part in body.rest():
                parts.append(part)
                size += len(part)
                self._waiting_bytes += len(part)
                if self._waiting_bytes > MAX_WAITING_BYTES:
                    raise self._queue_is_full()
            frames = self._frames(parts, name)
            await cancel_on_disconnect(request, anext(frames))  # the whole body has been forwarded
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size
        kind, payload = await cancel_on_disconnect(request, anext(frames))
        if kind == Kind.HEAD:
            return await cancel_on_disconnect(request, _gather(pickle.loads(payload), frames))
        return PartsResponse(_parts(payload, frames))

    def _queue_is_full(self) -> InputError:
        held = f"{self._waiting} requests with large bodies ({self._waiting_bytes >> 20} MiB)"
        return InputError(f"{held} are already queued; try again later", status=503)

    async def _frames(self, parts: list[bytes], name: str) -> AsyncGenerator[tuple[int, bytes]]:
        """First an empty frame, once the process has the whole body; then the frames of the process."""
        assert self._processes is not None
        async with self._processes.session(name) as process:
            for part in parts:
                await process.send(part)
            parts.clear()
            await process.end()
            yield Kind.PART, b""
            while (frame := await process.receive())[0] != Kind.END:
                if frame[0] == Kind.PROBLEM:
                    raise RemoteProblemError(pickle.loads(frame[1]))
                yield frame


async def _gather(plan: Plan, frames: AsyncGenerator[tuple[int, bytes]]) -> Plan:
    async for kind, payload in frames:
        assert kind == Kind.PROMPTS
        plan.read.prompts += pickle.loads(payload)
    return plan


async def _parts(first: bytes, frames: AsyncGenerator[tuple[int, bytes]]) -> AsyncGenerator[bytes]:
    async with aclosing(frames):
        yield first
        async for _, payload in frames:
            yield payload
