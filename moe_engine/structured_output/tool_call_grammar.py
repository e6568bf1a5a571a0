"""Tool calls (`tool_choice.Calls`) as a Lark grammar of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moe_engine.structured_output.llguidance_gaps import enforceable
from moe_engine.structured_output.parameter_grammar import ParameterRules, escaped
from moe_engine.structured_output.tool_choice import Calls, OneCall
from moe_engine.tokenizer.tool_calls import TOOL_FORMATS, CallSyntax

ANY = "(.|\\n)*"
SPACE = r"[ \t\r\n]*"


def lark_of_calls(calls: Calls, json_options: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """Args: special_ids: ids of special tokens by text. Other texts are spelled by any tokens."""

    def text(*parts: str) -> str:
        return _literal("".join(parts), special_ids)

    def schema(value: Any) -> str:
        return "%json " + json.dumps({**enforceable(value), "x-guidance": dict(json_options)})

    begin, syntax, rules = calls["begin"], None, None
    if "form" in calls:
        syntax = TOOL_FORMATS[calls["form"]].syntax
        assert syntax.parameters is not None
        rules = ParameterRules(syntax.parameters, text, schema, lambda end: _split(end, special_ids))

    def behind_name(call: OneCall) -> str:
        number = f"NUMBER {text(call['after_number'])}" if "after_number" in call else ""
        arguments = schema(call["schema"]) if rules is None else rules.add(call.get("parameters", []))
        return f"{number} {arguments} {text(call['end'])}"

    bodies = [behind_name(call) for call in calls["calls"]]
    one = " | ".join(f"{text(call['begin'])} {body}" for call, body in zip(calls["calls"], bodies))
    more = f"({text(calls['between'])} call)*" if calls["several"] else ""
    lines = [f"call: {one}", f"rest: {text(calls['after_begin'])} call {more} {text(calls['end'])}"]
    lines += [] if rules is None else rules.lines
    if any("after_number" in call for call in calls["calls"]):
        lines.append("NUMBER: /0|[1-9][0-9]?/")
    if calls["required"]:
        start = f"{text(begin)} rest"
    elif "content" in calls:
        start = f"content | {text(begin)} rest"
        lines.append(f"content: {schema(calls['content'])}")
    elif syntax is not None:
        start = "free | " + " | ".join(_behind_text(calls, syntax, bodies, more, special_ids, lines))
    elif begin in special_ids:
        start = f"free ({text(begin)} rest)?"
        lines += ["free: FREE", f"FREE: /{ANY}/ & ~/{ANY}{escaped(begin)}{ANY}/"]
    else:
        start = "begin rest | free"
        lines += ["free: TEXT", f"TEXT: /{ANY}/", f"begin[lazy]: TEXT {json.dumps(begin)}"]
    return "\n".join(["%llguidance {}", f"start: {start}", *lines])


def _behind_text(
    calls: Calls, syntax: CallSyntax, bodies: list[str], more: str, special_ids: Mapping[str, int], lines: list[str]
) -> list[str]:
    """Calls after free text, which contains no text that the parser would read as a call. Adds rules to `lines`."""
    begin = calls["begin"]
    if begin == "[":  # it may be text
        names = [escaped(call["name"]) for call in calls["calls"]]
        found = [rf"\[{SPACE}{name}{SPACE}\(" for name in names]
        any_begin = rf"\[{SPACE}({'|'.join(names)}){SPACE}\("
        lines += ["free: FREE", f"FREE: /{ANY}/ & ~/{ANY}{any_begin}{ANY}/"]
        lines += [f"BEGIN_{i}: /{ANY}{one}/ & ~/{ANY}{any_begin}(.|\\n)+/" for i, one in enumerate(found)]
        end = _literal(calls["end"], special_ids)
        return [f"BEGIN_{i} {body} {more} {end}" for i, body in enumerate(bodies)]
    plain, rest = _split(begin, special_ids)
    other = f" & ~/{ANY}{escaped(syntax.also_begins)}{ANY}/" if syntax.also_begins else ""
    after = "(.|\\n)+" if not rest else ANY
    lines += [
        "free: FREE",
        f"FREE: /{ANY}/ & ~/{ANY}{escaped(begin)}{ANY}/{other}",
        f"BEGIN: /{ANY}{escaped(plain)}/ & ~/{ANY}{escaped(begin)}{after}/{other}",
    ]
    return [f"BEGIN {_literal(rest, special_ids)} rest"]


def _split(text: str, special_ids: Mapping[str, int]) -> tuple[str, str]:
    """A text before its first special token, and the rest."""
    places = [place for name in special_ids if name and (place := text.find(name)) >= 0]
    first = min(places, default=len(text))
    return text[:first], text[first:]


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Items of a rule that match a text, special tokens by id."""
    names = "|".join(re.escape(name) for name in sorted(special_ids, key=len, reverse=True) if name)
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts if part)
