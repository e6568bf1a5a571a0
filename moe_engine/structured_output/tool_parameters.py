"""Arguments of calls in formats that write them one by one: each parameter with the texts around its value. No backend.

Parts that such a format cannot enforce are refused by name: keywords of the whole object, names that it cannot write.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any, TypedDict

from moe_engine.errors import InputError
from moe_engine.tokenizer.tool_calls import ParameterSyntax
from moe_engine.tokenizer.tool_calls.plain_text import ANNOTATIONS, is_plain_text

DEFINITIONS = ("$defs", "definitions")
_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties", *DEFINITIONS)) | ANNOTATIONS


class OneParameter(TypedDict):
    """`begin`, value, `end`: a plain text that `schema` allows (`is_text`), or JSON of it."""

    begin: str
    schema: Any
    is_text: bool
    end: str
    required: bool


def parameters_of_call(
    schema: Mapping[str, Any], syntax: ParameterSyntax, field: str, *, strict: bool
) -> list[OneParameter]:
    """The parameters that calls write, in the order of the schema. An optional one that cannot be written is left out.

    Args:
        schema: of the arguments, an object.
        strict: values match their schemas; otherwise parameters of type string are texts and other parameters any JSON.

    Raises:
        InputError: names the part that is not enforced.
    """
    for word in sorted(set(schema) - _OF_OBJECT) if strict else ():
        raise InputError.at(f"{field}.{word}", "is not enforced in this format of calls; leave it out")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        where = f"{field}.required" if isinstance(properties, Mapping) else f"{field}.properties"
        raise InputError.at(where, "has the wrong type")
    rest = schema.get("additionalProperties", True)
    found = []
    for name in [*properties, *(name for name in required if name not in properties)]:
        own = properties.get(name, rest)
        if own is not False and isinstance(name, str) and _is_writable(name, syntax):
            found.append(_parameter(name, own, schema, syntax, name in required, strict))
        elif name in required and strict:
            where = f"{field}.properties" if name in properties else f"{field}.required"
            raise InputError.at(where, f"{name!r:.80} cannot be written in this format of calls")
    return found


def _parameter(
    name: str, schema: Any, whole: Mapping[str, Any], syntax: ParameterSyntax, required: bool, strict: bool
) -> OneParameter:
    text = syntax.before_text is not None and is_plain_text(schema)
    behind = syntax.before_text if text else syntax.after_name
    if not strict:
        schema = {"type": "string"} if text else {}
    elif not text and isinstance(schema, Mapping):
        shared = {word: whole[word] for word in DEFINITIONS if word in whole}
        schema = {**schema, **{word: {**whole[word], **schema.get(word, {})} for word in shared}}
    return OneParameter(
        begin=f"{syntax.before}{name}{behind}", schema=schema, is_text=text, end=syntax.end_of(name, text),
        required=required and strict,
    )  # fmt: skip


def _is_writable(name: str, syntax: ParameterSyntax) -> bool:
    if syntax.before_text is None:
        return name.isidentifier() and not keyword.iskeyword(name)
    return bool(name) and name == name.strip() and name.isprintable() and not set(name) & set(syntax.reserved)
