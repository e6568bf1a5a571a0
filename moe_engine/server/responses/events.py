"""Events of a streamed response: those of its parts, between those of the whole response."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from moe_engine.frontend.generation import Piece
from moe_engine.server.errors import problem_of
from moe_engine.server.event_stream import Events, named_event
from moe_engine.server.output_parts import Change, Part
from moe_engine.server.responses.answer import Answer, content_of
from moe_engine.server.responses.tools import custom_input
from moe_engine.server.responses.types import ResponseObject

TEXT_EVENTS = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponseEvents(Events):
    """A failure after the first event ends the stream with `response.failed`; a failure before it is an HTTP error.

    Args:
        keep: stores the ended response.
    """

    def __init__(self, answer: Answer, keep: Callable[[Answer, ResponseObject], None]) -> None:
        self._answer = answer
        self._keep = keep
        self._stream = _Stream(answer)
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

    def failed(self, error: Exception) -> bytes:
        return self._stream.event("response.failed", response=self._answer.failed(problem_of(error).message))


class _Stream:
    """Numbered events of one response."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, sequence_number=number, **fields)

    def events(self, change: Change, part: Part, text: str, logprobs: list[Any]) -> Iterator[bytes]:
        if change == "begin":
            item = self._answer.item_of(part, begins=True)
            yield self.event("response.output_item.added", output_index=part.index, item=item)
        yield from (self._call if part.kind == "call" else self._text)(change, part, text, logprobs)
        if change == "end":
            item = self._answer.item_of(part)
            yield self.event("response.output_item.done", output_index=part.index, item=item)

    def _place(self, part: Part) -> dict[str, Any]:
        return {"item_id": self._answer.id_of(part), "output_index": part.index}

    def _call(self, change: Change, part: Part, text: str, _: list[Any]) -> Iterator[bytes]:
        """The input of a custom tool follows at its end: its arguments are JSON of it."""
        place, called = self._place(part), self._answer.called(part)
        if called.is_custom:
            if change == "end":
                given = custom_input(part.text)
                yield self.event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self.event("response.custom_tool_call_input.done", **place, input=given)
        elif change == "add":
            yield self.event("response.function_call_arguments.delta", **place, delta=text)
        elif change == "end":
            yield self.event("response.function_call_arguments.done", **place, name=called.name, arguments=part.text)

    def _text(self, change: Change, part: Part, text: str, logprobs: list[Any]) -> Iterator[bytes]:
        place, name = {**self._place(part), "content_index": 0}, f"response.{TEXT_EVENTS[part.kind]}"
        with_logprobs = part.kind == "text"
        if change == "begin":
            yield self.event("response.content_part.added", **place, part=content_of(part))
        elif change == "add":
            more: dict[str, Any] = {"logprobs": logprobs} if with_logprobs else {}
            yield self.event(f"{name}.delta", **place, delta=text, **more)
        else:
            more = {"logprobs": part.logprobs} if with_logprobs else {}
            yield self.event(f"{name}.done", **place, text=part.text, **more)
            yield self.event("response.content_part.done", **place, part=content_of(part))
