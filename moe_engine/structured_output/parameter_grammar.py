"""Arguments written one by one (`tool_parameters`) as rules of a Lark grammar of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from moe_engine.structured_output.backend import GrammarError
from moe_engine.structured_output.tool_parameters import OneParameter
from moe_engine.tokenizer.tool_calls import ParameterSyntax

CHAR = r"(.|\n)"


class ParameterRules:
    """Rules for the parameters of all functions.

    Args:
        literal: items of a rule that match a text, special tokens by id.
        json_of: an item that matches JSON of a schema.
        split: a text before its first special token, and the rest.
    """

    def __init__(
        self,
        syntax: ParameterSyntax,
        literal: Callable[[str], str],
        json_of: Callable[[Any], str],
        split: Callable[[str], tuple[str, str]],
    ) -> None:
        self._syntax = syntax
        self._literal = literal
        self._json_of = json_of
        self._split = split
        self._count = 0
        self.lines: list[str] = []

    def add(self, parameters: Sequence[OneParameter]) -> str:
        """An item that matches the arguments of one function, in this order."""
        items = [self._rule("p", self._one(parameter)) for parameter in parameters]
        if not self._syntax.between:
            return " ".join(item if parameter["required"] else f"{item}?" for item, parameter in zip(items, parameters))
        return self._separated(items, [parameter["required"] for parameter in parameters])

    def _separated(self, items: list[str], required: list[bool]) -> str:
        """Items with separators; each rule is the rest of the list, after an item or at its beginning."""
        behind = first = ""
        between = self._literal(self._syntax.between)
        for item, needed in zip(reversed(items), reversed(required)):
            one = f"{between} {item}"
            whole = f"{item} {behind}".strip()
            new_first = whole if needed else f"{whole} | {first}" if first else f"({whole})?"
            new_behind = f"{one if needed else f'({one})?'} {behind}".strip()
            first, behind = self._rule("first", new_first), self._rule("behind", new_behind)
        return first

    def _one(self, parameter: OneParameter) -> str:
        begin = self._literal(parameter["begin"])
        if parameter["is_text"]:
            return f"{begin} {self._text(parameter['schema'], parameter['end'])}"
        return f"{begin} {self._json_of(parameter['schema'])} {self._literal(parameter['end'])}".strip()

    def _text(self, schema: Any, end: str) -> str:
        """A plain text that the schema allows, and `end`."""
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if "enum" in schema or "const" in schema:
            return f"{self._one_of(schema)} {self._literal(end)}"
        plain, rest = self._split(end)
        bounds = f"{{{low},{'' if high is None else high}}}"
        last = end[end.index(self._syntax.value_end) + len(self._syntax.value_end) :]
        more = f"{CHAR}{{{len(last) + 1},}}" if not rest else f"{CHAR}*"
        parts = [f"/{CHAR}{bounds}{escaped(plain)}/", f"~/{CHAR}*{escaped(self._syntax.value_end)}{more}/"]
        if self._syntax.trims:
            parts += [f"~/\\n{CHAR}*/", f"~/{CHAR}*\\n{escaped(plain)}/"]
        self._count += 1
        name = f"TEXT_{self._count}"
        self.lines.append(f"{name}: {' & '.join(parts)}")
        return f"{name} {self._literal(rest)}".strip()

    def _one_of(self, schema: Any) -> str:
        values = [value for value in schema.get("enum", [schema.get("const")]) if self._fits(value, schema)]
        if not values:
            raise GrammarError("an enum or const has no value that this format of calls can write")
        listed = " | ".join(json.dumps(value, ensure_ascii=False) for value in values if value)
        return (f"({listed})" if listed else "") + ("?" if listed and "" in values else "")

    def _fits(self, value: str, schema: Any) -> bool:
        if "const" in schema and value != schema["const"]:
            return False
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            return False
        return self._syntax.value_end not in value and not (self._syntax.trims and value != value.strip("\n"))

    def _rule(self, name: str, content: str) -> str:
        self._count += 1
        self.lines.append(f"{name}_{self._count}: {content}")
        return f"{name}_{self._count}"


def escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
