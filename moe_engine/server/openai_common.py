"""Pieces of OpenAI's answers that chat and plain completions share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_engine.engine.generation import Generation
from moe_engine.tokenizer.tokenizer import Tokenizer


def usage_of(generations: Iterable[Generation], *, cache_report: bool, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts. The prompt of n > 1 copies counts once."""
    prompt = completion = cached = 0
    seen: set[int] = set()
    for g in generations:
        completion += len(g.output_ids)
        if g.prompt_index not in seen:
            seen.add(g.prompt_index)
            prompt += len(g.prompt_ids)
            cached += g.cached_tokens
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached} if cache_report else None,
        "reasoning_tokens": reasoning_tokens,
    }


def matched_stop(finish: dict[str, Any] | None) -> int | str | None:
    return finish.get("matched") if finish else None


def chat_logprobs(tokenizer: Tokenizer, entries: list[Any]) -> dict[str, Any]:
    """`logprobs` of a chat choice: [{token, bytes, logprob, top_logprobs}]."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "bytes": list(tokenizer.token_bytes(token)),
            "logprob": logprob if logprob is not None else 0.0,
        }

    return {
        "content": [
            {**one(entry[0], entry[1]), "top_logprobs": [one(token, value) for token, value in entry[2]]}
            for entry in entries
        ]
    }


def completion_logprobs(tokenizer: Tokenizer, entries: list[Any]) -> dict[str, Any]:
    """`logprobs` of a plain completion: parallel lists. Offsets are -1, as SGLang has them."""
    return {
        "tokens": [tokenizer.token_text(entry[0]) for entry in entries],
        "token_logprobs": [entry[1] for entry in entries],
        "top_logprobs": [
            {tokenizer.token_text(token): value for token, value in entry[2]} if entry[2] else None for entry in entries
        ],
        "text_offset": [-1] * len(entries),
    }
