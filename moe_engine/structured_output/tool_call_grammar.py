"""Tool calls (`tool_choice.Calls`) as a Lark grammar of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moe_engine.structured_output.llguidance_gaps import enforceable
from moe_engine.structured_output.tool_choice import Calls, OneCall

ANY = "(.|\\n)*"


def lark_of_calls(calls: Calls, json_options: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """Args: special_ids: ids of special tokens by text. Other texts are spelled by any tokens."""

    def text(*parts: str) -> str:
        return _literal("".join(parts), special_ids)

    def schema(value: Any) -> str:
        return "%json " + json.dumps({**enforceable(value), "x-guidance": dict(json_options)})

    begin = calls["begin"]

    def head(call: OneCall) -> str:
        behind = f" NUMBER {text(call['after_number'])}" if "after_number" in call else ""
        return text(call["begin"]) + behind

    one = " | ".join(f"{head(call)} {schema(call['schema'])} {text(call['end'])}" for call in calls["calls"])
    more = f"({text(calls['between'])} call)*" if calls["several"] else ""
    lines = ["%llguidance {}", f"call: {one}", f"rest: {text(calls['after_begin'])} call {more} {text(calls['end'])}"]
    if any("after_number" in call for call in calls["calls"]):
        lines.append("NUMBER: /0|[1-9][0-9]?/")
    if calls["required"]:
        start = f"{text(begin)} rest"
    elif "content" in calls:
        start = f"content | {text(begin)} rest"
        lines.append(f"content: {schema(calls['content'])}")
    elif begin in special_ids:
        start = f"free ({text(begin)} rest)?"
        lines += ["free: FREE", f"FREE: /{ANY}/ & ~/{ANY}{_escaped(begin)}{ANY}/"]
    else:
        start = "begin rest | free"
        lines += ["free: TEXT", f"TEXT: /{ANY}/", f"begin[lazy]: TEXT {json.dumps(begin)}"]
    return "\n".join([lines[0], f"start: {start}", *lines[1:]])


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Items of a rule that match a text, special tokens by id."""
    names = "|".join(re.escape(name) for name in sorted(special_ids, key=len, reverse=True) if name)
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts if part)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
