"""Formats that write a call as one JSON object: Qwen 2.5 and Hermes, Llama 3, Mistral, MiniMax-M1, Granite 3,
Phi-4-mini, Cohere 2, Nemotron Nano 2."""

from __future__ import annotations

from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.json_text import NotACall

QWEN_BEGIN, QWEN_END = "<tool_call>", "</tool_call>"
MISTRAL_BEGIN, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LLAMA_BEGIN = "<|python_tag|>"
MINIMAX_BEGIN, MINIMAX_END = "<tool_calls>", "</tool_calls>"
ACTION_BEGIN, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
NEMOTRON_BEGIN, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"
LIST_BEGIN, PHI_BEGIN, PHI_END = "<|tool_call|>", "functools", "<|/tool_call|>"


def parse_qwen(reader: CallReader) -> Wait[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each call."""
    if reader.content_is_json and not (yield from reader.at(QWEN_BEGIN)):
        yield from reader.rest()
    while (yield from reader.until((QWEN_BEGIN,), reader.plain)):
        try:
            yield from json_text.call_object(reader)
        except NotACall as error:
            reader.no_call(QWEN_BEGIN + error.text)
            continue
        rest: list[str] = []
        yield from reader.until((QWEN_END,), rest.append)
        reader.plain_unless_space("".join(rest))
        yield from reader.space_behind((QWEN_BEGIN,))


def parse_llama(reader: CallReader) -> Wait[None]:
    """``{"name": ..., "parameters": {...}}`` at the beginning of the output or after the tag, ``;`` between calls."""
    space = yield from reader.space()
    if (yield from reader.at("{")) and not reader.content_is_json:
        yield from call_objects(reader, space, ";")
    else:
        reader.plain(space)
    while (yield from reader.until((LLAMA_BEGIN,), reader.plain)):
        yield from call_objects(reader, LLAMA_BEGIN, ";")


def parse_mistral(reader: CallReader) -> Wait[None]:
    """``[TOOL_CALLS] [{...}, {...}]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` for each call."""
    if reader.content_is_json and not (yield from reader.at(MISTRAL_BEGIN)):
        yield from reader.rest()
    while (yield from reader.until((MISTRAL_BEGIN,), reader.plain)):
        space = yield from reader.space()
        if (yield from reader.take("[")):
            if (yield from call_objects(reader, f"{MISTRAL_BEGIN}{space}[", ",")):
                yield from reader.space()
                yield from reader.take("]")
        else:
            yield from _named(reader, space)
        yield from reader.space_behind((MISTRAL_BEGIN,))


def parse_granite(reader: CallReader) -> Wait[None]:
    """``<|tool_call|>[{...}, {...}]``; Granite 3.1 writes ``<tool_call>``. Phi-4-mini: ``functools[{...}]``, or with
    ``<|/tool_call|>`` at the end."""
    yield from _lists(reader, (LIST_BEGIN, QWEN_BEGIN, PHI_BEGIN), (PHI_END, QWEN_END), "name")


def parse_cohere(reader: CallReader) -> Wait[None]:
    """``<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>``. The ids
    are places in the conversation, which the template writes itself."""
    yield from _lists(reader, (ACTION_BEGIN,), (ACTION_END,), "tool_name")


def parse_nemotron(reader: CallReader) -> Wait[None]:
    """``<TOOLCALL>[{...}, {...}]</TOOLCALL>``."""
    yield from _lists(reader, (NEMOTRON_BEGIN,), (NEMOTRON_END,), "name")


def _lists(reader: CallReader, begins: tuple[str, ...], ends: tuple[str, ...], name: str) -> Wait[None]:
    """A list of calls, or one, after each of `begins`; `ends` may follow. name: of the key of a call's name."""
    called, is_call = False, not reader.content_is_json
    for begin in begins:
        is_call = is_call or (yield from reader.at(begin))
    if not is_call:
        yield from reader.rest()
    while marker := (yield from reader.until((*begins, *ends), reader.plain)):
        if marker in ends:
            reader.plain(marker if reader.behind_text or not called else "")
        else:
            space = yield from reader.space()
            bracket = "[" if (yield from reader.take("[")) else ""
            if not bracket and (marker == PHI_BEGIN or not (yield from reader.at("{"))):
                reader.no_call(marker + space)
                continue
            if (yield from call_objects(reader, marker + space + bracket, ",", name)):
                called = True
                yield from reader.space()
                yield from reader.take("]")
        yield from reader.space_behind((*begins, *ends))


def parse_minimax_m1(reader: CallReader) -> Wait[None]:
    """``<tool_calls>``, ``{"name": ..., "arguments": {...}}`` for each call, one a line, ``</tool_calls>``."""
    if reader.content_is_json and not (yield from reader.at(MINIMAX_BEGIN)):
        yield from reader.rest()
    while (yield from reader.until((MINIMAX_BEGIN,), reader.plain)):
        yield from _lines(reader)
        yield from reader.space_behind((MINIMAX_BEGIN,))


def _lines(reader: CallReader) -> Wait[None]:
    before = MINIMAX_BEGIN  # shown unless a call follows
    while True:
        between: list[str] = []
        marker = yield from reader.until(("{", MINIMAX_END), between.append)
        text = "".join(between)
        if before and (marker != "{" or text.strip()):
            reader.no_call(before + text + marker)
            return
        if not before:
            reader.plain_unless_space(text)
        if marker != "{":
            return
        reader.unread(marker)
        try:
            yield from json_text.call_object(reader)
        except NotACall as error:
            reader.no_call((before and before + text) + error.text)
            return
        before = ""


def call_objects(reader: CallReader, before: str, separator: str, name: str = "name") -> Wait[bool]:
    """Calls with a separator between them; `before` is shown if there is none. name: of the key of a call's name.
    False: the last object is not a call."""
    while True:
        try:
            yield from json_text.call_object(reader, name)
        except NotACall as error:
            # without a mark before it, the object may be an answer
            (reader.no_call if before.strip() else reader.plain)(before + error.text)
            return False
        space = yield from reader.space()
        if not (yield from reader.take(separator)):
            if (yield from reader.peek()) and separator != ",":
                reader.plain(space)
            return True
        before = separator + (yield from reader.space())


def _named(reader: CallReader, before: str) -> Wait[None]:
    head: list[str] = []
    marker = yield from reader.until((MISTRAL_ARGUMENTS, MISTRAL_ID, "{"), head.append)
    name = "".join(head).strip()
    if marker == MISTRAL_ID:
        head.append(marker)
        marker = yield from reader.until((MISTRAL_ARGUMENTS, "{"), head.append)
    if not marker or not name or any(char.isspace() for char in name):
        reader.no_call(MISTRAL_BEGIN + before + "".join(head) + marker)
        return
    if marker == "{":
        reader.unread(marker)
    else:
        yield from reader.space()
    reader.open(name)
    if (yield from json_text.value(reader, reader.arguments)):
        reader.close()
