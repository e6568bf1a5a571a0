"""JSON in an output, character by character, without a check of its syntax beyond strings and brackets."""

from __future__ import annotations

import json
from collections.abc import Callable

from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait


class NotACall(Exception):
    """The text is not a call. The reader's position is after `text`."""

    def __init__(self, text: str) -> None:
        self.text = text


def value(reader: CallReader, sink: Callable[[str], None]) -> Wait[bool]:
    """Passes over one value; its text goes to `sink`. False: the text ended within it, or there is none."""
    depth, in_string, escaped, any_text = 0, False, False, False
    while char := (yield from reader.peek()):
        if not in_string and depth == 0 and any_text and (char in ",]}" or char.isspace()):
            return True  # after a number or a name
        if not in_string and depth == 0 and char in ",]}":
            return False
        reader.skip()
        sink(char)
        any_text = True
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
                if depth == 0:
                    return True
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return True
    return any_text and depth == 0 and not in_string


def call_object(reader: CallReader, name: str = "name") -> Wait[None]:
    """One call as an object with `name` and `arguments` (or `parameters`), in any order. name: of the key of the name.

    Raises:
        NotACall: before the name is known. After the name, text that is not JSON ends the call.
    """
    yield from _CallObject(reader, name).read()


class _CallObject:
    """An object while it is read: its text until its name is known, and arguments in front of the name."""

    def __init__(self, reader: CallReader, name: str) -> None:
        self._reader, self._name = reader, name
        self._read: list[str] = []
        self._waiting: list[str] = []
        self._opened = self._has_arguments = False

    def read(self) -> Wait[None]:
        reader, ended = self._reader, False
        if (yield from self._next("{")):
            ended = yield from self._members()
        if not self._opened:
            raise NotACall("".join(self._read))
        if not (self._has_arguments or reader.was_cut):
            reader.arguments("{}")
        if (yield from reader.peek()) or ended:
            reader.close()

    def _members(self) -> Wait[bool]:
        """Whether the object ends after a member; False: text that is not JSON, or the text ended."""
        while True:
            if (yield from self._next("}")):
                return False
            key = yield from self._text()
            if key is None or not (yield from self._next(":")) or not (yield from self._member(key)):
                return False
            separator = yield from self._next(",}")
            if separator != ",":
                return separator == "}"

    def _member(self, key: str) -> Wait[bool]:
        """The value of a key; False: it cannot be read."""
        self._note((yield from self._reader.space()))
        if key == self._name and not self._opened:
            name = yield from self._text()
            if name is None:
                return False
            self._reader.open(name)
            self._opened = True
            for part in self._waiting:
                self._reader.arguments(part)
        elif key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        else:
            yield from value(self._reader, self._note)
        return True

    def _arguments(self) -> Wait[bool]:
        """Arguments written as a string of JSON are decoded."""
        if (yield from self._reader.peek()) != '"':
            return (yield from value(self._reader, self._pass_on))
        parts: list[str] = []
        whole = yield from value(self._reader, parts.append)
        text = "".join(parts)
        self._pass_on(text, _decoded(text))
        return whole

    def _pass_on(self, text: str, decoded: str | None = None) -> None:
        self._note(text)
        if self._opened:
            self._reader.arguments(decoded or text)
        else:
            self._waiting.append(decoded or text)

    def _text(self) -> Wait[str | None]:
        """A string; None if the text is not a string."""
        if (yield from self._reader.peek()) != '"':
            return None
        parts: list[str] = []
        whole = yield from value(self._reader, parts.append)
        self._note("".join(parts))
        return _decoded("".join(parts)) if whole else None

    def _next(self, wanted: str) -> Wait[str]:
        """The next character after white space, if it is one of these."""
        self._note((yield from self._reader.space()))
        found = yield from self._reader.peek()
        if not found or found not in wanted:
            return ""
        self._reader.skip()
        self._note(found)
        return found

    def _note(self, text: str) -> None:
        if not self._opened:
            self._read.append(text)


def _decoded(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
