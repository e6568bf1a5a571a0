"""The text of an output in pieces, and the plain text and tool calls found in it.

The parser of a format is a generator that reads with ``yield from`` and waits where the text so far is ambiguous.
Results therefore do not depend on the pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_engine.tokenizer.stop import Beginnings, overlap, without_cut_mark

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Yields where more text is needed."""


@dataclass(frozen=True)
class ToolDelta:
    """A piece of one call. The first piece has `id` and `name`; later ones only further `arguments`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class CallReader:
    """Input and output of a format's parser.

    Args:
        functions: the offered functions and their `parameters`; calls of other functions are dropped. None accepts any.
        parallel: False keeps the first call only.
        is_json: the arguments of calls are JSON (a grammar enforces it): markers in their strings are text.
        content_is_json: the output is either calls or JSON.
        first_call: calls in the conversation before this output.

    `behind_text`: whether what was found last is plain text, not a call (also one that was dropped).
    """

    def __init__(
        self,
        functions: Mapping[str, Any] | None,
        *,
        parallel: bool,
        is_json: bool,
        content_is_json: bool,
        first_call: int = 0,
    ) -> None:
        self.functions = functions
        self.first_call = first_call
        self.is_json = is_json
        self.content_is_json = content_is_json
        self.num_calls = 0
        self.in_call = False
        self.behind_text = False
        self._parallel = parallel
        self._kept = False
        self._text = ""
        self._at = 0
        self._ended = False
        self._beginnings: Beginnings | None = None
        self._ids: set[str] = set()
        self._found: list[str | ToolDelta] = []

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, beginnings: Beginnings | None = None) -> None:
        """Marks the end of the text. `beginnings`: as of `without_cut_mark`."""
        self._ended, self._beginnings = True, beginnings

    @property
    def was_cut(self) -> bool:
        """Whether `max_tokens` has ended the text, and all of it is read."""
        return self._beginnings is not None and self._at >= len(self._text)

    def found(self) -> list[str | ToolDelta]:
        """Plain text and pieces of calls since the last time, in the order of the output."""
        found, self._found = self._found, []
        return found

    def peek(self) -> Wait[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Passes over the character that `peek` returned."""
        self._at += 1

    def space(self) -> Wait[str]:
        """Passes over white space."""
        out = []
        while (char := (yield from self.peek())) and char.isspace():
            out.append(char)
            self.skip()
        return "".join(out)

    def at(self, text: str) -> Wait[bool]:
        """Whether the next characters are these."""
        while len(self._text) - self._at < len(text):
            if self._ended or not text.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(text, self._at)

    def take(self, text: str) -> Wait[bool]:
        """Passes over these characters if they are next."""
        found = yield from self.at(text)
        if found:
            self._at += len(text)
        return found

    def unread(self, text: str) -> None:
        """Puts characters back that were just read."""
        self._at -= len(text)

    def until(self, markers: tuple[str, ...], sink: Callable[[str], None]) -> Wait[str]:
        """Passes over the first of the markers, which it returns, and gives the text before it to `sink`. Empty at the
        end of the text, which `sink` has then."""
        while True:
            places = [(place, marker) for marker in markers if (place := self._text.find(marker, self._at)) >= 0]
            if places:
                place, marker = min(places)
                self._give(place, sink)
                self._at += len(marker)
                return marker
            rest = self._text[self._at :]
            if self._ended:
                self._give(self._at + len(without_cut_mark(rest, markers, self._beginnings)), sink)
                self._at = len(self._text)
                return ""
            self._give(len(self._text) - max(overlap(rest, marker) for marker in markers), sink)
            yield

    def _give(self, end: int, sink: Callable[[str], None]) -> None:
        if end > self._at:
            sink(self._text[self._at : end])
            self._at = end

    def space_behind(self, begins: tuple[str, ...]) -> Wait[None]:
        """Passes over white space after a call, which is shown only before text: not at the end, nor before one of
        `begins`. White space after text is left: it is text."""
        if self.behind_text:
            return
        space = yield from self.space()
        for begin in begins:
            if (yield from self.at(begin)):
                return
        if (yield from self.peek()):
            self.plain(space)

    def plain(self, text: str) -> None:
        if text:
            self.behind_text = True
            if self._found and isinstance(self._found[-1], str):
                self._found[-1] += text
            else:
                self._found.append(text)

    def no_call(self, text: str) -> None:
        """The beginning of a call that is none: plain text, unless the output was cut before the call could be read."""
        if not self.was_cut:
            self.plain(text)

    def plain_unless_space(self, text: str) -> None:
        """Text after a call or after text: white space after a call is dropped."""
        if self.behind_text or text.strip():
            self.plain(text)

    def rest(self) -> Wait[None]:
        """Takes all further text as plain text."""
        while char := (yield from self.peek()):
            self.plain(self._text[self._at :] if char else "")
            self._at = len(self._text)

    def offers(self, name: str) -> bool:
        return self.functions is None or name in self.functions

    def open(self, name: str, call_id: str | None = None) -> None:
        """Begins a call. The call is dropped if its function was not offered, or if only one call is allowed and there
        was one."""
        self.behind_text = False
        self.in_call, self._kept = True, self.offers(name) and (self._parallel or self.num_calls == 0)
        if self._kept:
            if call_id is None or call_id in self._ids:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
            self._ids.add(call_id)
            self._found.append(ToolDelta(self.num_calls, id=call_id, name=name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the open call."""
        if self._kept and text:
            last = self._found[-1] if self._found else None
            if isinstance(last, ToolDelta) and last.name is None and last.index == self.num_calls - 1:
                self._found[-1] = ToolDelta(last.index, last.arguments + text)
            else:
                self._found.append(ToolDelta(self.num_calls - 1, text))

    def close(self) -> None:
        """Ends the open call."""
        self.in_call = False
