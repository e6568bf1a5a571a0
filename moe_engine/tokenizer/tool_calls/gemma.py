"""Gemma 4's format: ``call:NAME{key:<|"|>text<|"|>,other:5}`` between marks of each call.

Values are numbers, names of constants, texts between `QUOTE`, lists and objects; keys have no quotes. Values that a
grammar enforces are JSON, which is read too.
"""

from __future__ import annotations

import json
from typing import Any

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.plain_text import schema_of
from moe_engine.tokenizer.tool_calls.tagged import JsonString, declared_types, json_of

BEGIN, END, CALL = "<|tool_call>", "<tool_call|>", "call:"
QUOTE = '<|"|>'
_MAX_DEPTH = 64


def parse_gemma(reader: CallReader) -> Wait[None]:
    if reader.content_is_json and not (yield from reader.at(BEGIN)):
        yield from reader.rest()
    while (yield from reader.until((BEGIN,), reader.plain)):
        parts: list[str] = []
        marker = yield from reader.until(("{", END), parts.append)
        head = "".join(parts)
        name = head.strip().removeprefix(CALL).strip()
        if marker != "{" or not name or not head.strip().startswith(CALL):
            reader.no_call(BEGIN + head + marker)
            continue
        reader.open(name)
        if (yield from _members(reader, "}", (reader.functions or {}).get(name), 0)):
            reader.close()
        behind: list[str] = []
        yield from reader.until((END,), behind.append)
        reader.plain_unless_space("".join(behind))
        yield from reader.space_behind((BEGIN,))


def _members(reader: CallReader, end: str, schema: Any, depth: int) -> Wait[bool]:
    """The rest of an object or, with `end` ``]``, of a list, as JSON; any bracket ends it, and the end of the call.
    False: the text ended before."""
    reader.arguments("[" if end == "]" else "{")
    separator = ""
    while True:
        yield from reader.space()
        if (yield from reader.take("}")) or (yield from reader.take("]")) or (yield from reader.at(END)):
            break
        if not (yield from reader.peek()):
            return False
        if (yield from reader.take(",")):
            continue
        own = schema.get("items") if end == "]" and isinstance(schema, dict) else None
        if end == "}":
            key = yield from _key(reader)
            if key is None:
                continue
            reader.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            own = schema_of(schema, key)
        else:
            reader.arguments(separator)
        separator = ", "
        if not (yield from _value(reader, own, depth)):
            return False
    reader.arguments(end)
    return True


def _key(reader: CallReader) -> Wait[str | None]:
    """A key with its colon; None: there is none before the end of the object or of the call."""
    parts: list[str] = []
    marker = yield from reader.until((":", "}", END), parts.append)
    if marker != ":":
        reader.unread(marker)
        return None
    key = "".join(parts).strip().removeprefix(QUOTE).removesuffix(QUOTE)
    return key[1:-1] if len(key) > 1 and key[0] == key[-1] == '"' else key


def _value(reader: CallReader, schema: Any, depth: int) -> Wait[bool]:
    """False: the text ended within it."""
    yield from reader.space()
    if (yield from reader.take(QUOTE)):
        text = JsonString(reader.arguments)
        marker = yield from reader.until((QUOTE,), text.push)
        text.finish(bool(marker))
        return bool(marker)
    found = yield from reader.peek()
    if found == '"':
        return (yield from json_text.value(reader, reader.arguments))
    if found in ("{", "[") and depth < _MAX_DEPTH:
        reader.skip()
        return (yield from _members(reader, "}" if found == "{" else "]", schema, depth + 1))
    parts: list[str] = []
    marker = yield from reader.until((",", "}", "]", END, QUOTE), parts.append)
    reader.unread(marker)
    reader.arguments(json_of("".join(parts).strip(), declared_types(schema)))
    return bool(marker)
