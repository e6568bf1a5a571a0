"""Calls as a list of Python: ``[f(a=1), g(b="x")]`` (Llama 3.2 and 4)."""

from __future__ import annotations

import ast
import json
from typing import Any

from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait

BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_LENGTH = 1 << 20
PAIRS = {"(": ")", "[": "]", "{": "}"}


def parse_pythonic(reader: CallReader) -> Wait[None]:
    while marker := (yield from reader.until(("[", BEGIN, END), reader.plain)):
        if marker != "[":
            continue
        text = "[" + (yield from _bracketed(reader))
        calls = _calls(text)
        if calls is None:
            reader.plain(text)
            continue
        for name, arguments in calls:
            reader.open(name)
            reader.arguments(json.dumps(arguments, ensure_ascii=False))
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
    """Names and arguments; None if the text is no list of calls with constant keyword arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        found = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, (ast.Name, ast.Attribute)):
                return None
            values = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
            if len(values) < len(call.keywords):
                return None
            json.dumps(values, allow_nan=False)
            found.append((ast.unparse(call.func), values))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found
