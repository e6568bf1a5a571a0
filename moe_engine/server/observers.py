"""Request log (`--log-requests`), and a composite of several observers."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from moe_engine.custom_logit_processor import described
from moe_engine.frontend.frontend import Observer
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.request_times import durations
from moe_engine.server.request_ids import request_id
from moe_engine.types import SamplingParams

logger = logging.getLogger("moe_engine.server")

PARTIAL_CHARS = 2048


class Observers:
    """Forwards every event to each of `members`."""

    def __init__(self, *members: Observer) -> None:
        self.members = members

    def received(self, generation: Generation) -> None:
        for member in self.members:
            member.received(generation)

    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None:
        for member in self.members:
            member.tokens(generation, count, seconds, first=first)

    def finished(self, generation: Generation) -> None:
        for member in self.members:
            member.finished(generation)


class RequestLog:
    """`--log-requests`: a line per received request and one per finished request.

    SGLang's levels: 0 metadata, 1 plus sampling parameters, 2 plus the beginning of the texts, 3 everything.
    """

    def __init__(self, level: int) -> None:
        self._level = level

    def received(self, generation: Generation) -> None:
        facts: dict[str, Any] = {"rid": generation.rid, "prompt_tokens": len(generation.prompt_ids)}
        if outer := request_id.get():
            facts["x_request_id"] = outer
        if self._level >= 1:
            facts["sampling_params"] = _parameters(generation.sampling)
        if self._level >= 2:
            facts["text"] = self._cut(generation.prompt_text)
        logger.info("Receive: %s", facts)

    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None:
        pass

    def finished(self, generation: Generation) -> None:
        facts: dict[str, Any] = {"rid": generation.rid, "meta_info": generation.meta_info()}
        if self._level >= 2:
            facts["text"] = self._cut(generation.text)
        logger.info("Finish: %s", facts)

    def _cut(self, text: str | None) -> str | None:
        if text is None or self._level >= 3 or len(text) <= PARTIAL_CHARS:
            return text
        return text[:PARTIAL_CHARS] + " ..."


def with_request_log(observer: Observer | None, level: int | None) -> Observer | None:
    """The same observers with a request log of this level in the place of the one before; None: without one."""
    members = observer.members if isinstance(observer, Observers) else () if observer is None else (observer,)
    rest = [member for member in members if not isinstance(member, RequestLog)]
    if level is not None:
        rest.append(RequestLog(level))
    return rest[0] if len(rest) == 1 else Observers(*rest) if rest else None


class RequestTimeLog:
    """`--enable-request-time-stats-logging`: a line with the times of each sequence at its end."""

    def received(self, generation: Generation) -> None:
        pass

    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None:
        pass

    def finished(self, generation: Generation) -> None:
        finish = generation.finish
        facts: dict[str, Any] = {
            "input_len": len(generation.prompt_ids),
            "output_len": len(generation.output_ids),
            "cached_len": generation.cached_tokens,
            "finish_reason": None if finish is None else finish["type"],
        }
        facts |= {name: f"{1000 * seconds:.2f}ms" for name, seconds in durations(generation).items()}
        words = ", ".join(f"{name}={value}" for name, value in facts.items())
        logger.info("Req Time Stats(rid=%s): %s", generation.rid, words)


def _parameters(sampling: SamplingParams) -> dict[str, Any]:
    """The serialised class of a custom logit processor is replaced by its name and size."""
    found: dict[str, Any] = msgspec.to_builtins(sampling)
    if sampling.custom_logit_processor is not None:
        found["custom_logit_processor"] = described(sampling.custom_logit_processor)
    return found
