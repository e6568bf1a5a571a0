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
            return True  # behind a number or a name
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


def call_object(reader: CallReader) -> Wait[None]:
    """One call as an object with `name` and `arguments` (or `parameters`), in any order.

    Raises:
        NotACall: before the name is known. After the name, text that is not JSON ends the call.
    """
    read: list[str] = []
    waiting: list[str] = []
    opened = False

    def arguments(text: str) -> None:
        if opened:
            reader.arguments(text)
        else:
            waiting.append(text)

    def note(text: str) -> None:
        if not opened:
            read.append(text)

    def char(wanted: str) -> Wait[str]:
        """The next character behind white space, if it is one of these."""
        note((yield from reader.space()))
        found = yield from reader.peek()
        if not found or found not in wanted:
            return ""
        reader.skip()
        note(found)
        return found

    has_arguments = False
    if not (yield from char("{")):
        raise NotACall("".join(read))
    separator = "{"
    while separator != "}":
        if (yield from char("}")):
            break
        key = (yield from _text(reader, note)) if (yield from reader.peek()) == '"' else None
        if key is None or not (yield from char(":")):
            break
        note((yield from reader.space()))
        if key == "name" and not opened:
            name = (yield from _text(reader, note)) if (yield from reader.peek()) == '"' else None
            if name is None:
                break
            reader.open(name)
            opened = True
            for part in waiting:
                reader.arguments(part)
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if not (yield from _arguments(reader, note, arguments)):
                separator = ""
        else:
            yield from value(reader, note)
        separator = (yield from char(",}")) if separator else ""
        if not separator:
            break
    else:
        separator = "}"
    if not opened:
        raise NotACall("".join(read))
    if not has_arguments:
        reader.arguments("{}")
    if (yield from reader.peek()) or separator == "}":
        reader.close()


def _arguments(reader: CallReader, note: Callable[[str], None], sink: Callable[[str], None]) -> Wait[bool]:
    """The arguments; arguments written as a string of JSON are decoded. `note` gets them as written."""

    def both(text: str) -> None:
        note(text)
        sink(text)

    if (yield from reader.peek()) != '"':
        return (yield from value(reader, both))
    parts: list[str] = []
    whole = yield from value(reader, parts.append)
    text = "".join(parts)
    note(text)
    sink(_decoded(text) or text)
    return whole


def _text(reader: CallReader, note: Callable[[str], None]) -> Wait[str | None]:
    """A string; None if the text is not a string."""
    parts: list[str] = []
    whole = yield from value(reader, parts.append)
    note("".join(parts))
    return _decoded("".join(parts)) if whole else None


def _decoded(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
