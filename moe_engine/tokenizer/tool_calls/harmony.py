"""Calls of gpt-oss: messages of its harmony format that have a function as recipient."""

from __future__ import annotations

from moe_engine.tokenizer.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START, Header
from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait


def parse_harmony(reader: CallReader) -> Wait[None]:
    """Other messages are plain text, unchanged: `HarmonyReasoning` parses them first."""
    marker = ""
    if (yield from reader.at(" to=")):  # the role before it is in the prompt
        marker = yield from _message(reader, "")
    while marker or (marker := (yield from reader.until((START, CHANNEL), reader.plain))):
        marker = yield from _message(reader, marker)


def _message(reader: CallReader, marker: str) -> Wait[str]:
    """The message that `marker` begins. Returns the marker of the next one if it follows without an end."""
    head: list[str] = [marker]
    end = yield from reader.until((MESSAGE, END, CALL, RETURN), head.append)
    header = Header.parse("".join(head))
    if end != MESSAGE or not header.function:
        reader.no_call("".join(head) + end)
        return ""
    reader.open(header.function)
    sink = reader.arguments
    if reader.is_json and (yield from json_text.value(reader, sink)):
        reader.close()  # its end is a stop token
        sink = reader.plain_unless_space
    end = yield from reader.until((CALL, END, RETURN, START, CHANNEL), sink)
    if end:
        reader.close()
    return end if end in (START, CHANNEL) else ""
