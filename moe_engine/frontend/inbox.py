"""Inbox of one request: deltas that have arrived from its scheduler and were not read yet."""

from __future__ import annotations

import asyncio
from collections import deque

from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.errors import EngineDeadError
from moe_engine.frontend.client_api import DirectReader
from moe_engine.frontend.dp_routing import Load
from moe_engine.frontend.known_prefixes import PromptBlocks
from moe_engine.types import PackedLogprobs

MAX_ENTRIES = 256
"""Max tokens (with log-probabilities: numbers) that one `get` returns. Bounds the work on one request before other
requests and health probes run."""


class Inbox:
    """Merges deltas while the reader is slow, without further work on them; returns them in bounded parts.

    It exists until the scheduler has ended the request, even if the reader has left: until then the request counts as
    load of the scheduler, and its late deltas are recognized and dropped.

    Attributes:
        generated_ids: tokens received so far; with the prompt, the state for a migration to another scheduler.
        prompt: blocks of the prompt, for the choice of a scheduler; None if the choice does not depend on them.
        abort_reason: set by an abort: if the scheduler is lost before it ends the request, there is no migration.
        left: the reader has left.
        ended: the scheduler has ended the request.
    """

    def __init__(
        self,
        request: AddRequest,
        endpoint: int,
        load: Load,
        direct: DirectReader | None = None,
        *,
        prompt: PromptBlocks | None = None,
        uncomputed: int = 0,
    ) -> None:
        self.request, self.prompt = request, prompt
        self.generated_ids: list[int] = []
        self.cached_tokens = 0
        self.abort_reason: str | None = None
        self.left = self.ended = False
        self._limit = max(1, MAX_ENTRIES // (1 + request.top_logprobs + len(request.token_ids_logprob)))
        self._parts: deque[_Part] = deque()
        self._error: EngineDeadError | None = None
        self._event = asyncio.Event()
        self._direct = direct
        self._is_awaited = False
        """The reader has read everything and waits: a plain delta may go to `direct`."""
        self._num_tokens = len(request.prompt_ids)
        self.enter(endpoint, load, uncomputed)

    def enter(self, endpoint: int, load: Load, uncomputed: int = 0) -> None:
        """Assigns the request to a scheduler and adds it to its load; `uncomputed`: prompt tokens without known KV."""
        self.endpoint, self._load, self._uncomputed = endpoint, load, uncomputed
        load.num_requests += 1
        load.num_tokens += self._num_tokens
        load.num_uncomputed += uncomputed

    def leave(self) -> None:
        """Removes the request from its scheduler's load."""
        self._load.num_requests -= 1
        self._load.num_tokens -= self._num_tokens
        self._computed()

    def _computed(self) -> None:
        self._load.num_uncomputed -= self._uncomputed
        self._uncomputed = 0

    def take(self, delta: RequestDelta) -> None:
        """Adds a delta from the scheduler."""
        ids = delta.token_ids
        self._num_tokens += len(ids)
        self._load.num_tokens += len(ids)
        if ids and self._uncomputed:
            self._computed()
        direct = self._direct if self._is_awaited and not self._parts else None
        if direct is not None and delta.cached_tokens == self.cached_tokens and is_plain(delta):
            self.generated_ids += ids
            if not direct(delta):
                self._queue(delta)
            return
        if self.request.generated_ids:  # migrated: keep the first scheduler's count
            delta.cached_tokens = self.cached_tokens
        self.cached_tokens = delta.cached_tokens
        self.put(delta)

    def put(self, delta: RequestDelta) -> None:
        """Adds a delta for the reader."""
        self.ended = self.ended or delta.finish is not None
        if self.left:
            return
        self.generated_ids += delta.token_ids
        if delta.prompt_logprobs is not None:
            self._parts.extend(_prompt_parts(delta, self._limit))
        self._queue(delta)

    def _queue(self, delta: RequestDelta) -> None:
        """For the reader's next `get`."""
        if not (self._parts and self._parts[-1].take(delta, self._limit)):
            self._parts.append(_Part(delta))
        self._event.set()

    def fail(self, error: EngineDeadError) -> None:
        """The reader gets the queued deltas, then the error."""
        self._error = self._error or error
        self._event.set()

    async def get(self) -> RequestDelta:
        """The next part; waits for one. Yields to other tasks between two parts."""
        if self._parts:
            await asyncio.sleep(0)
        self._is_awaited = True
        try:
            await self._event.wait()
        finally:
            self._is_awaited = False
        if not self._parts:
            raise self._error or EngineDeadError("the engine is dead")
        part = self._parts.popleft()
        if not self._parts and self._error is None:
            self._event.clear()
        return part.merged()


def is_plain(delta: RequestDelta) -> bool:
    """Whether it has tokens and nothing else."""
    return delta.finish is None and delta.logprobs is None and delta.prompt_logprobs is None and delta.vector is None


class _Part:
    """Deltas merged into one."""

    __slots__ = ("_delta", "_logprobs")

    def __init__(self, delta: RequestDelta) -> None:
        self._delta = delta
        self._logprobs = [] if delta.logprobs is None else [delta.logprobs]

    def take(self, new: RequestDelta, limit: int) -> bool:
        """Merges `new` unless the part would exceed `limit` tokens."""
        delta = self._delta
        if delta.prompt_logprobs is not None or len(delta.token_ids) + len(new.token_ids) > limit:
            return False
        delta.token_ids.extend(new.token_ids)
        if new.logprobs is not None:
            self._logprobs.append(new.logprobs)
        delta.finish = new.finish
        delta.cached_tokens, delta.retractions, delta.queue_time = new.cached_tokens, new.retractions, new.queue_time
        delta.speculation, delta.tiers = new.speculation, new.tiers
        if new.vector is not None:
            delta.vector = new.vector if delta.vector is None else delta.vector + new.vector
        return True

    def merged(self) -> RequestDelta:
        if self._logprobs:
            self._delta.logprobs = PackedLogprobs.join(self._logprobs)
        return self._delta


def _prompt_parts(delta: RequestDelta, limit: int) -> list[_Part]:
    """Moves the prompt's log-probabilities out of a delta, into parts."""
    block, delta.prompt_logprobs = delta.prompt_logprobs, None
    if block is None:
        return []
    count = block.num_tokens
    return [
        _Part(
            RequestDelta(
                delta.rid,
                [],
                prompt_logprobs=block.part(start, min(start + limit, count)),
                cached_tokens=delta.cached_tokens,
                retractions=delta.retractions,
                queue_time=delta.queue_time,
            )
        )
        for start in range(0, count, limit)
    ]
