"""A response of /v1/responses while its output is generated: the response object and its items."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.openai.choice import ChoiceParser, ParserOptions
from moe_engine.server.output_parts import Change, OutputParts, Part, whole_piece
from moe_engine.server.responses.logprobs import TextLogprobs
from moe_engine.server.responses.tools import Called, called_tools, custom_input
from moe_engine.server.responses.types import OutputContent, OutputItem, ResponseObject, ResponsesPlan, ResponseUsage

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
PENDING = ("queued", "in_progress")
"""Statuses of a response that has not ended."""


def _shown_bytes(g: Generation, parsers: ParserOptions) -> Callable[[int], bytes]:
    """The bytes of a token in the text: none of a skipped special token."""
    tokenizer = g.tokenizer
    assert tokenizer is not None
    skipped = tokenizer.special_ids - parsers.keep_special if g.sampling.skip_special_tokens else frozenset()
    return lambda token: b"" if token in skipped else tokenizer.exact_bytes(token)


class Answer:
    def __init__(self, g: Generation, asked: ResponsesPlan, model: str, parsers: ParserOptions) -> None:
        self.asked = asked
        self.id = g.rid if g.rid.startswith("resp_") else f"resp_{g.rid}"
        self._generation, self._parsers, self._model = g, parsers, model
        self._created = int(time.time())
        self._parts = OutputParts(ChoiceParser(parsers))
        self._tools = called_tools(asked.fields["tools"])
        self._logprobs: TextLogprobs | None = None
        if g.logprob_format is not None and g.tokenizer is not None:
            end = parsers.reasoning.end if parsers.reasoning else ""
            self._logprobs = TextLogprobs(_shown_bytes(g, parsers), end)

    def push(self, piece: Piece) -> Iterator[tuple[Change, Part, str, list[Any]]]:
        """The changes of the parts, with the log-probabilities of added text."""
        if self._logprobs is not None:
            self._logprobs.add(piece.token_ids, piece.logprobs)
        for change, part, text in self._parts.push(piece):
            entries = []
            if change == "add" and self._logprobs is not None:
                entries = self._logprobs.of(part.kind, text)
                part.logprobs += entries
            yield change, part, text, entries

    def whole(self) -> ResponseObject:
        """The response of an output that was not streamed and has ended."""
        deque(self.push(whole_piece(self._generation)), maxlen=0)
        return self.ended()

    def begun(self) -> ResponseObject:
        """The response of an output that has not ended, without its items."""
        return self.response("queued" if self._generation.first_token_at is None else "in_progress", [])

    def ended(self) -> ResponseObject:
        finish, output = self._generation.finish or {}, self._items()
        if finish.get("type") == "abort":
            return self.failed(finish.get("message") or "the request was aborted")
        if finish.get("type") != "length":
            return self.response("completed", output)
        return {**self.response("incomplete", output), "incomplete_details": {"reason": "max_output_tokens"}}

    def failed(self, message: str) -> ResponseObject:
        return {**self.response("failed", self._items()), "error": {"code": "server_error", "message": message}}

    def response(self, status: Any, output: list[OutputItem]) -> ResponseObject:
        answer: Any = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None if status in PENDING else self._usage(),
            **self.asked.fields,
        }
        return cast(ResponseObject, answer)

    def _items(self) -> list[OutputItem]:
        return [self.item_of(part) for part in self._parts.parts]

    def called(self, part: Part) -> Called:
        """The tool that a part calls."""
        return self._tools.get(part.name) or Called("function", part.name)

    def id_of(self, part: Part) -> str:
        kind = "custom" if part.kind == "call" and self.called(part).is_custom else part.kind
        return f"{PREFIXES[kind]}_{self.id.removeprefix('resp_')}_{part.index}"

    def item_of(self, part: Part, begins: bool = False) -> OutputItem:
        """The item of a part. `begins`: its form at the start of a stream, without content."""
        content = [] if begins else [content_of(part)]
        status: Any = "in_progress" if begins else "completed" if part.is_whole else "incomplete"
        name = self.id_of(part)
        if part.kind == "text":
            return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}
        if part.kind == "reasoning":
            return {"type": "reasoning", "id": name, "status": status, "summary": [], "content": content}
        called = self.called(part)
        item: OutputItem = {
            "type": "custom_tool_call" if called.is_custom else "function_call", "id": name, "status": status,
            "call_id": part.id, "name": called.name,
        }  # fmt: skip
        if called.namespace is not None:
            item["namespace"] = called.namespace
        if called.is_custom:
            item["input"] = custom_input(part.text) if part.text else ""
        else:
            item["arguments"] = part.text
        return item

    def _usage(self) -> ResponseUsage:
        g = self._generation
        return {
            "input_tokens": len(g.prompt_ids),
            "input_tokens_details": {"cached_tokens": g.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(g.output_ids),
            "output_tokens_details": {"reasoning_tokens": self._parsers.count_reasoning(g.output_ids)},
            "total_tokens": len(g.prompt_ids) + len(g.output_ids),
        }


def content_of(part: Part) -> OutputContent:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}
