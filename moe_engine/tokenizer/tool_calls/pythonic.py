"""Calls in Python: as a list ``[f(a=1), g(b="x")]`` (Llama 3.2 and 4; LFM2: between tags), or one a line between tags
(OLMo 3)."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait

BEGIN, END = "<|python_start|>", "<|python_end|>"
LINES_BEGIN, LINES_END = "<function_calls>", "</function_calls>"
TAGGED_BEGIN, TAGGED_END = "<|tool_call_start|>", "<|tool_call_end|>"
MAX_LENGTH = 1 << 20
_FIRST = re.compile(r"\[\s*([\w.]+)\(")
"""The name of the first call in a list."""
_OF_JSON = {"null": None, "true": True, "false": False}
PAIRS = {"(": ")", "[": "]", "{": "}"}


def parse_pythonic(reader: CallReader) -> Wait[None]:
    if reader.is_json:
        yield from _parse_enforced(reader)
        return
    while marker := (yield from reader.until(("[", BEGIN, END), reader.plain)):
        if marker != "[":
            continue
        text = "[" + (yield from _bracketed(reader))
        calls = _calls(text)
        if calls is None:
            first = _FIRST.match(text)
            (reader.no_call if first and reader.offers(first[1]) else reader.plain)(text)
            continue
        for name, arguments in calls:
            reader.open(name)
            reader.arguments(json.dumps(arguments, ensure_ascii=False))
            reader.close()


def _parse_enforced(reader: CallReader) -> Wait[None]:
    """Values of arguments are JSON: strings may be streamed, and brackets in them are text."""
    while marker := (yield from reader.until(("[", BEGIN, END), reader.plain)):
        if marker != "[":
            continue
        before = "["
        while name := (yield from _name_of_call(reader, before)):
            yield from _enforced_call(reader, name)
            yield from reader.space()
            before = ""
            if not (yield from reader.take(",")):
                yield from reader.take("]")
                break
        if before and reader.content_is_json:
            yield from reader.rest()


def parse_lines(reader: CallReader) -> Wait[None]:
    """``<function_calls>``, a call on each line, ``</function_calls>``; constants may be JSON's."""
    yield from _between_tags(reader, LINES_BEGIN, LINES_END)


def parse_tagged_list(reader: CallReader) -> Wait[None]:
    """``<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>``; calls may be JSON objects too."""
    yield from _between_tags(reader, TAGGED_BEGIN, TAGGED_END)


def _between_tags(reader: CallReader, begin: str, end: str) -> Wait[None]:
    if reader.content_is_json and not (yield from reader.at(begin)):
        yield from reader.rest()
    while (yield from reader.until((begin,), reader.plain)):
        if reader.is_json:
            yield from reader.take("[")
            while not (yield from reader.take(end)):
                space = yield from reader.space()
                if not (name := (yield from _name_of_call(reader, space))):
                    break
                yield from _enforced_call(reader, name)
                yield from reader.space()
                if not (yield from reader.take(",")):
                    yield from reader.take("]")
        else:
            parts: list[str] = []
            marker = yield from reader.until((end,), parts.append)
            text = "".join(parts)
            calls = _calls_of(text)
            if calls is None:
                reader.no_call(begin + text + marker)
            for name, arguments in calls or ():
                reader.open(name)
                reader.arguments(json.dumps(arguments, ensure_ascii=False))
                reader.close()
        yield from reader.space_behind((begin,))


def _calls_of(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """As `_calls`, of a text between tags: a list, calls with commas or on a line each, or JSON objects."""
    lines = ",".join(filter(str.strip, text.splitlines()))
    return _calls(text) or _calls(f"[{text}]") or _calls(f"[{lines}]") or _objects(text)


def _objects(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in found if isinstance(found, list) else [found]:
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, arguments))
    return calls or None


def _name_of_call(reader: CallReader, before: str) -> Wait[str]:
    """Passes over a name and its bracket. Empty if there is no call: the text after `before` is then plain."""
    out: list[str] = []
    while (char := (yield from reader.peek())) and (char.isalnum() or char in "_. \t\r\n"):
        out.append(char)
        reader.skip()
    name = "".join(out).strip(" \t\r\n")
    if name and char == "(" and reader.offers(name):
        reader.skip()
        return name
    reader.plain(before + "".join(out))
    return ""


def _enforced_call(reader: CallReader, name: str) -> Wait[None]:
    reader.open(name)
    before = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.peek()):
            return
        if (yield from reader.take(")")):
            break
        key: list[str] = []
        yield from reader.until(("=",), key.append)
        reader.arguments(f"{before}{json.dumps(''.join(key).strip(), ensure_ascii=False)}: ")
        before = ", "
        yield from reader.space()
        if (yield from reader.peek()) in ('"', "{", "["):
            yield from json_text.value(reader, reader.arguments)
        else:
            while (char := (yield from reader.peek())) and char not in ",)":
                reader.skip()
                reader.arguments(char)
        yield from reader.space()
        yield from reader.take(",")
    reader.arguments("{}" if before == "{" else "}")
    reader.close()


def _bracketed(reader: CallReader) -> Wait[str]:
    """The text up to the closing bracket, as far as it may be a list of calls."""
    out: list[str] = []
    open_brackets, quote, escaped, name = ["]"], "", False, True
    while (char := (yield from reader.peek())) and len(out) < MAX_LENGTH:
        if name:  # the first word decides
            name = char.isalnum() or char in "_." or (char.isspace() and not "".join(out).strip())
            if not name and char != "(":
                return "".join(out)
        reader.skip()
        out.append(char)
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in PAIRS:
            open_brackets.append(PAIRS[char])
        elif char in ")]}" and (open_brackets.pop() != char or not open_brackets):
            break
    return "".join(out)


def _calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments; None if the text is not a list of calls with constant keyword arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        found = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, (ast.Name, ast.Attribute)):
                return None
            words = (word for word in call.keywords if word.arg is not None)
            values = {str(word.arg): ast.literal_eval(_Constants().visit(word.value)) for word in words}
            if len(values) < len(call.keywords):
                return None
            json.dumps(values, allow_nan=False)
            found.append((ast.unparse(call.func), values))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which OLMo 3 writes."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_OF_JSON[node.id]) if node.id in _OF_JSON else node
