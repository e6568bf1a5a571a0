"""Parts of OpenAI's responses shared by chat and plain completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from moe_engine.frontend.frontend import Job
from moe_engine.frontend.generation import Generation
from moe_engine.server.openai.answers import Usage


def head_of(job: Job, model: str, kind: str) -> dict[str, Any]:
    """The fields of an answer, or of a chunk, before its choices."""
    return {"id": job.generations[0].rid, "object": kind, "created": int(time.time()), "model": model}


def usage_of(generations: Iterable[Generation], *, cache_report: bool, reasoning_tokens: int = 0) -> Usage:
    """Token counts. A prompt with n > 1 copies counts once."""
    prompt = completion = cached = 0
    seen: set[int] = set()
    for g in generations:
        completion += len(g.output_ids)
        if g.prompt_index not in seen:
            seen.add(g.prompt_index)
            prompt += len(g.prompt_ids)
            cached += g.cached_tokens
    usage: Usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached} if cache_report else None,
        "reasoning_tokens": reasoning_tokens,
    }
    if reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def last_hidden_state(g: Generation) -> dict[str, Any]:
    """SGLang's field of a choice: the last token's final hidden state; empty for one output token."""
    if g.hidden is None:
        return {}
    states = g.hidden.shown(len(g.output_ids))
    return {"hidden_states": states[-1] if len(states) > 1 else []}


def matched_stop(finish: dict[str, Any] | None) -> int | str | None:
    return finish.get("matched") if finish else None
