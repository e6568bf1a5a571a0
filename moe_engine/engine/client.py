"""The front end's end of an engine core: submits requests, hands out what steps bring, notices death at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio

from moe_engine.engine import messages
from moe_engine.engine.client_api import EngineInfo, Health
from moe_engine.engine.core_process import CoreProcess
from moe_engine.engine.messages import AddRequest, RequestDelta
from moe_engine.errors import EngineDeadError

logger = logging.getLogger("moe_engine")

DRAIN_SECONDS = 10.0
"""For the core to leave once every client has its answer; only a step that nobody waits for can still run."""


class _Inbox:
    """What has arrived for one request and was not read yet; pieces merge while the reader is slow."""

    __slots__ = ("delta", "error", "event")

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.delta: RequestDelta | None = None
        self.error: str | None = None

    def put(self, delta: RequestDelta) -> None:
        if self.delta is None:
            self.delta = delta
        else:
            _merge(self.delta, delta)
        self.event.set()

    def fail(self, error: str) -> None:
        self.error = error
        self.event.set()

    async def get(self) -> RequestDelta:
        await self.event.wait()
        if self.delta is None:
            raise EngineDeadError(self.error or "the engine is gone")
        delta, self.delta = self.delta, None
        if self.error is None:
            self.event.clear()
        return delta


def _merge(into: RequestDelta, new: RequestDelta) -> None:
    into.token_ids.extend(new.token_ids)
    into.finish = new.finish
    if new.logprobs is not None:
        into.logprobs = (into.logprobs or []) + new.logprobs
    if new.prompt_logprobs is not None:
        into.prompt_logprobs = (into.prompt_logprobs or []) + new.prompt_logprobs
    into.cached_tokens, into.retractions, into.queue_time = new.cached_tokens, new.retractions, new.queue_time
    into.speculation = new.speculation


class CoreClient:
    """Implements `client_api.EngineClient` over one core process. Lives on one event loop."""

    def __init__(self, core: CoreProcess, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        context = zmq.asyncio.Context.instance()
        self._to_core = context.socket(zmq.PUSH)
        self._to_core.setsockopt(zmq.SNDHWM, 0)
        self._to_core.setsockopt(zmq.LINGER, 0)
        self._to_core.connect(core.to_core_address)
        self._from_core = context.socket(zmq.PULL)
        self._from_core.setsockopt(zmq.RCVHWM, 0)
        self._from_core.bind(core.from_core_address)
        self._inboxes: dict[str, _Inbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._closing = False
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="core reader")
        core.on_death(self._died, asyncio.get_running_loop())

    # -- requests

    async def stream(self, request: AddRequest) -> AsyncIterator[RequestDelta]:
        if request.rid in self._inboxes:
            raise ValueError(f"request id {request.rid!r} is in use")
        if self._core.dead:
            raise EngineDeadError(self._core.dead)
        inbox = self._inboxes[request.rid] = _Inbox()
        finished = False
        try:
            self._send(request)
            while not finished:
                delta = await inbox.get()
                finished = delta.finish is not None
                yield delta
        finally:
            self._inboxes.pop(request.rid, None)
            if not finished:
                self._send(messages.AbortRequest(rid=request.rid, reason="client gone"))

    def abort(self, rid: str = "", *, all: bool = False, reason: str = "Aborted") -> None:
        self._send(messages.AbortRequest(rid=rid, prefix=True, all=all, reason=reason))

    async def call(self, method: str, **args: Any) -> Any:
        if self._core.dead:
            raise EngineDeadError(self._core.dead)
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(messages.Call(id=call_id, method=method, args=args))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # -- state

    def health(self) -> Health:
        status = self._core.board.read()
        return Health(
            alive=self._core.dead is None,
            ready=status.ready,
            last_step=status.step,
            last_step_age=status.step_age,
            silence=status.silence,
            oldest_queued_age=status.oldest_queued_age,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            num_used_tokens=status.num_used_tokens,
            dead=self._core.dead,
        )

    async def shutdown(self, *, drain: bool = True) -> None:
        """Ends the core, after its running requests when `drain`. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._core.expect_exit()
        self._send(messages.Shutdown(drain=drain))
        await asyncio.get_running_loop().run_in_executor(None, self._core.stop, DRAIN_SECONDS if drain else 5.0)
        self._reader.cancel()
        self._to_core.close()
        self._from_core.close()

    # -- plumbing

    def _send(self, message: messages.Message) -> None:
        if not self._core.dead and not self._to_core.closed:
            # A PUSH socket without a high-water mark never blocks, so the returned future is done already.
            self._to_core.send(messages.encode(message))

    async def _read(self) -> None:
        while True:
            message = messages.decode_from_core(await self._from_core.recv())
            if isinstance(message, messages.StepOutput):
                for delta in message.deltas:
                    inbox = self._inboxes.get(delta.rid)
                    if inbox is not None:
                        inbox.put(delta)
            elif isinstance(message, messages.Reply):
                future = self._calls.get(message.id)
                if future is not None and not future.done():
                    if message.ok:
                        future.set_result(message.value)
                    else:
                        future.set_exception(EngineDeadError(str(message.value)))
            elif isinstance(message, messages.CoreFailed):
                self._core.note_failure(message.message)

    def _died(self, cause: str) -> None:
        for inbox in self._inboxes.values():
            inbox.fail(cause)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(cause))
