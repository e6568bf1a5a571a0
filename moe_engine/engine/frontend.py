"""Between a client's request and the engine: checks and tokenizes it, runs its sequences, gathers the answers.

The server and the offline engine use the same object. All refusals happen in `prepare`, before the engine hears of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from moe_engine.engine.client_api import EngineClient
from moe_engine.engine.generate_input import GenerateInput, Prompt, check_token_ids, split_prompts
from moe_engine.engine.generation import Generation, Piece
from moe_engine.engine.messages import AddRequest
from moe_engine.errors import EngineDeadError, InputError
from moe_engine.tokenizer.tokenizer import Tokenizer

THREAD_CHARS = 4096
"""Longer texts are tokenized beside the event loop, so that they do not hold up other requests."""

SHARED_PROMPT_TOKENS = 32
"""With n > 1, prompts from this length on are computed once: the others wait for the first one's first token."""


@dataclass(frozen=True)
class FrontendSettings:
    """What the operator chose for all requests."""

    stream_interval: int = 1
    incremental_streaming_output: bool = False
    allow_auto_truncate: bool = False
    preferred_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of /generate's sampling_params (`--preferred-sampling-params`)."""


class Observer(Protocol):
    """Told of what happens to each sequence; the metrics."""

    def received(self, generation: Generation) -> None: ...
    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None: ...
    def finished(self, generation: Generation) -> None: ...


@dataclass(slots=True)
class Job:
    """A checked request, not yet begun. `is_list`: the answer is a list (a batch, or n > 1)."""

    generations: list[Generation]
    is_list: bool
    stream: bool


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

    @property
    def num_live(self) -> int:
        """Sequences in the engine's hands now."""
        return len(self._live)

    # -- whole requests

    async def generate(self, inp: GenerateInput) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer, or the list of answers of a batch or of n > 1, as SGLang shapes them.

        Raises:
            InputError: the request is wrong, or the engine refused it.
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
        tasks = [asyncio.create_task(self._pump(g, gates[g.prompt_index], queue)) for g in job.generations]
        remaining = len(tasks)
        try:
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
                    if self.observer is not None and len(generation.output_ids) > before:
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
            raise _duplicate(generation.rid)
        self._live[generation.rid] = generation
        if self.observer is not None:
            self.observer.received(generation)

    def _leave(self, generation: Generation) -> None:
        del self._live[generation.rid]
        generation.finished_at = generation.finished_at or time.monotonic()
        if self.observer is not None:
            self.observer.finished(generation)

    def _observe(self, generation: Generation, count: int, last: float | None) -> None:
        assert self.observer is not None and generation.last_token_at is not None
        since = generation.received_at if last is None else last
        self.observer.tokens(generation, count, generation.last_token_at - since, first=last is None)

    # -- before it begins

    async def prepare(self, inp: GenerateInput) -> Job:
        """Checks a request, tokenizes it and settles its limits.

        Raises:
            InputError: naming the field at fault and how to mend it.
        """
        prompts, is_batch = split_prompts(inp, self.settings.preferred_sampling_params)
        await self._tokenize(inp, prompts)
        for i, prompt in enumerate(prompts):
            self._check(prompt, f"{inp.ids_field}[{i}]" if is_batch else inp.ids_field)
        generations: list[Generation] = []
        for prompt_index, prompt in enumerate(prompts):
            for copy in range(prompt.sampling.n):
                generations.append(self._generation(inp, prompt, prompt_index, copy, len(generations)))
        is_list = is_batch or len(generations) > 1
        return Job(generations, is_list, inp.stream)

    async def _tokenize(self, inp: GenerateInput, prompts: list[Prompt]) -> None:
        texts = [p.text for p in prompts if p.text is not None]
        if not texts:
            return
        if self.tokenizer is None:
            raise InputError(
                f"{inp.text_field}: this server runs with --skip-tokenizer-init; send input_ids", field=inp.text_field
            )
        if not self.settings.allow_auto_truncate:
            limit = self.client.info.context_len
            for text in texts:
                if (least := len(text) // self.tokenizer.max_token_chars) >= limit:
                    raise _too_long(f"at least {least}", limit)
        if sum(map(len, texts)) > THREAD_CHARS:
            batch = await asyncio.to_thread(self.tokenizer.encode_batch, texts, inp.add_special_tokens)
        else:
            batch = self.tokenizer.encode_batch(texts, inp.add_special_tokens)
        for prompt, ids in zip(prompts, batch, strict=True):
            if not ids:
                raise InputError(f"{inp.text_field}: the prompt has no tokens; send some text", field=inp.text_field)
            prompt.ids = ids

    def _check(self, prompt: Prompt, where: str) -> None:
        info = self.client.info
        check_token_ids(prompt.ids, info.vocab_size, where)
        prompt.sampling.check_vocab(info.vocab_size)
        if prompt.sampling.stop and self.tokenizer is None:
            raise InputError(
                "sampling_params.stop: needs a tokenizer, and this server runs with --skip-tokenizer-init; "
                "use stop_token_ids",
                field="sampling_params.stop",
            )
        if prompt.logprobs is not None:
            check_token_ids(prompt.logprobs.token_ids or (0,), info.vocab_size, "token_ids_logprob")
        if not prompt.rid_is_ours and (prompt.rid in self._live or f"{prompt.rid}_0" in self._live):
            raise _duplicate(prompt.rid)
        self._fit(prompt)
        if prompt.logprobs is not None and (prompt.logprobs.start or 0) > len(prompt.ids):
            raise InputError(
                f"logprob_start_len: {prompt.logprobs.start} is beyond the prompt ({len(prompt.ids)} tokens)",
                field="logprob_start_len",
            )

    def _fit(self, prompt: Prompt) -> None:
        """Settles `max_new_tokens`, cutting prompt and answer with --allow-auto-truncate, refusing them without."""
        info = self.client.info
        truncate = self.settings.allow_auto_truncate
        room = min(info.context_len, info.max_total_num_tokens // info.page_size * info.page_size)
        longest = max(1, min(info.max_req_input_len, room - 1))
        if truncate and len(prompt.ids) > longest:
            prompt.ids = prompt.ids[:longest]
        count, wanted = len(prompt.ids), prompt.sampling.max_new_tokens
        if count >= info.context_len:
            raise _too_long(str(count), info.context_len)
        if count > longest:
            raise InputError(
                f"Input length ({count} tokens) exceeds the maximum allowed length ({longest} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            )
        prompt.max_new_tokens = min(wanted, room - count) if wanted is not None and truncate else wanted or 0
        if wanted is None:
            prompt.max_new_tokens = room - count
        if count + prompt.max_new_tokens > info.context_len:
            raise InputError(
                f"Requested token count exceeds the model's maximum context length of {info.context_len} tokens. You "
                f"requested a total of {count + prompt.max_new_tokens} tokens: {count} tokens from the input messages "
                f"and {prompt.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit.",
                field="max_new_tokens",
            )
        if count + prompt.max_new_tokens > room:
            raise InputError(
                f"The input ({count} tokens) and max_new_tokens ({prompt.max_new_tokens}) together exceed the KV cache "
                f"({room} tokens): the request could never finish. Lower max_new_tokens to {room - count}, or start "
                "the server with a higher --mem-fraction-static or --max-total-tokens.",
                field="max_new_tokens",
            )

    def _generation(self, inp: GenerateInput, prompt: Prompt, prompt_index: int, copy: int, index: int) -> Generation:
        sampling, options = prompt.sampling, prompt.logprobs
        seed = sampling.sampling_seed
        request = AddRequest(
            rid=prompt.rid if sampling.n == 1 else f"{prompt.rid}_{copy}",
            prompt_ids=prompt.ids,
            sampling=msgspec.to_builtins(sampling),
            max_new_tokens=max(1, prompt.max_new_tokens),
            seed=None if seed is None else _seed_of_copy(seed, copy),
            priority=inp.priority,
            extra_key=prompt.extra_key,
            arrival=time.monotonic(),
        )
        if options is not None:
            request.return_logprob = True
            request.logprob_start = options.start
            request.top_logprobs = options.top
            request.token_ids_logprob = list(options.token_ids)
        return Generation(
            request,
            sampling,
            index=index,
            prompt_index=prompt_index,
            logprobs=options,
            tokenizer=self.tokenizer,
            keep_special=inp.keep_special,
            live=inp.stream,
            interval=sampling.stream_interval or self.settings.stream_interval,
            prompt_text=prompt.text,
            no_output=prompt.max_new_tokens == 0,
        )


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
        raise InputError(finish.get("message") or "the engine refused the request", status=finish["status_code"])


def _seed_of_copy(seed: int, copy: int) -> int:
    """Copies of a prompt differ though the client gave one seed; the first has exactly that one."""
    return seed + copy if seed + copy < 2**64 else seed + copy - 2**64


def _duplicate(rid: str) -> InputError:
    return InputError(f"rid: a request with id {rid!r} is still running; use another id", field="rid")


def _too_long(count: str, limit: int) -> InputError:
    return InputError(f"The input ({count} tokens) is longer than the model's context length ({limit} tokens).")
