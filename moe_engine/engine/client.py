"""The front end's end of the engine cores: submits requests, hands out what steps bring, notices death at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from moe_engine.engine import messages
from moe_engine.engine.client_api import EngineInfo, Health, combine
from moe_engine.engine.core_handle import CoreHandle
from moe_engine.engine.messages import AddRequest, RequestDelta
from moe_engine.engine.routing import Load, Router
from moe_engine.engine.status_board import StatusBoard
from moe_engine.engine.zmq_sockets import JobKeys, connect
from moe_engine.errors import EngineDeadError, InputError
from moe_engine.types import FinishReason

logger = logging.getLogger("moe_engine")

DRAIN_SECONDS = 10.0
"""For the core to leave once every client has its answer; only a step that nobody waits for can still run."""
MAX_RESUMES = 3
"""So often a request goes on elsewhere when its scheduler is lost: one that kills whoever computes it must not have
them all."""


class _Inbox:
    """What has arrived for one request and was not read yet; pieces merge while the reader is slow."""

    __slots__ = (
        "abort_reason",
        "cached_tokens",
        "delta",
        "error",
        "event",
        "lane",
        "load",
        "num_tokens",
        "request",
        "said",
    )

    def __init__(self, request: AddRequest, lane: int, load: Load) -> None:
        self.event = asyncio.Event()
        self.delta: RequestDelta | None = None
        self.error: str | None = None
        self.request = request
        self.said: list[int] = []
        """Tokens that have come: with the prompt, all that another scheduler must know to go on."""
        self.cached_tokens = 0
        self.abort_reason: str | None = None
        """Set when it is to end: should its scheduler be lost before it hears, nobody else must go on."""
        self.num_tokens = len(request.prompt_ids)
        self.load = load
        self.enter(lane, load)

    def enter(self, lane: int, load: Load) -> None:
        """It is now at this scheduler."""
        self.lane, self.load = lane, load
        load.num_requests += 1
        load.num_tokens += self.num_tokens

    def leave(self) -> None:
        self.load.num_requests -= 1
        self.load.num_tokens -= self.num_tokens

    def take(self, delta: RequestDelta) -> None:
        """News from its scheduler."""
        count = len(delta.token_ids)
        self.num_tokens += count
        self.load.num_tokens += count
        if self.request.said:  # what the first scheduler said of it stays
            delta.cached_tokens = self.cached_tokens
        self.cached_tokens = delta.cached_tokens
        self.said += delta.token_ids
        self.put(delta)

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


@dataclass
class _Lane:
    """One scheduler: a core process, or an attention group behind it."""

    core: CoreHandle
    group: int
    to_core: zmq.asyncio.Socket
    board: StatusBoard
    lost: str | None = None
    """How the group was lost, where its core goes on without it."""

    @property
    def dead(self) -> str | None:
        """Why nothing can be sent to it."""
        return self.core.dead or self.lost

    def send(self, message: messages.Message) -> None:
        if not self.dead and not self.to_core.closed:
            # A PUSH socket without a high-water mark never blocks, so the returned future is done already.
            self.to_core.send(messages.encode(message))


class CoreClient:
    """Implements `client_api.EngineClient` over the ready cores of one or several replicas. Lives on one event loop.

    A replica that dies takes its own requests with it; the others go on. Requests of an attention group that is lost
    alone go on at another: it is told the prompt and the tokens that have come, and the reader only waits.
    """

    def __init__(self, cores: CoreHandle | Sequence[CoreHandle], info: EngineInfo, method: str = "auto") -> None:
        self.info = info
        self._cores = [cores] if isinstance(cores, CoreHandle) else list(cores)
        self._lanes = [
            _Lane(core, group, _push(address, core.keys), board)
            for core in self._cores
            for group, (address, board) in enumerate(zip(core.to_core_addresses, core.boards))
        ]
        self._router = Router(len(self._lanes), method)
        self._inboxes: dict[str, _Inbox] = {}
        self._calls: dict[int, tuple[_Lane, asyncio.Future[Any]]] = {}
        self._call_ids = itertools.count()
        self.closing = False
        """Whether the cores were told to end."""
        loop = asyncio.get_running_loop()
        self._readers = []
        for core in self._cores:
            receiver = zmq.asyncio.Socket(core.from_core)
            self._readers.append(loop.create_task(self._read(core, receiver), name="core reader"))
            core.on_death(partial(self._died, core), loop)

    # -- requests

    async def stream(self, request: AddRequest) -> AsyncIterator[RequestDelta]:
        if request.rid in self._inboxes:
            raise ValueError(f"request id {request.rid!r} is in use")
        number = self._choose(request)
        if len(self._lanes) > 1:
            request.routed_dp_rank = number  # for the answer's meta_info
        inbox = self._inboxes[request.rid] = _Inbox(request, number, self._router.loads[number])
        finished = False
        try:
            self._lanes[number].send(request)
            while not finished:
                delta = await inbox.get()
                finished = delta.finish is not None
                yield delta
        finally:
            self._inboxes.pop(request.rid, None)
            inbox.leave()
            if not finished:
                self._lanes[inbox.lane].send(messages.AbortRequest(rid=request.rid, reason="client gone"))

    def abort(self, rid: str = "", *, all: bool = False, reason: str = "Aborted") -> None:
        for inbox in self._inboxes.values():
            if all or (rid and inbox.request.rid.startswith(rid)):
                inbox.abort_reason = reason
        for lane in self._lanes:
            lane.send(messages.AbortRequest(rid=rid, prefix=True, all=all, reason=reason))

    async def call(self, method: str, **args: Any) -> list[Any]:
        lanes = self._alive()
        answers = await asyncio.gather(*(self._call(lane, method, args) for lane in lanes), return_exceptions=True)
        for lane, answer in zip(lanes, answers):
            if isinstance(answer, BaseException) and (lane.core.dead or not lane.lost):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]  # of those that are left

    async def call_each(self, method: str, **args: Any) -> list[Any]:
        asked = (self._call(lane, method, args) for lane in self._alive())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                raise answer
        return list(answers)

    async def call_one(self, method: str, **args: Any) -> Any:
        return await self._call(self._alive()[0], method, args)

    def _alive(self) -> list[_Lane]:
        alive = [lane for lane in self._lanes if not lane.dead]
        if not alive:
            raise EngineDeadError(self._cause())
        return alive

    def _choose(self, request: AddRequest) -> int:
        able = [number for number, lane in enumerate(self._lanes) if not lane.dead]
        if not able:
            raise EngineDeadError(self._cause())
        asked = request.routed_dp_rank
        if asked is None:
            return able[0] if len(able) == 1 else self._router.choose(able)
        if not 0 <= asked < len(self._lanes):
            ranks = "one data-parallel rank, 0" if len(self._lanes) == 1 else f"ranks 0 to {len(self._lanes) - 1}"
            raise InputError(f"routed_dp_rank {asked}: this server has {ranks}", field="routed_dp_rank")
        if asked not in able:
            raise EngineDeadError(self._lanes[asked].dead or "")
        return asked

    async def _call(self, lane: _Lane, method: str, args: dict[str, Any]) -> Any:
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = lane, future
        try:
            if lane.dead:  # since it was chosen: nobody would answer
                raise EngineDeadError(lane.dead)
            lane.send(messages.Call(id=call_id, method=method, args=args))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # -- state

    def health(self) -> Health:
        return combine(self.healths())

    def healths(self) -> list[Health]:
        """Of every scheduler."""
        return [_health(lane) for lane in self._lanes]

    def cause_of_death(self) -> str | None:
        """Why nothing can be served any more; None while a replica lives."""
        return self._cause() if all(core.dead for core in self._cores) else None

    def stop_stalled(self, stall: Any) -> None:
        """Ends replicas of which `stall(health)` says why they do not move: whoever waits gets the reason."""
        for lane in self._lanes:
            reason = None if lane.dead else stall(_health(lane))
            if reason:
                lane.core.kill(reason)

    async def shutdown(self, *, drain: bool = True) -> None:
        """Ends the cores, after their running requests when `drain`. Safe to call twice."""
        if self.closing:
            return
        self.closing = True
        for core in self._cores:
            core.expect_exit()
        for lane in self._lanes:
            lane.send(messages.Shutdown(drain=drain))
        loop, seconds = asyncio.get_running_loop(), DRAIN_SECONDS if drain else 5.0
        await asyncio.gather(*(loop.run_in_executor(None, core.stop, seconds) for core in self._cores))
        for reader in self._readers:
            reader.cancel()
        for lane in self._lanes:
            lane.to_core.close()

    # -- plumbing

    async def _read(self, core: CoreHandle, receiver: zmq.asyncio.Socket) -> None:
        lanes = [lane for lane in self._lanes if lane.core is core]
        while True:
            message = messages.decode_from_core(await receiver.recv())
            if isinstance(message, messages.StepOutput):
                if lanes[message.group].lost:
                    continue  # its last words: its requests are elsewhere already
                for delta in message.deltas:
                    inbox = self._inboxes.get(delta.rid)
                    if inbox is not None:
                        inbox.take(delta)
            elif isinstance(message, messages.GroupsLost):
                self._lost(core, message)
            elif isinstance(message, messages.Reply):
                _, future = self._calls.get(message.id, (None, None))
                if future is not None and not future.done():
                    if message.ok:
                        future.set_result(message.value)
                    else:
                        future.set_exception(EngineDeadError(str(message.value)))
            elif isinstance(message, messages.CoreFailed):
                core.note_failure(message.message)
                self._died(core, core.dead or "")

    def _lost(self, core: CoreHandle, message: messages.GroupsLost) -> None:
        """Groups of a core are gone: their requests go on at those that are left."""
        gone = [lane for lane in self._lanes if lane.core is core and lane.group in message.groups]
        for lane in gone:
            lane.lost = message.message
        for inbox in list(self._inboxes.values()):
            if self._lanes[inbox.lane] in gone:
                self._resume(inbox, message.message)
        for lane, future in self._calls.values():
            if lane in gone and not future.done():
                future.set_exception(EngineDeadError(message.message))

    def _resume(self, inbox: _Inbox, cause: str) -> None:
        request = inbox.request
        if inbox.abort_reason is not None:
            finish = FinishReason("abort", message=inbox.abort_reason).to_dict()
            inbox.put(
                RequestDelta(request.rid, [], finish, cached_tokens=inbox.cached_tokens, retractions=request.resumed)
            )
            return
        if request.resumed == MAX_RESUMES:
            inbox.fail(f"{cause}; this request has lost {MAX_RESUMES + 1} schedulers")
            return
        number = self._choose(msgspec.structs.replace(request, routed_dp_rank=None))
        request.routed_dp_rank, request.said = number, list(inbox.said)
        request.resumed += 1
        inbox.leave()
        inbox.enter(number, self._router.loads[number])
        self._lanes[number].send(request)

    def _died(self, core: CoreHandle, cause: str) -> None:
        for inbox in self._inboxes.values():
            if self._lanes[inbox.lane].core is core:
                inbox.fail(cause)
        for lane, future in self._calls.values():
            if lane.core is core and not future.done():
                future.set_exception(EngineDeadError(cause))

    def _cause(self) -> str:
        return "; ".join(core.dead for core in self._cores if core.dead)


def _push(address: str, keys: JobKeys | None) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    connect(socket, address, keys)
    return socket


def _health(lane: _Lane) -> Health:
    status = lane.board.read()
    return Health(
        alive=lane.dead is None,
        ready=status.ready,
        last_step=status.step,
        last_step_age=status.step_age,
        silence=status.silence,
        oldest_queued_age=0.0 if lane.dead else status.oldest_queued_age,
        num_running=0 if lane.dead else status.num_running,
        num_waiting=0 if lane.dead else status.num_waiting,
        num_used_tokens=0 if lane.dead else status.num_used_tokens,
        dead=lane.dead,
    )
