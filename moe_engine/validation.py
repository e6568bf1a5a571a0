"""Checks of clients' values against types, and of their text. Errors name the field, the expectation and the value."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec

from moe_engine.errors import InputError, did_you_mean

T = TypeVar("T")

NotAvailable = Annotated[Any, msgspec.Meta(description="not available yet; leave it out")]
"""Type of a field that is known and not implemented yet: null only."""

OffOnly = Annotated[Any, msgspec.Meta(description="not available yet; leave it out or empty")]
"""Like `NotAvailable`, for fields that clients send empty or false by default."""

_EFFORT = "^[A-Za-z][A-Za-z0-9_-]{0,31}$"
Effort = Annotated[
    str,
    msgspec.Meta(
        pattern=_EFFORT,
        description="passed to the chat template: minimal, low, medium, high, xhigh, max, or a word of its own; "
        "switches the thinking on, none off",
    ),
]
"""How much a model reasons."""

_PATH = r"^[^\x00]*$"
PathText = Annotated[str, msgspec.Meta(pattern=_PATH)]
"""A path or a part of one: the system refuses null characters."""

_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip


_INSTEAD = {
    "functions": "send tools", "chat_template": "start the server with --chat-template FILE",
    "documents": "send them in chat_template_kwargs",
    "truncate_prompt_tokens": "start the server with --allow-auto-truncate",
    "thread": "send the whole conversation in messages",
}  # fmt: skip
"""The fix for a field that is not available, if it is another than to leave it out."""


def refuse_unavailable(request: msgspec.Struct, where: str = "") -> None:
    """Raises InputError for a `NotAvailable` or `OffOnly` field that is set; `where`: see `checked`."""
    for name, may_be_empty in _unavailable(type(request)):
        value = getattr(request, name)
        if value if may_be_empty else value is not None:
            instead = _INSTEAD.get(name, "leave it out")
            name = f"{where}.{name}".lstrip(".")
            raise InputError.at(name, f"not available yet in moe-engine; {instead}")


@cache
def _unavailable(kind: type[msgspec.Struct]) -> list[tuple[str, bool]]:
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type == OffOnly) for field in fields if field.type in (NotAvailable, OffOnly)]


_prepared: set[Any] = set()
_preparing = threading.Lock()


def prepared(kind: type[T]) -> type[T]:
    """The type, once msgspec has gathered its fields.

    msgspec does so at the first use of a type. A second thread that uses the type meanwhile reads fields that are still
    missing, and the process crashes. Types that several threads decode go through here, or have a decoder from import
    on.
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


def checked(value: Any, kind: type[T], where: str = "", *, strict: bool = True) -> T:
    """Converts decoded JSON to a type, with its constraints.

    Args:
        where: name of the value in messages; "" for a whole body.
        strict: False: strings may hold numbers, as in a query.

    Raises:
        InputError: names the field.
    """
    try:
        return msgspec.convert(value, prepared(kind), str_keys=True, strict=strict)
    except msgspec.ValidationError as exc:
        raise _error(str(exc), value, kind, where) from None


def _error(message: str, value: Any, kind: Any, where: str) -> InputError:
    """Rewrites msgspec's "Expected `int`, got `str` - at `$.n`"."""
    what, _, place = message.partition(" - at `")
    path = place.partition("$")[2].partition("[...]")[0].rstrip("`")
    field = (where + path).lstrip(".")
    name = re.search("`(.*)`", what)
    if name and what.startswith("Object missing required field"):
        field = f"{field}.{name[1]}".lstrip(".")
        return InputError.at(field, "is required")
    if name and what.startswith("Object contains unknown field"):
        field, known = f"{field}.{name[1]}".lstrip("."), _known_fields(kind)
        meant = did_you_mean(name[1], known)
        return InputError.at(field, f"unknown field{meant}; known ones are {', '.join(known)}")
    if what.startswith("Invalid enum value"):
        what = "expected " + " or ".join(map(repr, _choices(kind, path)))
    expected = re.sub("`(.*?)`", lambda found: _in_words(found[1]), what.partition(", got ")[0])
    expected = re.sub(r"a string matching regex '\^\(?([\w|.]+)\)?\$'", _one_of, expected)
    expected = expected.replace(f"a string matching regex {_EFFORT!r}", "a word such as none, low, medium, high or max")
    expected = expected.replace(f"a string matching regex {_PATH!r}", "a string without null characters")
    if place.startswith("key`"):
        return InputError.at(field, f"{_start(expected)} as each key")
    found = f", got {_at(value, path)!r:.80}" if "[...]" not in place else ""
    return InputError(f"{field or 'the request body'}: {_start(expected)}{found}", field=field or None)


def _start(text: str) -> str:
    return text[0].lower() + text[1:]


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | ") if name != "null")


def _one_of(pattern: re.Match[str]) -> str:
    return " or ".join(repr(choice) for choice in pattern[1].split("|"))


def _known_fields(kind: Any) -> list[str]:
    """Fields of the type, or of those within it, that refuse unknown fields."""
    _, schemas = msgspec.json.schema_components([kind])
    return [name for s in schemas.values() if s.get("additionalProperties") is False for name in s["properties"]]


def _choices(kind: Any, path: str) -> list[Any]:
    """The values that a type allows at a place."""
    found, named = msgspec.json.schema_components([kind])
    nodes = list(found)
    for name, _ in [*re.findall(r"\.(\w+)|\[(\d+)\]", path), ("", "")]:
        for node in nodes:  # grows
            nodes += node.get("anyOf", ())
            nodes += [named[node["$ref"].rpartition("/")[2]]] if "$ref" in node else ()
        if name:
            within = [node["properties"][name] for node in nodes if name in node.get("properties", ())]
        else:
            within = [node["items"] for node in nodes if "items" in node]
        nodes, last = within, nodes
    return [value for node in last for value in node.get("enum", ()) if value is not None]


def _at(value: Any, path: str) -> Any:
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value


def string_at(value: Mapping[str, Any], name: str, where: str) -> str:
    """The string in the field `name` of the object at `where`. Raises InputError: no string there."""
    found = value.get(name)
    if not isinstance(found, str):
        raise InputError.at(f"{where}.{name}", f"expected a string, got {found!r:.60}")
    return found


def check_unicode(text: str, where: str) -> None:
    """Raises InputError naming the field `where` if `text` cannot be encoded as UTF-8.

    Lone surrogates (half of a surrogate pair) are valid in JSON escapes and impossible in UTF-8. A client that cuts a
    string in the middle of an emoji sends a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        name = where.encode("ascii", "backslashreplace").decode()
        raise InputError.at(name, f"character {exc.start} is half of a surrogate pair; send valid Unicode") from None


def check_unicode_within(value: Any) -> None:
    """Checks every string and key of a decoded JSON value, at any depth.

    Raises:
        InputError: names the path, e.g. `messages[0].content`; for a key, the key itself.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str):
            check_unicode(item, where or "the request body")
        elif isinstance(item, list):
            waiting += [(f"{where}[{i}]", entry) for i, entry in enumerate(item)]
        elif isinstance(item, dict):
            for key, entry in item.items():
                path = f"{where}.{key}" if where else key
                check_unicode(key, path)
                waiting.append((path, entry))
