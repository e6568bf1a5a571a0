"""What the front end holds of one request that is at a scheduler: what has arrived for it and was not read yet."""

from __future__ import annotations

import asyncio

from moe_engine.engine.messages import AddRequest, RequestDelta
from moe_engine.engine.routing import Load
from moe_engine.errors import EngineDeadError


class Inbox:
    """Pieces merge while the reader is slow.

    It lives until the scheduler has ended the request, though its reader may have left before: until then the request
    is part of the scheduler's load, and what still arrives for it is known and dropped.

    Attributes:
        said: tokens that have come: with the prompt, all that another scheduler must know to continue.
        abort_reason: set when the request is to end: if its scheduler is lost before, no other one continues it.
        left: the reader has left.
        ended: the scheduler has ended the request.
    """

    def __init__(self, request: AddRequest, lane: int, load: Load) -> None:
        self.request = request
        self.said: list[int] = []
        self.cached_tokens = 0
        self.abort_reason: str | None = None
        self.left = self.ended = False
        self._delta: RequestDelta | None = None
        self._error: str | None = None
        self._event = asyncio.Event()
        self._num_tokens = len(request.prompt_ids)
        self.enter(lane, load)

    def enter(self, lane: int, load: Load) -> None:
        """The request is now at this scheduler."""
        self.lane, self._load = lane, load
        load.num_requests += 1
        load.num_tokens += self._num_tokens

    def leave(self) -> None:
        """The request is no longer at its scheduler."""
        self._load.num_requests -= 1
        self._load.num_tokens -= self._num_tokens

    def take(self, delta: RequestDelta) -> None:
        """News from the scheduler."""
        count = len(delta.token_ids)
        self._num_tokens += count
        self._load.num_tokens += count
        if self.request.said:  # what the first scheduler reported stays
            delta.cached_tokens = self.cached_tokens
        self.cached_tokens = delta.cached_tokens
        self.put(delta)

    def put(self, delta: RequestDelta) -> None:
        """News for the reader."""
        self.ended = self.ended or delta.finish is not None
        if self.left:
            return
        self.said += delta.token_ids
        if self._delta is None:
            self._delta = delta
        else:
            _merge(self._delta, delta)
        self._event.set()

    def fail(self, error: str) -> None:
        """The reader gets an `EngineDeadError` after what has arrived."""
        self._error = self._error or error
        self._event.set()

    async def get(self) -> RequestDelta:
        """What has arrived since the last call; waits for something."""
        await self._event.wait()
        if self._delta is None:
            raise EngineDeadError(self._error or "the engine is gone")
        delta, self._delta = self._delta, None
        if self._error is None:
            self._event.clear()
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
