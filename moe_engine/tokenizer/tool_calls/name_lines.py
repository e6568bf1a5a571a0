"""Calls without a mark: a line with the name of an offered function, then arguments as a JSON object (GLM-4-0414)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait

TURN, OBSERVATION = "<|assistant|>", "<|observation|>"
"""Begins of messages: another call follows, or the result of a call does."""


def parse_name_lines(reader: CallReader) -> Wait[None]:
    """``NAME``, a line end, ``{...}`` at the begin of a line; ``<|assistant|>`` between calls."""
    if reader.content_is_json and (yield from reader.at("{")):
        yield from reader.rest()
    while (yield from reader.peek()):
        if (yield from reader.take(TURN)):
            continue
        space = yield from reader.space()
        if (yield from reader.at(TURN)) or (not reader.behind_text and not (yield from reader.peek())):
            continue
        name = yield from _name(reader)
        gap = (yield from reader.space()) if name and reader.offers(name) else ""
        if "\n" in gap and (yield from reader.at("{")):
            reader.plain(space if reader.behind_text else "")
            reader.open(name)
            if (yield from json_text.value(reader, reader.arguments)):
                reader.close()
            continue
        ended = not (yield from reader.peek())
        (reader.no_call if name and ended else reader.plain)(space + name + gap)
        if "\n" not in gap and not ended:
            marker = yield from reader.until(("\n", TURN), reader.plain)
            reader.unread(marker)


def _name(reader: CallReader) -> Wait[str]:
    """The next characters, as far as they may be the name of an offered function."""
    name = ""
    while char := (yield from reader.peek()):
        longer, offered = name + char, reader.functions
        possible = char.isalnum() or char in "_-."
        if offered is not None:
            possible = any(other.startswith(longer) for other in offered)
        if not possible:
            break
        name = longer
        reader.skip()
    return name


def with_observations(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as the template reads it: a message for each call, with the function's name as `metadata` and
    its arguments as content; results have the role ``observation``."""
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("role") == "tool":
            found.append({**message, "role": "observation"})
        elif not calls or message.get("content"):
            found.append({name: value for name, value in message.items() if name != "tool_calls"})
        for call in calls:
            arguments = call["function"].get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append({"role": "assistant", "metadata": call["function"]["name"], "content": text})
    return found
