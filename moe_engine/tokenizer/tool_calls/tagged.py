"""Formats that write each argument between tags: Qwen3-Coder, MiMo, GLM 4.5, DeepSeek V3.2 and V4 (DSML), MiniMax M2,
Hy3, dots, Kimi K3, LongCat, Seed-OSS.

Texts become JSON by the function's schema: a string stays as it is, other values are read as JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_engine.tokenizer import xtml
from moe_engine.tokenizer.tool_calls import json_text
from moe_engine.tokenizer.tool_calls.call_reader import CallReader, Wait
from moe_engine.tokenizer.tool_calls.objects import call_objects
from moe_engine.tokenizer.tool_calls.plain_text import is_plain_text, schema_of

DSML = "｜DSML｜"


@dataclass(frozen=True)
class TaggedFormat:
    """Tags in the order in which they occur.

    `name_ends`: the first one is skipped, others belong to the text that follows. `key_end` ends the name of a
    parameter; between it and `value_begin` there may be white space or attributes. `trims`: one line end after
    `value_begin` and before `value_end` is not part of the value. `block_may_be_json`: between `begin` and `end` may be
    a call as a JSON object, or a list of them (Hunyuan-A13B). `may_be_json`: so may the arguments of a call.
    `implied_ends`: line ends with tags that also end a value, unless a grammar enforces `value_end`. `head_end`: end of
    attributes after the name of a call.
    """

    begin: str
    call_begin: str
    name_ends: tuple[str, ...]
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    call_end: str
    end: str
    trims: bool = False
    may_be_json: bool = False
    block_may_be_json: bool = False
    implied_ends: tuple[str, ...] = ()
    head_end: str = ""

    def parse(self, reader: CallReader) -> Wait[None]:
        if reader.content_is_json and not (yield from reader.at(self.begin)):
            yield from reader.rest()
        begins = (self.begin, self.call_begin) if self.call_begin else (self.begin,)
        while marker := (yield from reader.until(begins, reader.plain)):
            if marker == self.begin:
                yield from self._calls(reader)
            else:
                yield from self._call(reader)
            yield from reader.space_behind(begins)

    def _calls(self, reader: CallReader) -> Wait[None]:
        block = self.begin  # shown unless a call follows
        if self.block_may_be_json:
            block += yield from reader.space()
            if (yield from reader.at("[")) or (yield from reader.at("{")):
                yield from self._objects(reader, block)
                return
        if not self.call_begin:
            yield from self._call(reader, space=block.removeprefix(self.begin))
            return
        any_call = False
        while True:
            between: list[str] = []
            marker = yield from reader.until((self.call_begin, self.end), between.append)
            text = "".join(between)
            if block and (marker != self.call_begin or text.strip()):
                reader.no_call(block + text)
                block, text = "", ""
            if not block:
                reader.plain_unless_space(text)
            if marker != self.call_begin:
                reader.plain("" if any_call else marker)
                return
            if (yield from self._call(reader, block + text if block else "")):
                any_call = True
            block = ""

    def _objects(self, reader: CallReader, before: str) -> Wait[None]:
        """`before` is shown if there is no call."""
        is_list = yield from reader.take("[")
        if (yield from call_objects(reader, before + "[" * is_list, ",")):
            yield from reader.space()
            if is_list:
                yield from reader.take("]")
            behind: list[str] = []
            yield from reader.until((self.end,), behind.append)
            reader.plain_unless_space("".join(behind))

    def _call(self, reader: CallReader, before: str = "", space: str = "") -> Wait[bool]:
        """`before` is shown if there is no call, and `space` after the start. False: there is no call."""
        head: list[str] = []
        marker = yield from reader.until(self.name_ends, head.append)
        name = "".join(head).strip()
        if not marker or not name:
            reader.no_call(before + (self.call_begin or self.begin) + space + "".join(head) + marker)
            return False
        if marker != self.name_ends[0]:
            reader.unread(marker)
        reader.open(name)
        if self.head_end:
            yield from reader.until((self.head_end,), lambda _: None)
        if self.may_be_json:
            yield from reader.space()
            if (yield from reader.at("{")):
                yield from json_text.value(reader, reader.arguments)
                behind: list[str] = []
                if (yield from reader.until((self.call_end,), behind.append)):
                    reader.close()
                reader.plain_unless_space("".join(behind))
                return True
        yield from self._parameters(reader, (reader.functions or {}).get(name))
        return True

    def _parameters(self, reader: CallReader, schema: Any) -> Wait[None]:
        before = "{"
        while True:
            between: list[str] = []
            ends = (self.call_end,) if self.call_end == self.end else (self.call_end, self.end)
            marker = yield from reader.until((self.key_begin, *ends), between.append)
            reader.plain_unless_space("".join(between))
            if marker != self.key_begin:
                break
            key: list[str] = []
            marker = yield from reader.until((self.key_end,), key.append)
            attributes: list[str] = []
            if marker and self.value_begin:
                marker = yield from reader.until((self.value_begin,), attributes.append)
            if not marker:
                return
            name = "".join(key).strip()
            reader.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            if reader.is_json and not is_plain_text(schema_of(schema, name)):
                yield from self._enforced(reader)
            else:
                yield from self._value(reader, _types(schema, name, "".join(attributes)))
            before = ", "
        if marker:
            reader.arguments("{}" if before == "{" else "}")
            reader.close()
            if marker == self.end and self.call_end != self.end:
                reader.unread(marker)

    def _enforced(self, reader: CallReader) -> Wait[None]:
        """JSON that a grammar enforces: tags in its strings are text."""
        yield from reader.space()
        if (yield from reader.peek()) in ('"', "{", "["):
            yield from json_text.value(reader, reader.arguments)
            yield from reader.until((self.value_end,), lambda _: None)
            return
        parts: list[str] = []
        yield from reader.until((self.value_end,), parts.append)
        reader.arguments("".join(parts).strip())

    def _value(self, reader: CallReader, types: frozenset[str] | None) -> Wait[None]:
        if self.trims:
            yield from reader.take("\n")
        if types == {"string"}:
            text = JsonString(reader.arguments, self.trims)
            whole = yield from self._until_end(reader, text.push)
            text.finish(whole)
            return
        parts: list[str] = []
        yield from self._until_end(reader, parts.append)
        value = "".join(parts)
        reader.arguments(json_of(value.removesuffix("\n") if self.trims else value, types))

    def _until_end(self, reader: CallReader, sink: Callable[[str], None]) -> Wait[bool]:
        """Whether the value has an end."""
        implied = () if reader.is_json else self.implied_ends
        marker = yield from reader.until((self.value_end, *implied), sink)
        if marker in implied:
            sink("\n")
            reader.unread(marker.removeprefix("\n"))
        return bool(marker)


class JsonString:
    """A value as a JSON string, in pieces."""

    def __init__(self, sink: Callable[[str], None], trims: bool = False) -> None:
        self._sink, self._trims = sink, trims
        self._held = ""
        sink('"')

    def push(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if self._trims and text.endswith("\n") else ""
        self._write(text.removesuffix(self._held) if self._held else text)

    def finish(self, whole: bool) -> None:
        if whole:
            self._sink('"')
        else:
            self._write(self._held)

    def _write(self, text: str) -> None:
        self._sink(json.dumps(text, ensure_ascii=False)[1:-1])


def _types(schema: Any, key: str, attributes: str) -> frozenset[str] | None:
    """The JSON types of a parameter; None if they are unknown."""
    if 'string="true"' in attributes or 'type="string"' in attributes:
        return frozenset({"string"})
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = declared_types(properties.get(key)) if isinstance(properties, Mapping) else None
    if 'string="false"' in attributes or ' type="' in attributes:
        return None if found is None else found - {"string"}
    return found


def declared_types(schema: Any, depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema allows; None if they are unknown."""
    if not isinstance(schema, Mapping) or depth > 8:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(str(one) for one in kind)
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(one) for one in schema["enum"])
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [declared_types(part, depth + 1) for part in schema[word]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
    return None


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def json_of(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON. It is a string if it is no other value that the schema allows; templates write strings without
    quotation marks, so that those in the text belong to it."""
    value = _read(text.strip())
    if value is not None:
        kind = _type_of(json.loads(value))
        fits = types is None or kind in types - {"string"} or (kind == "integer" and "number" in types)
        if fits or "string" not in (types or ()):
            return value
    return json.dumps(text, ensure_ascii=False)


def _read(text: str) -> str | None:
    """JSON, or Python's spelling of a constant."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False) if len(text) < 10_000 else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(name)


QWEN3_CODER = TaggedFormat(
    "<tool_call>", "<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>",
    trims=True, implied_ends=("\n<parameter=", "\n</function>"),
)  # fmt: skip
MIMO = replace(QWEN3_CODER, trims=False, implied_ends=())
SEED_OSS = replace(MIMO, begin="<seed:tool_call>", end="</seed:tool_call>")
GLM45 = TaggedFormat(
    "<tool_call>", "", ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "</tool_call>", "</tool_call>",
)  # fmt: skip
LONGCAT = TaggedFormat(
    "<longcat_tool_call>", "", ("\n", "<longcat_arg_key>", "</longcat_tool_call>"), "<longcat_arg_key>",
    "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>", "</longcat_tool_call>",
    "</longcat_tool_call>", block_may_be_json=True,
)  # fmt: skip
"""The first release writes JSON, later ones tags."""
MINIMAX_M2 = TaggedFormat(
    "<minimax:tool_call>", '<invoke name="', ('">',), '<parameter name="', '"', ">", "</parameter>", "</invoke>",
    "</minimax:tool_call>", trims=True,
)  # fmt: skip
KIMI_K3 = TaggedFormat(
    xtml.TOOLS, f'{xtml.OPEN}call tool="', ('"',), f'{xtml.OPEN}argument key="', '"', xtml.SEP,
    xtml.closed("argument"), xtml.closed("call"), xtml.closed("tools"), head_end=xtml.SEP,
)  # fmt: skip
DOTS = replace(MINIMAX_M2, begin="<dots_function_call>", end="</dots_function_call>", block_may_be_json=True)


def hunyuan(suffix: str) -> TaggedFormat:
    """The format of Hy3 and, as JSON, of Hunyuan-A13B. Args: suffix: of the names of tags."""
    open_, close = (f"<{{}}{suffix}>".format, f"</{{}}{suffix}>".format)
    return TaggedFormat(
        open_("tool_calls"), open_("tool_call"), (open_("tool_sep"), open_("arg_key"), close("tool_call")),
        open_("arg_key"), close("arg_key"), open_("arg_value"), close("arg_value"), close("tool_call"),
        close("tool_calls"), block_may_be_json=True,
    )  # fmt: skip


def dsml(block: str, mark: str = DSML) -> TaggedFormat:
    """DeepSeek's format, with the name of its block and the mark before the names of tags."""
    return TaggedFormat(
        f"<{mark}{block}>", f'<{mark}invoke name="', ('">',), f'<{mark}parameter name="', '"', ">",
        f"</{mark}parameter>", f"</{mark}invoke>", f"</{mark}{block}>", may_be_json=True,
    )  # fmt: skip
