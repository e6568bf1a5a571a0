"""Between a client's request and the engine: checks and tokenizes it, runs its sequences, gathers the answers.

The server and the offline engine use the same object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from moe_engine.engine.client_api import EngineClient
from moe_engine.engine.generate_input import GenerateInput
from moe_engine.engine.generation import Generation, Piece
from moe_engine.engine.prepare import BURST, FrontendSettings, Job, Preparer, ReadRequest, duplicate_rid
from moe_engine.errors import EngineDeadError, GenerationError, InputError
from moe_engine.tokenizer.tokenizer import Tokenizer

__all__ = ["Frontend", "FrontendSettings", "GenerateInput", "Job", "Observer"]

SHARED_PROMPT_TOKENS = 32
"""With n > 1, prompts from this length on are computed once: the others wait for the first one's first token."""


class Observer(Protocol):
    """Told of what happens to each sequence; the metrics."""

    def received(self, generation: Generation) -> None: ...
    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None: ...
    def finished(self, generation: Generation) -> None: ...


class Frontend:
    """Turns requests into answers.

    Args:
        client: the running engine.
        tokenizer: None with `--skip-tokenizer-init`: ids in, ids out.
        settings: the operator's choices.
        observer: told of each sequence's life, or None.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        settings: FrontendSettings | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings or FrontendSettings()
        self.observer = observer
        self._live: dict[str, Generation] = {}
        self._preparer = Preparer(client.info, tokenizer, self.settings)

    @property
    def num_live(self) -> int:
        """Sequences in the engine's hands now."""
        return len(self._live)

    # -- whole requests

    async def generate(self, inp: GenerateInput) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer, or the list of answers of a batch or of n > 1, as SGLang shapes them.

        Raises:
            InputError: the request is wrong, or the engine refused it.
            GenerationError: the engine could not compute it.
            EngineDeadError: the engine is gone.
        """
        job = await self.prepare(inp)
        await self.collect(job)
        outputs = [generation.output() for generation in job.generations]
        return outputs if job.is_list else outputs[0]

    async def stream(self, inp: GenerateInput) -> AsyncGenerator[dict[str, Any]]:
        """The answers as they grow, as SGLang shapes them. Closing the iterator aborts what still runs."""
        inp.stream = True
        job = await self.prepare(inp)
        async with aclosing(self.chunks(job)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chunks(self, job: Job) -> AsyncGenerator[dict[str, Any]]:
        """`stream` of a prepared request."""
        incremental = self.settings.incremental_streaming_output
        begun: set[int] = set()
        async with aclosing(self.pieces(job)) as pieces:
            async for piece in pieces:
                generation = piece.generation
                if incremental:
                    chunk = generation.output_of(piece, with_prompt=generation.index not in begun)
                    begun.add(generation.index)
                else:
                    chunk = generation.output()
                if job.is_list:
                    chunk["index"] = generation.index
                yield chunk

    async def collect(self, job: Job) -> list[Generation]:
        """Runs a prepared request to its end."""
        async with aclosing(self.pieces(job)) as pieces:
            async for _ in pieces:
                pass
        return job.generations

    async def pieces(self, job: Job) -> AsyncGenerator[Piece]:
        """The new parts of all sequences of a request, in the order they come."""
        gates = _gates(job.generations)
        if len(job.generations) == 1:
            async with aclosing(self._run(job.generations[0], None)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        remaining = len(job.generations)
        try:
            for g in job.generations:
                tasks.append(asyncio.create_task(self._pump(g, gates[g.prompt_index], queue)))
                if len(tasks) % BURST == 0:
                    await asyncio.sleep(0)
            while remaining:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    remaining -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self, rid: str = "", *, all: bool = False, reason: str = "Aborted") -> None:
        """Ends every request whose id starts with `rid`, or all of them."""
        if all or rid:
            self.client.abort(rid, all=all, reason=reason)

    async def prepare(self, inp: GenerateInput) -> Job:
        """Checks a request, tokenizes it and settles its limits, for `collect`, `pieces` or `chunks`.

        Raises:
            InputError: naming the field at fault and how to mend it.
        """
        return await self._preparer.prepare(inp, self._live)

    def read(self, inp: GenerateInput) -> ReadRequest:
        """The part of `prepare` whose work grows with the request's size; any thread may do it. Raises InputError."""
        return self._preparer.read(inp)

    async def begin(self, read: ReadRequest) -> Job:
        """The rest of `prepare`. Raises InputError: a request id is in use."""
        return await self._preparer.begin(read, self._live)

    # -- one sequence

    async def _pump(self, generation: Generation, gate: _Gate | None, queue: asyncio.Queue[Any]) -> None:
        try:
            async with aclosing(self._run(generation, gate)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as exc:
            queue.put_nowait(exc)

    async def _run(self, generation: Generation, gate: _Gate | None) -> AsyncGenerator[Piece]:
        if gate is not None and gate.leader is not generation:
            await gate.open.wait()
        self._enter(generation)
        try:
            async with aclosing(_closable(self.client.stream(generation.request))) as deltas:
                async for delta in deltas:
                    before, last = len(generation.output_ids), generation.last_token_at
                    generation.feed(delta)
                    if gate is not None and (generation.output_ids or generation.finish):
                        gate.open.set()
                    if generation.observed and self.observer is not None and len(generation.output_ids) > before:
                        self._observe(generation, len(generation.output_ids) - before, last)
                    _raise_if_refused(generation)
                    if (piece := generation.take_piece()) is not None:
                        yield piece
                    if generation.finish is not None:
                        break
            if generation.finish is None:
                raise EngineDeadError(f"the engine stopped answering request {generation.rid!r}")
        finally:
            if gate is not None and gate.leader is generation:
                gate.open.set()
            self._leave(generation)

    def _enter(self, generation: Generation) -> None:
        if generation.rid in self._live:
            raise duplicate_rid(generation.rid)
        self._live[generation.rid] = generation
        if generation.observed and self.observer is not None:
            self.observer.received(generation)

    def _leave(self, generation: Generation) -> None:
        del self._live[generation.rid]
        generation.finished_at = generation.finished_at or time.monotonic()
        if generation.observed and self.observer is not None:
            self.observer.finished(generation)

    def _observe(self, generation: Generation, count: int, last: float | None) -> None:
        assert self.observer is not None and generation.last_token_at is not None
        since = generation.received_at if last is None else last
        self.observer.tokens(generation, count, generation.last_token_at - since, first=last is None)


class _Gate:
    """Holds back the copies of a prompt until the first of them has computed it."""

    def __init__(self, leader: Generation) -> None:
        self.leader = leader
        self.open = asyncio.Event()


def _gates(generations: list[Generation]) -> dict[int, _Gate | None]:
    gates: dict[int, _Gate | None] = {}
    for g in generations:
        if g.prompt_index not in gates:
            shared = g.sampling.n > 1 and len(g.prompt_ids) >= SHARED_PROMPT_TOKENS
            gates[g.prompt_index] = _Gate(g) if shared else None
    return gates


def _closable(iterator: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    return iterator  # type: ignore[return-value]  # EngineClient promises that it can be closed


def _raise_if_refused(generation: Generation) -> None:
    """An abort with an HTTP status is an error of the request or of the engine, not an answer."""
    finish = generation.finish
    if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
        message = finish.get("message") or "the engine refused the request"
        if finish["status_code"] == 500:
            raise GenerationError(message)
        raise InputError(message, status=finish["status_code"])
