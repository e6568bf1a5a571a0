"""The constraint of a request: one of several fields, in the spellings of SGLang, vLLM and OpenAI. No backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from moe_engine.errors import InputError
from moe_engine.types.constraint import Constraint
from moe_engine.validation import check_unicode

MAX_DEPTH = 100
"""Max nesting of objects and lists in a schema."""
MAX_CHARS = 4 << 20

KINDS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "choice": "choice",
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
"""Fields of SGLang, and vLLM's `guided_...`."""
IN_STRUCTURED_OUTPUTS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM's `structured_outputs`."""
ANY_OBJECT = '{"type":"object"}'

MAX_KEPT, MAX_KEPT_BYTES = 256, 64 << 10
"""Number of values whose JSON is kept, and the largest one: requests repeat their schemas."""
UNREAD_CHARS = 8 << 10
"""JSON schemas of at least this length are read by the process that compiles grammars."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

Found = tuple[str, str, Any]
"""Client's name, kind, value."""


def find_constraint(request: msgspec.Struct, where: str = "") -> Constraint | None:
    """The constraint of a request, or None.

    Args:
        where: the client's name of the object with the fields; "" for the top level.

    Raises:
        InputError: the value has the wrong form, or two fields with different constraints are set.
    """
    prefix = f"{where}." if where else ""
    found = [
        (prefix + name, kind, value)
        for name, kind in KINDS.items()
        if (value := getattr(request, name, None)) not in (None, False)
    ]
    found += _of_structured_outputs(getattr(request, "structured_outputs", None))
    found += _of_response_format(getattr(request, "response_format", None))
    if not found:
        return None
    first, *others = found
    for second, *same in others:  # clients send the fields of several versions of a server
        if same != list(first[1:]):
            words = f"{first[0]} and {second}: a request has one constraint at most; leave one out"
            raise InputError(words, field=second)
    return _constraint(*first)


def _of_structured_outputs(value: Mapping[str, Any] | None) -> Iterator[Found]:
    for name, given in (value or {}).items():
        if given in (None, False):
            continue
        field = f"structured_outputs.{name}"
        if name not in IN_STRUCTURED_OUTPUTS:
            known = ", ".join(IN_STRUCTURED_OUTPUTS)
            raise InputError.at(field, f"not available yet in moe-engine; known are {known}")
        yield field, IN_STRUCTURED_OUTPUTS[name], given


def _of_response_format(form: Mapping[str, Any] | None) -> Iterator[Found]:
    kind = (form or {}).get("type", "text")
    if form is None or kind == "text":
        return
    if kind == "json_object":
        yield "response_format", "json_object", True
    elif kind == "json_schema":
        field = "response_format.json_schema"
        described = form.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise InputError.at(field, "expected an object with name and schema")
        yield f"{field}.schema", "json_schema", described["schema"]
    elif kind == "structural_tag":
        yield "response_format", "structural_tag", form
    else:
        words = "use text, json_object, json_schema or structural_tag"
        raise InputError(f"response_format.type: {kind!r:.40} is unknown; {words}", field="response_format")


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    unread = False
    if kind == "json_object":
        if value is not True:
            raise InputError.at(field, f"expected true or false, got {value!r:.80}")
        kind, source = "json_schema", ANY_OBJECT
    elif kind == "json_schema" and (text := _large_text(value, field)) is not None:
        source, unread = text, True
    elif kind in ("json_schema", "structural_tag"):
        source = json_source(field, value, (dict, bool) if kind == "json_schema" else (dict,))
    elif kind == "choice":
        source = _choices(field, value)
    else:
        if not isinstance(value, str) or not value:
            raise InputError.at(field, f"expected a string, got {value!r:.80}")
        check_unicode(value, field)
        source = value
    if len(source) > MAX_CHARS:
        raise InputError.at(field, f"{len(source)} characters; at most {MAX_CHARS} are allowed")
    return Constraint(kind, source, field, unread=unread)


def _choices(field: str, value: Any) -> str:
    if not isinstance(value, list) or not value or {*map(type, value)} != {str} or "" in value:
        raise InputError.at(field, f"expected a list of texts, got {value!r:.80}")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        for i, one in enumerate(value):
            check_unicode(one, f"{field}[{i}]")
    return json.dumps(value)


def _large_text(value: Any, field: str) -> str | None:
    """The text of a schema that is not read here; None: it is."""
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    if not isinstance(value, str) or len(value) < UNREAD_CHARS:
        return None
    check_unicode(value, field)
    return value


def read_constraint(constraint: Constraint) -> Constraint:
    """The constraint with its JSON checked, in compact form. Takes milliseconds for 100 KB.

    Raises:
        InputError: as `find_constraint`, for a constraint that is `unread`.
    """
    if not constraint.unread:
        return constraint
    return replace(constraint, source=json_source(constraint.where, constraint.source, (dict, bool)), unread=False)


def json_source(field: str, value: Any, types: tuple[type, ...]) -> str:
    """A JSON value, or its text, as compact JSON. The order of keys is kept: properties are generated in this order."""
    try:
        if isinstance(value, str):
            if (plain := _plain_json(value, types)) is not None:
                return plain
            value = json.loads(value)
        elif (kept := _kept_json(value, types)) is not None:
            return kept
        source = _dumps(value)
        source.encode()
        if source.count("{") + source.count("[") > MAX_DEPTH:
            _check_depth(field, value)
    except json.JSONDecodeError as error:
        raise InputError.at(field, f"is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError.at(field, f"nested too deep; at most {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise InputError.at(field, "contains half of a surrogate pair; send valid Unicode") from None
    except ValueError as error:
        why = "an object or list contains itself" if "Circular" in str(error) else "a number is not finite, or too long"
        raise InputError.at(field, why) from None
    if not isinstance(value, types):
        raise InputError.at(field, f"expected a JSON object, got {source:.80}")
    return source


def _plain_json(text: str, types: tuple[type, ...]) -> str | None:
    """The compact JSON of a text without deep nesting, several times as fast as the standard library, which blocks all
    threads meanwhile. None: use the standard library."""
    if text.count("{") + text.count("[") > MAX_DEPTH:
        return None
    try:
        value = _decode(text)
        return _encode(value).decode() if isinstance(value, types) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _kept_json(value: Any, types: tuple[type, ...]) -> str | None:
    """The compact JSON of an object without deep nesting, which is kept. None: use the standard library."""
    try:
        packed = _pack(value)  # unlike JSON, distinguishes NaN from null
        return _json_of(packed) if isinstance(value, types) and len(packed) <= MAX_KEPT_BYTES else None
    except Exception:  # not JSON: the standard library's error has the reason
        return None


@lru_cache(MAX_KEPT)
def _json_of(packed: bytes) -> str | None:
    source = _dumps(_unpack(packed))
    return source if source.count("{") + source.count("[") <= MAX_DEPTH else None


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _check_depth(field: str, value: Any) -> None:
    level, depth = [value], 0
    while level := [
        entry for item in level if isinstance(item, (dict, list))
        for entry in (item.values() if isinstance(item, dict) else item)
    ]:  # fmt: skip
        depth += 1
        if depth > MAX_DEPTH:
            raise InputError.at(field, f"nested too deep; at most {MAX_DEPTH} levels")
