"""Structural tags as a Lark grammar of llguidance: free text with tagged parts, whose contents match a schema each.

Both forms of SGLang: ``structures`` with ``triggers``, and xgrammar's ``format`` of type ``triggered_tags``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.structured_output.backend import GrammarError
from moe_engine.structured_output.llguidance_gaps import enforceable


@dataclass(frozen=True)
class Tag:
    """`begin` is followed by JSON of `schema`, then `end`. Free text that contains `trigger` must continue a tag."""

    trigger: str
    begin: str
    schema: Any
    end: str


@dataclass(frozen=True)
class Tags:
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False


def lark_of_tags(source: str, json_options: Mapping[str, Any]) -> str:
    """Raises GrammarError for a wrong or unavailable structural tag."""
    found = _tags(json.loads(source))
    by_trigger: dict[str, list[Tag]] = {}
    for tag in found.tags:
        by_trigger.setdefault(tag.trigger, []).append(tag)
    lines = []
    for number, (trigger, tags) in enumerate(by_trigger.items()):
        lines.append(f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}")
        bodies = " | ".join(_body(tag, json_options) for tag in tags)
        lines.append(f"tag_{number}: trigger_{number} ({bodies})")
    choice = "(" + " | ".join(f"tag_{number}" for number in range(len(by_trigger))) + ")"
    if found.stop_after_first:
        start = choice if found.at_least_one else f"{choice} | rest"
    else:
        start = f"{choice}{'+' if found.at_least_one else '*'} rest"
    return "\n".join(["%llguidance {}", f"start: {start}", "rest: TEXT", "TEXT: /(.|\\n)*/", *lines])


def _body(tag: Tag, json_options: Mapping[str, Any]) -> str:
    schema = {**enforceable(tag.schema), "x-guidance": dict(json_options)}
    parts = [json.dumps(tag.begin[len(tag.trigger) :]), "%json " + json.dumps(schema), json.dumps(tag.end)]
    return " ".join(part for part in parts if part != '""')


def _tags(value: Mapping[str, Any]) -> Tags:
    form = value.get("format")
    if form is None:
        structures = value.get("structures")
        if not isinstance(structures, list) or not structures:
            raise GrammarError("expected structures (a list with begin, schema and end each) and triggers")
        return Tags(_with_triggers([_structure(one) for one in structures], value.get("triggers")))
    kind = form.get("type") if isinstance(form, dict) else None
    if kind != "triggered_tags":
        raise GrammarError(f"format.type {kind!r:.40} is not available yet; use triggered_tags")
    if form.get("excludes"):
        raise GrammarError("format.excludes is not available yet")
    listed = form.get("tags")
    if not isinstance(listed, list) or not listed:
        raise GrammarError("format.tags: expected a list of tags")
    tags = _with_triggers([_tag(one) for one in listed], form.get("triggers"))
    return Tags(tags, bool(form.get("at_least_one")), bool(form.get("stop_after_first")))


def _structure(one: Any) -> Tag:
    if not isinstance(one, dict) or not isinstance(one.get("begin"), str):
        raise GrammarError("structures: expected objects with begin, schema and end")
    schema = one.get("schema")
    return Tag("", one["begin"], {} if schema is None else schema, str(one.get("end") or ""))


def _tag(one: Any) -> Tag:
    content = one.get("content") if isinstance(one, dict) else None
    if not isinstance(content, dict) or not isinstance(one.get("begin"), str):
        raise GrammarError("format.tags: expected objects with begin, content and end")
    if content.get("type") != "json_schema":
        raise GrammarError(
            f"format.tags: content of type {content.get('type')!r:.40} is not available yet; use json_schema"
        )
    return Tag("", one["begin"], content.get("json_schema", {}), str(one.get("end") or ""))


def _with_triggers(tags: list[Tag], triggers: Any) -> tuple[Tag, ...]:
    """Each tag with the first trigger that is a prefix of its beginning."""
    if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
        raise GrammarError("triggers: expected a list of texts")
    found = []
    for tag in tags:
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise GrammarError(f"triggers: none is the beginning of {tag.begin!r:.80}")
        found.append(Tag(trigger, tag.begin, tag.schema, tag.end))
    return tuple(found)
