"""Errors of chat requests, with the field names of the form that the client sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from moe_engine.errors import InputError

Names = tuple[tuple[str, str], ...]
"""Pattern of a chat request's field in a message, and its replacement."""


@contextmanager
def named(names: Names) -> Iterator[None]:
    """Renames the fields in errors that are raised inside."""
    try:
        yield
    except InputError as exc:
        message, field = _renamed(exc.message, names), exc.field and _renamed(exc.field, names)
        raise InputError(message, field=field, status=exc.status) from None


def _renamed(text: str, names: Names) -> str:
    for theirs, ours in names:
        text = re.sub(theirs, ours, text, count=1)
    return text
