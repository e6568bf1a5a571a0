"""Rejects lone surrogates (half of a surrogate pair): valid in JSON escapes, impossible in UTF-8.

A client that cuts a string in the middle of an emoji sends one. Such text can be neither tokenized nor encoded.
"""

from __future__ import annotations

from typing import Any

from moe_engine.errors import InputError


def check_unicode(text: str, where: str) -> None:
    """Raises InputError naming the field `where` if `text` cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        name = where.encode("ascii", "backslashreplace").decode()
        raise InputError(
            f"{name}: character {exc.start} is half of a surrogate pair; send valid Unicode", field=name
        ) from None


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
