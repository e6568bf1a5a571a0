"""The format of MiniMax-M3: arguments as elements with their names as tags, nested for objects and lists. Every tag
begins with a marker of its own.

A list has elements named `item`. Texts become JSON by the function's schema, as in `tagged`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.plain_text import is_plain_text, schema_of
from moe_engine.tokenizer.tool_calls.tagged import JsonString, declared_types, json_of

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
NAME_END = '">'
_ITEM = "item"
_MAX_DEPTH = 64


def parse_nested(reader: CallReader) -> Wait[None]:
    """Calls between `BEGIN` and `END`, or without these."""
    if reader.content_is_json and not (yield from reader.at(BEGIN)):
        yield from reader.rest()
    block = ""  # shown unless a call follows
    while True:
        between: list[str] = []
        marker = yield from reader.until((BEGIN, INVOKE, END), between.append)
        text = "".join(between)
        if block and (text.strip() or marker != INVOKE):
            reader.no_call(block + text)
            block = ""
        elif not block:
            reader.plain(text) if reader.num_calls == 0 else reader.plain_unless_space(text)
        if marker == INVOKE:
            yield from _call(reader, block + text if block else "")
            block = ""
        elif marker == BEGIN:
            block = BEGIN
        elif marker == END and reader.num_calls == 0:
            reader.plain(END)
        elif not marker:
            return


def _call(reader: CallReader, before: str) -> Wait[None]:
    """`before` is shown if there is no call."""
    head: list[str] = []
    marker = yield from reader.until((NAME_END, MARK), head.append)
    name = "".join(head).strip()
    if marker != NAME_END or not name:
        reader.no_call(before + INVOKE + "".join(head) + marker)
        return
    reader.open(name)
    schema, beginning = (reader.functions or {}).get(name), "{"
    while True:
        between: list[str] = []
        marker = yield from reader.until((MARK,), between.append)
        reader.plain_unless_space("".join(between))
        if not marker:
            return
        if (yield from _ends(reader)):
            break
        if not (yield from reader.take("<")):
            continue
        key = yield from _name(reader)
        if reader.was_cut:
            return
        reader.arguments(f"{beginning}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _argument(reader, schema_of(schema, key))
        beginning = ", "
    reader.arguments("{}" if beginning == "{" else "}")
    reader.close()


def _ends(reader: CallReader) -> Wait[bool]:
    """Passes over the end of a call, after its mark. The end of all calls ends the last one too."""
    for end in (INVOKE_END, END):
        if (yield from reader.take(end.removeprefix(MARK))):
            return True
    return False


def _name(reader: CallReader) -> Wait[str]:
    parts: list[str] = []
    yield from reader.until((">",), parts.append)
    return "".join(parts).strip()


def _argument(reader: CallReader, schema: Any) -> Wait[None]:
    if reader.is_json and not is_plain_text(schema):  # a grammar enforces it: marks in its strings are text
        yield from reader.space()
        if (yield from reader.peek()) in ('"', "{", "["):
            yield from json_text.value(reader, reader.arguments)
            yield from reader.until((MARK,), lambda _: None)
        else:
            parts: list[str] = []
            yield from reader.until((MARK,), parts.append)
            reader.arguments("".join(parts).strip())
        yield from _name(reader)
    elif declared_types(schema) == {"string"}:
        text = JsonString(reader.arguments)
        marker = yield from reader.until((f"{MARK}</",), text.push)
        text.finish(bool(marker))
        yield from _name(reader)
    else:
        found = yield from _element(reader, schema, 0)
        if found is not None:
            reader.arguments(found)


def _element(reader: CallReader, schema: Any, depth: int) -> Wait[str | None]:
    """The JSON of an element, after its first tag; passes over its last one. None: it has none."""
    text: list[str] = []
    children: list[tuple[str, str]] = []
    while True:
        marker = yield from reader.until((MARK,), text.append)
        if not marker:
            return None
        if (yield from reader.take("</")):
            yield from _name(reader)
            break
        if depth < _MAX_DEPTH and (yield from reader.take("<")):
            key = yield from _name(reader)
            child = yield from _element(reader, _child_schema(schema, key), depth + 1)
            if child is None:
                return None
            children.append((key, child))
        else:
            text.append(MARK)
    if not children:
        return _leaf("".join(text), schema)
    types = declared_types(schema)
    if types != {"object"} and (types == {"array"} or all(key == _ITEM for key, _ in children)):
        return f"[{', '.join(child for _, child in children)}]"
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {child}" for key, child in children) + "}"


def _leaf(text: str, schema: Any) -> str:
    types = declared_types(schema)
    if not text.strip() and types is not None and "string" not in types:
        for kind, empty in (("object", "{}"), ("array", "[]"), ("null", "null")):
            if kind in types:
                return empty
    return json_of(text, types)


def _child_schema(schema: Any, key: str) -> Any:
    """The schema of an element within another; None if there is none."""
    for one in (schema, *_choices(schema)):
        if (found := schema_of(one, key)) is not None:
            return found
        if key == _ITEM and isinstance(one, Mapping) and one.get("items") is not None:
            return one["items"]
    return None


def _choices(schema: Any) -> list[Any]:
    words = (schema.get(word) for word in ("anyOf", "oneOf")) if isinstance(schema, Mapping) else ()
    return [one for found in words if isinstance(found, list) for one in found]
