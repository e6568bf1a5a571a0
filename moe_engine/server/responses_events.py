"""Events of a streamed response: those of its parts, between those of the whole response."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.errors import problem_of
from moe_engine.server.http_io import encode_json
from moe_engine.server.output_parts import Change, Part
from moe_engine.server.responses_answer import Answer, content_of, id_of, item_of
from moe_engine.server.responses_types import ResponseObject

TEXT_EVENTS = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponseEvents:
    """A failure after the first event ends the stream with `response.failed`; a failure before it is an HTTP error.

    Args:
        keep: stores the ended response.
    """

    def __init__(self, answer: Answer, keep: Callable[[Answer, ResponseObject], None]) -> None:
        self._answer = answer
        self._keep = keep
        self._stream = _Stream(answer.id)
        self._begun = False

    def of(self, piece: Piece) -> bytes:
        return b"".join(self._of(piece))

    def _of(self, piece: Piece) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._stream.event(f"response.{name}", response=self._answer.response("in_progress", []))
        for change in self._answer.push(piece):
            yield from self._stream.events(*change)

    def end(self) -> bytes:
        response = self._answer.ended()
        self._keep(self._answer, response)
        return self._stream.event(f"response.{response['status']}", response=response)

    def around_text(self, generation: Generation) -> None:
        return None  # every event has a name or a number

    def failed(self, error: Exception) -> bytes:
        return self._stream.event("response.failed", response=self._answer.failed(problem_of(error).message))


class _Stream:
    """Numbered events of one response."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def events(self, change: Change, part: Part, text: str, logprobs: list[Any]) -> Iterator[bytes]:
        place = {"item_id": id_of(self._response_id, part), "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
        if change == "begin":
            item = item_of(self._response_id, part, begins=True)
            yield self.event("response.output_item.added", output_index=part.index, item=item)
            if part.kind != "call":
                yield self.event("response.content_part.added", **place, part=content_of(part))
        elif change == "add":
            if part.kind == "call":
                yield self.event("response.function_call_arguments.delta", **place, delta=text)
            else:
                more: dict[str, Any] = {"logprobs": logprobs} if part.kind == "text" else {}
                yield self.event(f"response.{TEXT_EVENTS[part.kind]}.delta", **place, delta=text, **more)
        else:
            if part.kind == "call":
                arguments = {"name": part.name, "arguments": part.text}
                yield self.event("response.function_call_arguments.done", **place, **arguments)
            else:
                more = {"logprobs": part.logprobs} if part.kind == "text" else {}
                yield self.event(f"response.{TEXT_EVENTS[part.kind]}.done", **place, text=part.text, **more)
                yield self.event("response.content_part.done", **place, part=content_of(part))
            item = item_of(self._response_id, part)
            yield self.event("response.output_item.done", output_index=part.index, item=item)
