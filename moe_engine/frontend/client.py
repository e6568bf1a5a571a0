"""Client of the engine cores: submits requests, distributes step outputs to their readers, detects dead cores.

Requests have internal ids (`AddRequest.rid`) that are never reused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from moe_engine.core import messages
from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.core.rank_calls import RankAnswer
from moe_engine.errors import EngineDeadError, InputError, RankLostError
from moe_engine.frontend.client_api import (
    CALL_SECONDS,
    NO_ARGS,
    CallArgs,
    CallError,
    DirectReader,
    EngineInfo,
    GroupAnswers,
    Health,
    combine,
    values_of,
)
from moe_engine.frontend.core_process import CoreProcess
from moe_engine.frontend.dp_routing import Room, Router
from moe_engine.frontend.inbox import Inbox
from moe_engine.frontend.known_prefixes import PromptBlocks
from moe_engine.frontend.scheduler_endpoint import SchedulerEndpoint
from moe_engine.processes.frames import FrameReader
from moe_engine.types import FinishReason
from moe_engine.validation import prepared

logger = logging.getLogger("moe_engine")

DRAIN_SECONDS = 10.0
"""Grace for the cores' exit after all clients have their answers; only an unneeded step may still run."""
MAX_MIGRATIONS = 3
"""Max migrations per request after its scheduler dies. Bounds the damage of a poison request that crashes every rank
it runs on."""
BURST_DELTAS = 256
"""Deltas handled in a row under load before the reader yields to the other tasks of the loop."""
GRACE_SECONDS = 10.0
"""Time beyond a call's deadline for a scheduler's reply, which waits for the step in flight."""
STOPPED = (zmq.ENOTSOCK, zmq.ETERM)
"""Errors of a socket that was closed because its core was stopped."""
SHUT_DOWN = "this engine was shut down"


class CoreClient:
    """Implements `client_api.EngineClient` over the ready cores of one or several replicas. Bound to one event loop.

    When a replica dies, its requests fail; the other replicas continue. When only an attention group is lost, its
    requests migrate to another group, which gets the prompt and the tokens generated so far; readers wait.

    Args:
        by_room: on a prefill server: choose the data-parallel rank by the bootstrap room, as its decode servers do.
    """

    def __init__(
        self,
        cores: CoreProcess | Sequence[CoreProcess],
        info: EngineInfo,
        method: str = "total_tokens",
        *,
        by_room: bool = False,
    ) -> None:
        self.info = info
        self._by_room = by_room
        self._cores = [cores] if isinstance(cores, CoreProcess) else list(cores)
        self._endpoints = [
            SchedulerEndpoint.to(core, group, address, status)
            for core in self._cores
            for group, (address, status) in enumerate(zip(core.to_core_addresses, core.statuses))
        ]
        room = Room(info.max_total_num_tokens, info.max_running_requests, info.host_tier_tokens)
        self._router = Router(len(self._endpoints), method, room)
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, tuple[SchedulerEndpoint, asyncio.Future[Any]]] = {}
        self._call_ids = itertools.count()
        self.closing = False
        """Whether shutdown of the cores has begun."""
        loop = asyncio.get_running_loop()
        self._readers = []
        for core in self._cores:
            reader = loop.create_task(self._read(core), name="core reader")
            reader.add_done_callback(partial(self._reader_ended, core))
            self._readers.append(reader)
            core.on_death(partial(self._died, core), loop)

    # -- requests

    async def stream(self, request: AddRequest, direct: DirectReader | None = None) -> AsyncGenerator[RequestDelta]:
        if request.rid in self._inboxes:
            raise ValueError(f"request id {request.rid!r} is in use")
        router = self._router
        prompt = router.blocks_of(request.prompt_ids, (request.lora_id, request.lora_key, request.extra_key))
        number = self._choose(request, prompt)
        if len(self._endpoints) > 1:
            request.routed_dp_rank = number  # for the response's meta_info
        uncomputed = router.sent(number, prompt)
        inbox = Inbox(request, number, router.loads[number], direct, prompt=prompt, uncomputed=uncomputed)
        self._inboxes[request.rid] = inbox
        finished = False
        try:
            self._endpoints[number].add(request)
            while not finished:
                delta = await inbox.get()
                finished = delta.finish is not None
                yield delta
        finally:
            inbox.left = True
            endpoint = self._endpoints[inbox.endpoint]
            if inbox.ended or endpoint.dead:
                self._forget(inbox)
            else:
                endpoint.leave(request.rid)

    def _forget(self, inbox: Inbox) -> None:
        """Drops a request that has no reader and whose scheduler has ended it or is lost."""
        del self._inboxes[inbox.request.rid]
        inbox.leave()
        self._router.ended(inbox.endpoint, inbox.prompt, inbox.generated_ids)

    def abort(self, rids: Sequence[str], reason: str = "Aborted") -> None:
        by_endpoint: dict[int, list[str]] = {}
        for rid in rids:
            inbox = self._inboxes.get(rid)
            if inbox is not None and not inbox.left:
                inbox.abort_reason = reason
                by_endpoint.setdefault(inbox.endpoint, []).append(rid)
        for number, rids_there in by_endpoint.items():
            self._endpoints[number].send(messages.AbortRequest(rids_there, reason))

    async def call(self, method: str, **args: Any) -> list[Any]:
        if method == "flush_cache":
            self._router.forget()
        endpoints = self._alive()
        answers = await asyncio.gather(
            *(self._call(endpoint, messages.Call(0, method, args)) for endpoint in endpoints), return_exceptions=True
        )
        found = [answer for answer in answers if not isinstance(answer, EngineDeadError)]
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        if not found:
            raise EngineDeadError(self._cause())
        return found

    async def call_one(self, method: str, **args: Any) -> Any:
        return await self._call(self._alive()[0], messages.Call(0, method, args))

    async def ask_ranks(
        self, method: str, args: CallArgs = NO_ARGS, deadline: float = CALL_SECONDS
    ) -> list[GroupAnswers]:
        endpoints = self._alive()
        calls = [messages.Call(0, method, self._args_for(endpoint, args), True, deadline) for endpoint in endpoints]
        asked = (
            asyncio.wait_for(self._call(endpoint, call), deadline + GRACE_SECONDS)
            for endpoint, call in zip(endpoints, calls)
        )
        return [
            self._group_answers(endpoint, found, deadline)
            for endpoint, found in zip(endpoints, await asyncio.gather(*asked, return_exceptions=True))
        ]

    def _replica_of(self, endpoint: SchedulerEndpoint) -> int | None:
        return self._cores.index(endpoint.core) if len(self._cores) > 1 else None

    def _args_for(self, endpoint: SchedulerEndpoint, args: CallArgs) -> dict[str, Any]:
        return dict(args(self._replica_of(endpoint)) if callable(args) else args)

    def _group_answers(self, endpoint: SchedulerEndpoint, found: Any, deadline: float) -> GroupAnswers:
        replica = self._replica_of(endpoint)
        if isinstance(found, TimeoutError):
            late = f"the scheduler of group {endpoint.group} did not answer within {deadline:g} s"
            return GroupAnswers(replica, failed=late)
        if isinstance(found, EngineDeadError):
            return GroupAnswers(replica, lost=endpoint.dead or str(found))
        if isinstance(found, BaseException):
            raise found
        return GroupAnswers(replica, msgspec.convert(found, prepared(list[RankAnswer])))

    async def collective_rpc(self, method: str, args: CallArgs = NO_ARGS, deadline: float = CALL_SECONDS) -> list[Any]:
        return values_of(await self.ask_ranks(method, args, deadline), method)

    def _alive(self) -> list[SchedulerEndpoint]:
        alive = [endpoint for endpoint in self._endpoints if not endpoint.dead]
        if not alive:
            raise EngineDeadError(self._cause())
        return alive

    def _choose(self, request: AddRequest, prompt: PromptBlocks | None) -> int:
        able = [number for number, endpoint in enumerate(self._endpoints) if not endpoint.dead]
        if not able:
            raise EngineDeadError(self._cause())
        asked = request.routed_dp_rank
        if self._by_room and request.bootstrap is not None:
            asked = self._of_room(request.bootstrap[2], asked)
        if asked is None:
            return able[0] if len(able) == 1 else self._router.choose(able, prompt)
        if not 0 <= asked < len(self._endpoints):
            ranks = (
                "one data-parallel rank, 0" if len(self._endpoints) == 1 else f"ranks 0 to {len(self._endpoints) - 1}"
            )
            raise InputError(f"routed_dp_rank {asked}: this server has {ranks}", field="routed_dp_rank")
        if asked not in able:
            by_room = self._by_room and request.bootstrap is not None
            fix = "a new bootstrap_room chooses another rank" if by_room else "leave routed_dp_rank out"
            raise self._loss(asked, self._endpoints[asked].dead or "", fix)
        return asked

    def _of_room(self, room: int, asked: int | None) -> int:
        """The data-parallel rank that decode servers derive from a room."""
        number = room % len(self._endpoints)
        if asked is not None and asked != number:
            raise InputError(
                f"routed_dp_rank {asked}: a prefill server chooses by bootstrap_room, here {number}; leave it out",
                field="routed_dp_rank",
            )
        return number

    async def _call(self, endpoint: SchedulerEndpoint, call: messages.Call) -> Any:
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = endpoint, future
        try:
            if endpoint.dead:  # died since it was chosen: it would never reply
                raise self._loss(self._endpoints.index(endpoint), endpoint.dead)
            endpoint.send(msgspec.structs.replace(call, id=call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # -- state

    def health(self) -> Health:
        return combine(self.healths())

    def healths(self) -> list[Health]:
        """One per scheduler."""
        return [endpoint.health() for endpoint in self._endpoints]

    def cause_of_death(self) -> str | None:
        """Why no request can be served any more; None while a replica is alive."""
        return self._cause() if all(core.dead for core in self._cores) else None

    def stop_stalled(self, stall: Any) -> None:
        """Kills replicas for which `stall(health)` returns a reason. Their requests fail with that reason."""
        for endpoint in self._endpoints:
            reason = None if endpoint.dead else stall(endpoint.health())
            if reason:
                endpoint.core.kill(reason)

    def stop_held(self) -> None:
        """Kills replicas whose core process is stopped by a signal. Call it every `stopped.LOOK_SECONDS`."""
        for core in self._cores:
            core.kill_if_stopped()

    async def shutdown(self, *, drain: bool = True) -> None:
        """Stops the cores, with `drain` after their running requests. What no core has answered, and what begins later,
        gets an `EngineDeadError`. Safe to call twice."""
        if self.closing:
            return
        self.closing = True
        for core in self._cores:
            core.expect_exit()
        for endpoint in self._endpoints:
            endpoint.end_turn()
            endpoint.send(messages.Shutdown(drain=drain))
        loop, seconds = asyncio.get_running_loop(), DRAIN_SECONDS if drain else 5.0
        await asyncio.gather(*(loop.run_in_executor(None, core.end, seconds) for core in self._cores))
        for reader in self._readers:
            reader.cancel()
        for core in self._cores:
            core.stop(0.0)
        for endpoint in self._endpoints:
            endpoint.to_core.close()
        for core in self._cores:
            core.dead = core.dead or SHUT_DOWN
        for core in self._cores:
            self._died(core, core.dead or "")

    # -- plumbing

    async def _read(self, core: CoreProcess) -> None:
        receiver = zmq.asyncio.Socket(core.from_core)
        endpoints = [endpoint for endpoint in self._endpoints if endpoint.core is core]
        frames = FrameReader(f"frontend, from {core.name}", messages.decode_from_core)
        handled = 0
        while True:
            # While messages are queued, this await returns immediately and no other task runs.
            message = frames.take(await receiver.recv_multipart())
            handled += 1
            if isinstance(message, messages.StepOutput):
                handled += len(message.deltas)
                self._on_step_output(endpoints, message, frames)
            elif isinstance(message, messages.GroupsLost):
                self._on_groups_lost(core, message)
            elif isinstance(message, messages.Reply):
                self._on_reply(core, message)
            elif isinstance(message, messages.CoreFailed):
                core.note_failure(message.message)
                self._died(core, core.dead or "")
            elif message is not None:
                frames.drop(f"{type(message).__name__}, which a ready core never sends")
            if handled >= BURST_DELTAS:
                handled = 0
                await asyncio.sleep(0)

    def _reader_ended(self, core: CoreProcess, reader: asyncio.Task[None]) -> None:
        """The reader of a core stopped: its requests fail and its health is dead, with the reason."""
        if reader.cancelled() or self.closing:
            return
        error = reader.exception()
        if isinstance(error, zmq.ZMQError) and error.errno in STOPPED:
            return
        logger.error("The reader of messages from %s failed", core.name, exc_info=error)
        core.note_failure(f"the frontend cannot read its messages: {type(error).__name__}: {error}")
        self._died(core, core.dead or "")
        core.kill("the frontend no longer reads its messages")

    def _on_step_output(
        self, endpoints: list[SchedulerEndpoint], message: messages.StepOutput, frames: FrameReader[messages.FromCore]
    ) -> None:
        if not 0 <= message.group < len(endpoints):
            frames.drop(f"a step of group {message.group}; this core has {len(endpoints)}")
            return
        endpoint = endpoints[message.group]
        if endpoint.lost:
            return  # sent before the loss: its requests have already migrated
        inboxes = self._inboxes
        number = next(number for number, own in enumerate(self._endpoints) if own is endpoint)
        for delta in message.deltas:
            inbox = inboxes.get(delta.rid)
            if inbox is None or inbox.endpoint != number:
                frames.drop(f"delta of request {delta.rid!r:.100}, which was not sent to group {message.group}")
                continue
            inbox.take(delta)
            if inbox.ended and inbox.left:
                self._forget(inbox)

    def _on_reply(self, core: CoreProcess, message: messages.Reply) -> None:
        endpoint, future = self._calls.get(message.id, (None, None))
        if endpoint is None or future is None or endpoint.core is not core or future.done():
            return  # the caller was cancelled
        if message.ok:
            future.set_result(message.value)
        else:
            future.set_exception(CallError(str(message.value)))

    def _on_groups_lost(self, core: CoreProcess, message: messages.GroupsLost) -> None:
        """Groups of a core are lost: their requests migrate to the others."""
        lost = [endpoint for endpoint in self._endpoints if endpoint.core is core and endpoint.group in message.groups]
        for endpoint in lost:
            endpoint.lost = message.message
        for inbox in list(self._inboxes.values()):
            if self._endpoints[inbox.endpoint] in lost:
                if inbox.left:
                    self._forget(inbox)
                elif not inbox.ended:
                    self._resume(inbox, message.message)
        for endpoint, future in self._calls.values():
            if endpoint in lost and not future.done():
                future.set_exception(self._loss(self._endpoints.index(endpoint), message.message))

    def _resume(self, inbox: Inbox, cause: str) -> None:
        request = inbox.request
        if inbox.abort_reason is not None:
            finish = FinishReason("abort", message=inbox.abort_reason).to_dict()
            inbox.put(
                RequestDelta(
                    request.rid, [], finish, cached_tokens=inbox.cached_tokens, retractions=request.num_migrations
                )
            )
            return
        if request.num_migrations == MAX_MIGRATIONS:
            inbox.fail(EngineDeadError(f"{cause}; this request has lost {MAX_MIGRATIONS + 1} schedulers"))
            return
        try:
            number = self._choose(msgspec.structs.replace(request, routed_dp_rank=None), inbox.prompt)
        except EngineDeadError:  # no scheduler is left
            inbox.fail(EngineDeadError(cause))
            return
        request.routed_dp_rank, request.generated_ids = number, list(inbox.generated_ids)
        request.num_migrations += 1
        inbox.leave()
        inbox.enter(number, self._router.loads[number], self._router.sent(number, inbox.prompt))
        self._endpoints[number].add(request)

    def _died(self, core: CoreProcess, cause: str) -> None:
        for inbox in list(self._inboxes.values()):
            if self._endpoints[inbox.endpoint].core is core:
                if inbox.left:
                    self._forget(inbox)
                else:
                    inbox.fail(self._loss(inbox.endpoint, cause))
        for endpoint, future in self._calls.values():
            if endpoint.core is core and not future.done():
                future.set_exception(self._loss(self._endpoints.index(endpoint), cause))

    def _loss(self, number: int, cause: str, fix: str = "send the request again") -> EngineDeadError:
        """The error of a request to a lost scheduler. `fix`: what its client can do while others serve."""
        others = [str(rank) for rank, endpoint in enumerate(self._endpoints) if not endpoint.dead]
        if not others:
            return EngineDeadError(cause)
        serve = f"rank {others[0]} serves" if len(others) == 1 else f"ranks {', '.join(others)} serve"
        return RankLostError(f"data-parallel rank {number} was lost: {cause}; {serve} on, {fix}")

    def _cause(self) -> str:
        return "; ".join(dict.fromkeys(endpoint.dead for endpoint in self._endpoints if endpoint.dead))
