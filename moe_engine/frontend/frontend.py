"""Text frontend: checks and tokenizes requests, runs their sequences on the engine, collects the outputs.

Shared by the server and the offline engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from moe_engine.core.messages import RequestDelta
from moe_engine.errors import EngineDeadError, GenerationError, InputError
from moe_engine.frontend.chunks import Chunks
from moe_engine.frontend.client_api import DirectReader, EngineClient
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.generation import Generation, Piece
from moe_engine.frontend.prepare import BURST, FormatOf, Job, Preparer, ReadRequest
from moe_engine.frontend.sequence import COLLECTED, Observer, PieceSink, Sequence, direct_reader, feed, sequences_of
from moe_engine.frontend.served_adapters import ServedAdapters
from moe_engine.frontend.sessions import Sessions
from moe_engine.frontend.settings import FrontendSettings
from moe_engine.frontend.weights.served_weights import ServedWeights
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import FinishReason

__all__ = ["Frontend", "FrontendSettings", "GenerateInput", "Job", "Observer"]


def released_message(parts: Collection[str]) -> str:
    return f"the memory of {' and '.join(sorted(parts))} is released; call /resume_memory_occupation first"


class Frontend:
    """Turns requests into outputs.

    Args:
        client: the running engine.
        tokenizer: None with `--skip-tokenizer-init`: ids in, ids out.
        settings: the operator's choices.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, settings: FrontendSettings | None = None
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings or FrontendSettings()
        self.observers: tuple[Observer, ...] = ()
        """Receive each sequence's events."""
        self.weights = ServedWeights(client.info.model_path, self.settings.weight_version)
        self.paused = False
        """See `frontend.pausing`."""
        self.released: set[str] = set()
        """Parts whose memory is released, see `frontend.weights.memory_release`. No request begins meanwhile."""
        self._live: dict[str, Sequence] = {}
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
        chunk_of = Chunks(job, self.settings.incremental_streaming_output)
        async with aclosing(self.pieces(job)) as pieces:
            async for piece in pieces:
                yield chunk_of(piece)

    async def collect(self, job: Job) -> list[Generation]:
        """Runs a prepared request to its end."""
        async with aclosing(self.pieces(job, COLLECTED)) as pieces:
            async for _ in pieces:
                pass
        return job.generations

    async def pieces(self, job: Job, sink: PieceSink | None = None) -> AsyncGenerator[Piece]:
        """New pieces of all sequences of a request, in order of arrival.

        Args:
            sink: gets the pieces that it is ready for; the others are yielded. Pieces of one sequence keep their order.

        Raises:
            InputError: one of its ids belongs to a running request.
        """
        with self.adapters.hold(generation.lora for generation in job.generations) as adapters:
            for generation in job.generations:
                if (adapter := adapters.get(generation.lora)) is not None:
                    generation.request.lora_id, generation.request.lora_pinned = adapter.id, adapter.pinned
                    generation.request.lora_key = adapter.key
            async with aclosing(self._pieces(job, sink)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self, job: Job, sink: PieceSink | None) -> AsyncGenerator[Piece]:
        sequences = self._enter(job)
        held = await self._hold_weights(job, sequences)
        try:
            parts = self._run(sequences[0], sink) if len(sequences) == 1 else self._run_all(sequences, sink)
            async with aclosing(parts) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if held:
                self.weights.release()
            for sequence in sequences:
                self._leave(sequence)

    async def _hold_weights(self, job: Job, sequences: list[Sequence]) -> bool:
        """Waits while the weights are replaced: all sequences of a job are answered with the same weights. False: all
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

    async def _run_all(self, sequences: list[Sequence], sink: PieceSink | None) -> AsyncGenerator[Piece]:
        sink = sink if sink is COLLECTED else None  # pieces before it may still be in the queue
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(len(sequences))
        tasks: list[asyncio.Task[None]] = []
        remaining = len(sequences)
        try:
            for sequence in sequences:
                tasks.append(asyncio.create_task(self._pump(sequence, queue, sink)))
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

    def _abort(self, chosen: list[Sequence], reason: str) -> None:
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
        self._preparer.images.close()

    # -- one sequence

    async def _pump(self, sequence: Sequence, queue: asyncio.Queue[Any], sink: PieceSink | None) -> None:
        """Waits while the queue is full; deltas that arrive meanwhile are merged before any work is done on them."""
        try:
            async with aclosing(self._run(sequence, sink)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    async def _run(self, sequence: Sequence, sink: PieceSink | None) -> AsyncGenerator[Piece]:
        await sequence.go.wait()
        generation = sequence.generation
        observers = self.observers if generation.observed else ()
        for observer in observers:
            observer.received(generation)
        try:
            async with aclosing(self._deltas(sequence, direct_reader(sequence, observers, sink))) as deltas:
                async for delta in deltas:
                    if sequence.failed is not None:
                        raise sequence.failed
                    if generation.finish is None:  # else a stop string ended it in the sink
                        feed(sequence, delta, observers)
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
            for observer in observers:
                observer.finished(generation)

    def _deltas(self, sequence: Sequence, direct: DirectReader | None) -> AsyncGenerator[RequestDelta]:
        request = sequence.generation.request
        if sequence.aborted is not None:  # before it was sent to the engine
            return _only(RequestDelta(request.rid, [], FinishReason("abort", message=sequence.aborted).to_dict()))
        sequence.is_sent = True
        return self.client.stream(request, direct)

    def _enter(self, job: Job) -> list[Sequence]:
        """The sequences of a job; registers their ids."""
        if self.released:
            raise InputError(released_message(self.released), status=503)
        for generation in job.generations:
            if generation.rid in self._live:
                raise InputError.at("rid", f"a request with id {generation.rid!r} is still running; use another id")
        sequences = sequences_of(job.generations)
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
        rank = generation.session.rank  # the rank that has the KV of its earlier turns
        if generation.request.routed_dp_rank is None and rank is not None and self.client.healths()[rank].alive:
            generation.request.routed_dp_rank = rank
        replaced = self.sessions.begin(generation)
        self._abort([self._live[rid] for rid in replaced if rid in self._live], "Replaced by a request of its session")

    def _leave(self, sequence: Sequence) -> None:
        """Unregisters its id. Safe to call twice."""
        if sequence.generation.turn is not None:
            self.sessions.end(sequence.generation)
        if self._live.get(sequence.generation.rid) is sequence:
            del self._live[sequence.generation.rid]


async def _only(delta: RequestDelta) -> AsyncGenerator[RequestDelta]:
    yield delta


def _raise_if_refused(generation: Generation) -> None:
    """Raises for an abort with an HTTP status, which is an error of the request or of the engine, not an output."""
    finish = generation.finish
    if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
        message = finish.get("message") or "the engine refused the request"
        if finish["status_code"] == 500:
            raise GenerationError(message)
        raise InputError(message, status=finish["status_code"])
