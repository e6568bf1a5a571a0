"""Client of `/generate`, with the times of an `Answer`: of `bench serving`, and of `moe-engine calibrate`, whose
measurements must contain the same work of the client.

Times are the client's: the first chunk with a token, then the gaps between chunks; a chunk of k tokens counts as k gaps
of 1/k each (the first chunk has no gap), as in bench_serving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moe_engine.errors import MoeEngineError
from moe_engine.tuning import event_stream, phases
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest

REQUEST_TIMEOUT_SECONDS = 6 * 3600
TIERS = ("device", "host", "storage")
"""KV cache tiers, as named in ``cached_tokens_details``."""


@dataclass(frozen=True)
class CallOptions:
    """Options common to all requests of a run."""

    base_url: str
    model: str = "default"
    stream: bool = True
    ignore_eos: bool = True
    return_logprob: bool = False
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    extra_body: dict[str, Any] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = None
    """For backends that do not accept token ids."""
    headers: Mapping[str, str] = field(default_factory=dict)


ReadChunk = Callable[[dict[str, Any], Answer], int]
"""Processes a chunk and returns its number of new tokens."""


class _Clock:
    """Converts token arrivals into TTFT and gaps."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._last = answer.started = time.perf_counter()

    def tokens(self, count: int, now: float) -> None:
        """Records the arrival of `count` tokens."""
        if count <= 0:
            return
        if self._answer.output_len == 0:
            self._answer.ttft = now - self._answer.started
        else:
            self._answer.itl.extend([(now - self._last) / count] * count)
        self._answer.output_len += count
        self._last = now

    def end(self) -> None:
        self._answer.latency = time.perf_counter() - self._answer.started


async def ask(request: BenchRequest, options: CallOptions, path: str, body: dict[str, Any], read: ReadChunk) -> Answer:
    """Sends one request."""
    answer = Answer(prompt_len=request.prompt_len)
    url, headers = options.base_url + path, options.headers
    clock = _Clock(answer)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
            if options.stream:
                async for moment, data in event_stream.events(url, body, headers):
                    chunk = msgspec.json.decode(data)
                    if "error" in chunk:
                        raise ValueError(str(chunk["error"]))
                    clock.tokens(read(chunk, answer), moment)
            else:
                whole = await event_stream.answer(url, body, headers)
                clock.tokens(read(msgspec.json.decode(whole), answer), time.perf_counter())
                answer.itl.clear()
        answer.success = True
    except (MoeEngineError, OSError, ValueError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    clock.end()
    if answer.success and answer.output_len == 0 and request.output_len:
        answer.success, answer.error = False, "the answer has no token"
    return answer


async def ask_native(
    request: BenchRequest, options: CallOptions, seen: Callable[[dict[str, Any], int], None] | None = None
) -> Answer:
    """POST /generate; a chunk's tokens come from `meta_info`'s running count.

    Args:
        seen: called with `meta_info` and the number of new tokens of each chunk.
    """
    body: dict[str, Any] = {
        "sampling_params": {**options.sampling, "max_new_tokens": request.output_len, "ignore_eos": options.ignore_eos},
        "stream": options.stream,
        "return_logprob": options.return_logprob,
        **options.extra_body,
    }
    body["text" if isinstance(request.prompt, str) else "input_ids"] = request.prompt
    last: dict[str, Any] = {}
    if request.images:
        body["image_data"] = list(request.images)
    if request.lora is not None:
        body["lora_path"] = request.lora

    def read(chunk: dict[str, Any], answer: Answer) -> int:
        meta = chunk.get("meta_info", {})
        answer.text = chunk.get("text") or answer.text
        answer.cached_tokens = meta.get("cached_tokens", 0)
        tiers = meta.get("cached_tokens_details") or {}
        answer.cached_by_tier = {name: tiers[name] for name in TIERS if isinstance(tiers.get(name), int)}
        ids, total = chunk.get("output_ids") or [], meta.get("completion_tokens", 0)
        if len(ids) >= total:
            answer.output_ids = ids
        else:  # --incremental-streaming-output: tokens of the chunk
            answer.output_ids.extend(ids)
        answer.retractions = meta.get("num_retractions", 0)
        answer.prompt_len = meta.get("prompt_tokens", answer.prompt_len)
        answer.accept_length = meta.get("spec_accept_length", answer.accept_length)
        count: int = meta.get("completion_tokens", 0) - answer.output_len
        if "e2e_latency" in meta:
            last.update(meta)
        if seen is not None:
            seen(meta, count)
        return count

    answer = await ask(request, options, "/generate", body, read)
    answer.phases = phases.measured(answer, last, time.time() - time.perf_counter())
    return answer
