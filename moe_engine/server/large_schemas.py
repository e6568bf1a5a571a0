"""Large JSON schemas in request bodies: cut out before the body is decoded, and kept as the client wrote them.

To decode a schema of 100 KB, check it and encode it again takes 1 to 3 ms, in which the interpreter serves no stream.
Only the process that compiles grammars needs its content (`Constraint.unread`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from moe_engine.structured_output.request import UNREAD_CHARS

MARKER = b"json"
"""Each of the places has this in a name or in its type."""
PREFIX_BYTES = 256


class _Schema(msgspec.Struct):
    schema: Raw = Raw()


class _Described(msgspec.Struct):
    json_schema: _Schema | None = None


class _Json(msgspec.Struct):
    json: Raw = Raw()


class _JsonSchema(msgspec.Struct):
    json_schema: Raw = Raw()


class _Format(msgspec.Struct):
    format: _Schema | None = None


class _Body(msgspec.Struct):
    response_format: _Described | None = None
    guided_json: Raw = Raw()
    json_schema: Raw = Raw()
    structured_outputs: _Json | None = None
    output_config: _Format | None = None
    text: Raw = Raw()
    sampling_params: Raw = Raw()


PLACES = (
    ("response_format", "json_schema", "schema"),
    ("guided_json",),
    ("json_schema",),
    ("structured_outputs", "json"),
    ("output_config", "format", "schema"),
    ("text", "format", "schema"),
    ("sampling_params", "json_schema"),
)
"""Places of schemas in the bodies of all endpoints."""
AMBIGUOUS: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(kind) for name, kind in (("text", _Format), ("sampling_params", _JsonSchema))
}
"""Fields whose form depends on the endpoint or the client."""
_decode = msgspec.json.Decoder(_Body).decode


class LargeSchema:
    """A schema that was cut out of a body, and its place."""

    def __init__(self, place: tuple[str, ...], text: bytes) -> None:
        self._place = place
        self._text = text

    def put_back(self, request: Any) -> None:
        """Sets the schema's place in the decoded request, a struct, to the `msgspec.Raw` of its text."""
        *path, last = self._place
        holder: Any = request
        for name in path:
            holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
        if isinstance(holder, dict):
            holder[last] = Raw(self._text)
        else:
            setattr(holder, last, Raw(self._text))


def cut_schema(body: bytes | bytearray, kind: Any) -> tuple[bytes | bytearray, LargeSchema | None]:
    """The body with ``{}`` instead of its large schema, if it has one that is an object. A body that is not valid
    JSON, or whose fields have other types, is returned as it is.

    Args:
        kind: the type of the request.
    """
    if len(body) < UNREAD_CHARS or not isinstance(body, bytes) or MARKER not in body:
        return body, None
    try:
        found = _largest(_decode(body), getattr(kind, "__struct_fields__", ()))
        if found is None:
            return body, None
        place, text = found
        text.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, None
    begin = _only_place(body, text)
    if begin is None:
        return body, None
    return body[:begin] + b"{}" + body[begin + len(text) :], LargeSchema(place, text)


def _largest(body: _Body, fields: tuple[str, ...]) -> tuple[tuple[str, ...], bytes] | None:
    """The largest schema that is an object of at least `UNREAD_CHARS` bytes, with its place."""
    found = None
    for place in PLACES:
        value: Any = getattr(body, place[0]) if place[0] in fields else None
        if place[0] in AMBIGUOUS:
            large = value is not None and bytes(memoryview(value)[:1]) == b"{" and len(memoryview(value)) > UNREAD_CHARS
            value = AMBIGUOUS[place[0]].decode(value) if large else None
        for name in place[1:]:
            value = None if value is None else getattr(value, name)
        text = b"" if value is None else bytes(value)
        if text[:1] == b"{" and len(text) >= max(UNREAD_CHARS, 0 if found is None else len(found[1])):
            found = place, text
    return found


def _only_place(body: bytes, text: bytes) -> int | None:
    """Where a text begins in the body; None if it is there twice, for instance also as a tool's parameters."""
    found, prefix, begin = None, text[:PREFIX_BYTES], -1
    while (begin := body.find(prefix, begin + 1)) >= 0:
        if body.startswith(text, begin):
            if found is not None:
                return None
            found = begin
            begin += len(text) - 1
    return found
