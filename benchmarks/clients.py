"""Benchmark clients: one coroutine per backend, all returning an `Answer`.

No command. `/generate` and the times of an answer: `moe_engine.tuning.native_client`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest
from moe_engine.tuning.native_client import CallOptions, ask, ask_native

Backend = Callable[[BenchRequest, CallOptions], Awaitable[Answer]]


async def ask_completions(request: BenchRequest, options: CallOptions) -> Answer:
    """POST /v1/completions; a chunk's tokens come from the continuous usage."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        **_openai_body(request, options),
        **options.extra_body,
    }

    def read(chunk: dict[str, Any], answer: Answer) -> int:
        text = "".join(choice.get("text") or "" for choice in chunk.get("choices", []))
        return _count(chunk, text, answer)

    return await ask(request, options, "/v1/completions", body, read)


async def ask_chat(request: BenchRequest, options: CallOptions) -> Answer:
    """POST /v1/chat/completions with the prompt as the only message."""
    prompt = request.prompt
    if not isinstance(prompt, str):
        if options.decode is None:
            raise ValueError("the chat backend needs text: use --tokenizer, so that token ids can be decoded")
        prompt = options.decode(prompt)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": _content(prompt, request)}],
        "max_completion_tokens": request.output_len,
        **_openai_body(request, options),
        **options.extra_body,
    }

    def read(chunk: dict[str, Any], answer: Answer) -> int:
        pieces = [choice.get("delta") or choice.get("message") or {} for choice in chunk.get("choices", [])]
        text = "".join((piece.get("reasoning_content") or "") + (piece.get("content") or "") for piece in pieces)
        return _count(chunk, text, answer)

    return await ask(request, options, "/v1/chat/completions", body, read)


def _content(text: str, request: BenchRequest) -> str | list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": address}} for address in request.images]
    return [{"type": "text", "text": text}, *images] if images else text


def _openai_body(request: BenchRequest, options: CallOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.lora or options.model,
        **options.sampling,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def _count(chunk: dict[str, Any], text: str, answer: Answer) -> int:
    """New tokens of an OpenAI chunk: from its usage; without usage, one per text."""
    answer.text += text
    usage = chunk.get("usage")
    if usage:
        answer.prompt_len = usage.get("prompt_tokens", answer.prompt_len)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or answer.cached_tokens
        return usage.get("completion_tokens", 0) - answer.output_len
    return 1 if text else 0


BACKENDS: dict[str, Backend] = {
    "sglang": ask_native,
    "sglang-native": ask_native,
    "sglang-oai": ask_completions,
    "sglang-oai-chat": ask_chat,
    "vllm": ask_completions,
    "vllm-chat": ask_chat,
}
DEFAULT_PORTS = {"vllm": 8000, "vllm-chat": 8000}
