"""An output as parts of a message: reasoning, text and tool calls, one after the other, whole or streamed.

For APIs whose answers are lists of parts. The chat endpoint streams the deltas as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_engine.frontend.generation import Generation, Piece
from moe_engine.server.openai.choice import ChoiceParser

Change = Literal["begin", "add", "end"]


@dataclass
class Part:
    """`kind`: reasoning, text or call. `text`: for a call, its arguments. `id`, `name`: of a call. `logprobs`: those
    of a text's tokens, if its endpoint adds them. `is_whole`: it has ended, and no limit cut it off."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[Any] = field(default_factory=list)
    is_whole: bool = False


class OutputParts:
    """Collects the deltas of a parser. White space between parts belongs to no part."""

    def __init__(self, parser: ChoiceParser) -> None:
        self._parser = parser
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._call: int | None = None
        """Index of the open call among the calls."""
        self._space = ""

    def push(self, piece: Piece) -> Iterator[tuple[Change, Part, str]]:
        """The changes of parts; those of kind `add` have the added text."""
        deltas, finish = self._parser.push(piece.text), piece.finish
        if finish is not None:
            deltas += self._parser.finish(piece.generation.beginnings)
        for delta in sorted(deltas, key=self._begins):
            if text := delta.get("reasoning_content"):
                yield from self._text("reasoning", text)
            if text := delta.get("content"):
                yield from self._text("text", text)
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    yield from self._begin(Part("call", len(self.parts), id=call["id"], name=function["name"]))
                    self._call = call["index"]
                yield from self._add(function["arguments"])
        if finish is not None:
            yield from self._close(is_whole=finish["type"] == "stop")

    def _begins(self, delta: dict[str, Any]) -> bool:
        """False for further arguments of the open call, which come before the text of the same deltas."""
        return not any("id" not in call and call["index"] == self._call for call in delta.get("tool_calls", ()))

    def _close(self, is_whole: bool) -> Iterator[tuple[Change, Part, str]]:
        """The end of the output. `is_whole`: it was not cut off."""
        if (space := self._space) and not self.parts:
            yield from self._begin(Part("text", 0))
            yield from self._add(space)
        if self._open is not None:
            self._open.is_whole = is_whole
            yield "end", self._open, ""
            self._open = None

    def _text(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[tuple[Change, Part, str]]:
        if self._open is None or self._open.kind != kind:
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, ""
            yield from self._begin(Part(kind, len(self.parts)))
        yield from self._add(text)

    def _begin(self, part: Part) -> Iterator[tuple[Change, Part, str]]:
        if self._open is not None:
            self._open.is_whole = True
            yield "end", self._open, ""
        self._space, self._open, self._call = "", part, None
        self.parts.append(part)
        yield "begin", part, ""

    def _add(self, text: str) -> Iterator[tuple[Change, Part, str]]:
        if text and self._open is not None:
            self._open.text += text
            yield "add", self._open, text


def whole_piece(g: Generation) -> Piece:
    """The output of a sequence that has ended."""
    return Piece(g, g.text, g.output_ids, g.output_logprobs, g.finish)


def parts_of(parser: ChoiceParser, g: Generation) -> list[Part]:
    """The parts of an output that has ended."""
    parts = OutputParts(parser)
    deque(parts.push(whole_piece(g)), maxlen=0)
    return parts.parts
