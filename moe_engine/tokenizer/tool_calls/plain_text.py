"""Decides which arguments of enforced calls are plain text; shared by grammar and parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment")
)
_OF_TEXT = frozenset(("type", "enum", "const", "minLength", "maxLength"))


def is_plain_text(schema: Any) -> bool:
    """Whether a parameter is a string whose schema a grammar of plain text enforces. Other parameters are JSON."""
    if not isinstance(schema, Mapping) or set(schema) - _OF_TEXT - ANNOTATIONS:
        return False
    listed = schema.get("enum", [])
    values = [*(listed if isinstance(listed, list) else [None]), *([schema["const"]] if "const" in schema else [])]
    if not all(isinstance(value, str) for value in values):
        return False
    return schema.get("type") == "string" or (bool(values) and "type" not in schema)


def schema_of(parameters: Any, name: str) -> Any:
    """The schema of a parameter; None if there is none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None
