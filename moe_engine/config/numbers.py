"""Numbers of flags and workloads: with the digits 0 to 9 only, where Python's `int` and `float` take those of any
script."""

from __future__ import annotations

from collections.abc import Callable


def _ascii(text: str) -> str:
    if not text.isascii():
        raise ValueError(f"{text}: write numbers with the digits 0 to 9")
    return text


def whole_number(text: str) -> int:
    """The whole number. Raises ValueError."""
    return int(_ascii(text))


def real_number(text: str) -> float:
    """The number, also ``inf`` and ``nan``. Raises ValueError."""
    return float(_ascii(text))


READERS: dict[type, Callable[[str], int | float]] = {int: whole_number, float: real_number}
"""Readers by the type of a flag."""
