"""Text front end: checks and tokenizes requests, runs their sequences on the engine, collects the outputs.

Shared by the server and the offline engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_engine.core.messages import RequestDelta
from moe_engine.errors import EngineDeadError, GenerationError, InputError
from moe_engine.frontend.client_api import EngineClient
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.frontend.prepare import BURST, FormatOf, FrontendSettings, Job, Preparer, ReadRequest
from moe_engine.frontend.served_adapters import ServedAdapters
from moe_engine.frontend.served_weights import ServedWeights
from moe_engine.frontend.sessions import Sessions
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import FinishReason

__all__ = ["Frontend", "FrontendSettings", "GenerateInput", "Job", "Observer"]

SHARED_PROMPT_TOKENS = 32
"""With n > 1, prompts of at least this length are computed once: other copies wait for the first one's first token."""


class Observer(Protocol):
    """Receives the events of each sequence (metrics, request log)."""

    def received(self, generation: Generation) -> None: ...
    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None: ...
    def finished(self, generation: Generation) -> None: ...


def released_message(parts: Collection[str]) -> str:
    return f"the memory of {' and '.join(sorted(parts))} is released; call /resume_memory_occupation first"


class Frontend:
    """Turns requests into outputs.

    Args:
        client: the running engine.
        tokenizer: None with `--skip-tokenizer-init`: ids in, ids out.
        settings: the operator's choices.
        observer: receives each sequence's events, or None.
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
        self.weights = ServedWeights(client.info.model_path, self.settings.weight_version)
        self.paused = False
        """See `frontend.pausing`."""
        self.released: set[str] = set()
        """Parts whose memory is given back, see `frontend.memory_release`. No request begins meanwhile."""
        self._live: dict[str, _Sequence] = {}
        """By the client's id, from the start of the request until the sequence has ended here."""
        self.adapters = ServedAdapters(client, self.settings.lora)
        self.sessions = Sessions(None if tokenizer is None else tokenizer.bos_id)
        self._preparer = Preparer(client.info, tokenizer, self.settings, self.adapters.choose, self.sessions)

    # -- whole requests

    async def generate(self, inp: GenerateInput) -> dict[str, Any] | list[dict[str, Any]]:
        """The output in SGLang's shape; a list of outputs for a batch or n > 1.

        Raises:
            InputError: the request is invalid, or the engine refused it.
            GenerationError: the engine could not compute it.
            EngineDeadError: the engine is dead.
        """
        job = await self.prepare(inp)
        await self.collect(job)
        outputs = [generation.output() for generation in job.generations]
        return outputs if job.is_list else outputs[0]

    async def stream(self, inp: GenerateInput) -> AsyncGenerator[dict[str, Any]]:
        """Streams the outputs in SGLang's shape. Closing the iterator aborts the sequences that still run."""
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
        """New pieces of all sequences of a request, in order of arrival.

        Raises:
            InputError: one of its ids belongs to a running request.
        """
        with self.adapters.hold(generation.lora for generation in job.generations) as adapters:
            for generation in job.generations:
                if (adapter := adapters.get(generation.lora)) is not None:
                    generation.request.lora_id, generation.request.lora_pinned = adapter.id, adapter.pinned
                    generation.request.lora_key = adapter.key
            async with aclosing(self._pieces(job)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self, job: Job) -> AsyncGenerator[Piece]:
        sequences = self._enter(job)
        held = await self._hold_weights(job, sequences)
        try:
            parts = self._run(sequences[0]) if len(sequences) == 1 else self._run_all(sequences)
            async with aclosing(parts) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if held:
                self.weights.release()
            for sequence in sequences:
                self._leave(sequence)

    async def _hold_weights(self, job: Job, sequences: list[_Sequence]) -> bool:
        """Waits while the weights are replaced: all sequences of a job have answers of the same ones. False: all
        sequences were aborted meanwhile, and none will be sent."""
        try:
            held = await self.weights.hold(lambda: all(sequence.aborted is not None for sequence in sequences))
        except BaseException:  # the client disconnected
            for sequence in sequences:
                self._leave(sequence)
            raise
        for generation in job.generations:
            generation.weight_version = self.weights.version
        return held

    async def _run_all(self, sequences: list[_Sequence]) -> AsyncGenerator[Piece]:
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(len(sequences))
        tasks: list[asyncio.Task[None]] = []
        remaining = len(sequences)
        try:
            for sequence in sequences:
                tasks.append(asyncio.create_task(self._pump(sequence, queue)))
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

    def weights_changed(self) -> None:
        """An update replaced the weights of paused requests: their version is that of their last tokens."""
        for sequence in self._live.values():
            sequence.generation.weight_version = self.weights.version

    @property
    def num_live(self) -> int:
        """Sequences that have begun and not ended."""
        return len(self._live)

    def abort(self, rid: str = "", *, all: bool = False, reason: str = "Aborted") -> None:
        """Aborts every request whose client id starts with `rid`, or all."""
        self._abort([s for s in self._live.values() if all or (rid and s.generation.rid.startswith(rid))], reason)

    def _abort(self, chosen: list[_Sequence], reason: str) -> None:
        for sequence in chosen:
            sequence.aborted = sequence.aborted or reason
            sequence.go.set()
        self.weights.recheck()
        self.client.abort([s.generation.request.rid for s in chosen if s.is_sent], reason)

    async def prepare(self, inp: GenerateInput) -> Job:
        """Checks a request, tokenizes it and resolves its limits, for `collect`, `pieces` or `chunks`.

        Raises:
            InputError: names the field at fault and the fix.
        """
        return await self._preparer.prepare(inp)

    def read(self, inp: GenerateInput) -> ReadRequest:
        """The part of `prepare` that costs time proportional to the request's size; thread-safe. Raises InputError."""
        return self._preparer.read(inp)

    async def begin(self, read: ReadRequest, logprob_format: FormatOf | None = None) -> Job:
        """The rest of `prepare`. `logprob_format`: see `Preparer.begin`."""
        return await self._preparer.begin(read, logprob_format)

    def close(self) -> None:
        """Ends helper processes. Safe to call twice."""
        self._preparer.grammar_checks.close()

    # -- one sequence

    async def _pump(self, sequence: _Sequence, queue: asyncio.Queue[Any]) -> None:
        """Waits while the queue is full; deltas that arrive meanwhile are merged before any work is done on them."""
        try:
            async with aclosing(self._run(sequence)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    async def _run(self, sequence: _Sequence) -> AsyncGenerator[Piece]:
        await sequence.go.wait()
        generation = sequence.generation
        observer = self.observer if generation.observed else None
        if observer is not None:
            observer.received(generation)
        try:
            async with aclosing(self._deltas(sequence)) as deltas:
                async for delta in deltas:
                    before, last = len(generation.output_ids), generation.last_token_at
                    generation.feed(delta)
                    if generation.output_ids or generation.finish:
                        sequence.let_followers_go()
                    if observer is not None and len(generation.output_ids) > before:
                        _observe(observer, generation, len(generation.output_ids) - before, last)
                    _raise_if_refused(generation)
                    if generation.finish is not None:
                        break
                    if (piece := generation.take_piece()) is not None:
                        yield piece
            if generation.finish is None:
                raise EngineDeadError(f"the engine stopped answering request {generation.rid!r}")
            self._leave(sequence)  # before the client sees the end: the id is reusable from then on
            if (piece := generation.take_piece()) is not None:
                yield piece
        finally:
            sequence.let_followers_go()
            self._leave(sequence)
            generation.finished_at = generation.finished_at or time.monotonic()
            if observer is not None:
                observer.finished(generation)

    def _deltas(self, sequence: _Sequence) -> AsyncGenerator[RequestDelta]:
        request = sequence.generation.request
        if sequence.aborted is not None:  # before it was sent to the engine
            return _only(RequestDelta(request.rid, [], FinishReason("abort", message=sequence.aborted).to_dict()))
        sequence.is_sent = True
        return _closable(self.client.stream(request))

    def _enter(self, job: Job) -> list[_Sequence]:
        """The sequences of a job; registers their ids."""
        if self.released:
            raise InputError(released_message(self.released), status=503)
        for generation in job.generations:
            if generation.rid in self._live:
                raise InputError(
                    f"rid: a request with id {generation.rid!r} is still running; use another id", field="rid"
                )
        sequences = _sequences(job.generations)
        self._live.update((sequence.generation.rid, sequence) for sequence in sequences)
        try:
            for generation in job.generations:
                self._enter_session(generation)
        except InputError:
            for sequence in sequences:
                self._leave(sequence)
            raise
        return sequences

    def _enter_session(self, generation: Generation) -> None:
        if generation.session is None:
            return
        rank = generation.session.rank  # of the KV of its earlier turns
        if generation.request.routed_dp_rank is None and rank is not None and self.client.healths()[rank].alive:
            generation.request.routed_dp_rank = rank
        replaced = self.sessions.begin(generation)
        self._abort([self._live[rid] for rid in replaced if rid in self._live], "Replaced by a request of its session")

    def _leave(self, sequence: _Sequence) -> None:
        """Unregisters its id. Safe to call twice."""
        if sequence.generation.turn is not None:
            self.sessions.end(sequence.generation)
        if self._live.get(sequence.generation.rid) is sequence:
            del self._live[sequence.generation.rid]


async def _only(delta: RequestDelta) -> AsyncGenerator[RequestDelta]:
    yield delta


def _observe(observer: Observer, generation: Generation, count: int, last: float | None) -> None:
    assert generation.last_token_at is not None
    since = generation.received_at if last is None else last
    observer.tokens(generation, count, generation.last_token_at - since, first=last is None)


@dataclass(eq=False, slots=True)
class _Sequence:
    """A sequence of a started request.

    `go` is set when it may be sent to the engine, or when it was aborted before. Copies of a long prompt are the
    `followers` of the first copy, which computes the prompt for all.
    """

    generation: Generation
    go: asyncio.Event = field(default_factory=asyncio.Event)
    followers: list[_Sequence] = field(default_factory=list)
    is_sent: bool = False
    aborted: str | None = None
    """Reason of an abort."""

    def let_followers_go(self) -> None:
        for follower in self.followers:
            follower.go.set()
        self.followers = []


def _sequences(generations: list[Generation]) -> list[_Sequence]:
    leaders: dict[int, _Sequence] = {}
    sequences = []
    for g in generations:
        sequence = _Sequence(g)
        leader = leaders.setdefault(g.prompt_index, sequence)
        if leader is not sequence and len(g.prompt_ids) >= SHARED_PROMPT_TOKENS:
            leader.followers.append(sequence)
        else:
            sequence.go.set()
        sequences.append(sequence)
    return sequences


def _closable(iterator: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    return iterator  # type: ignore[return-value]  # EngineClient.stream returns closable iterators


def _raise_if_refused(generation: Generation) -> None:
    """Raises for an abort with an HTTP status, which is an error of the request or of the engine, not an output."""
    finish = generation.finish
    if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
        message = finish.get("message") or "the engine refused the request"
        if finish["status_code"] == 500:
            raise GenerationError(message)
        raise InputError(message, status=finish["status_code"])
