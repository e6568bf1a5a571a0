"""An output as parts of a message: reasoning, text and tool calls, one after the other, whole or streamed.

For APIs whose answers are lists of parts. The chat endpoint streams the deltas as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_engine.server.openai_choice import ChoiceParser
from moe_engine.tokenizer.stop import Beginnings

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
    """Collects the deltas of a `ChoiceParser`. White space between parts belongs to no part."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._call: int | None = None
        """Index of the open call among the calls."""
        self._space = ""

    def push(self, deltas: list[dict[str, Any]]) -> Iterator[tuple[Change, Part, str]]:
        """The changes of parts; those of kind `add` have the added text."""
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

    def _begins(self, delta: dict[str, Any]) -> bool:
        """False for further arguments of the open call, which come before the text of the same deltas."""
        return not any("id" not in call and call["index"] == self._call for call in delta.get("tool_calls", ()))

    def close(self, is_whole: bool = True) -> Iterator[tuple[Change, Part, str]]:
        """Call after the last deltas. `is_whole`: the output was not cut off."""
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


def parts_of(parser: ChoiceParser, text: str, beginnings: Beginnings | None) -> list[Part]:
    """The parts of a complete output; `beginnings` as of `ChoiceParser.finish`."""
    parts = OutputParts()
    for _ in parts.push(parser.push(text) + parser.finish(beginnings)):
        pass
    for _ in parts.close():
        pass
    return parts.parts
