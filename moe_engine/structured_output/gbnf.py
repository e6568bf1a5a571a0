"""Grammars in GBNF as llguidance's converter reads them: it knows no `|` at the beginning of a line, and writes `\\u`
and `\\U` escapes without their leading zeros."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from moe_engine.structured_output.backend import GrammarError

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?P<gap>(?:[ \t\r\n]|#[^\n]*)+)(?P<bar>\|?)', re.DOTALL)
"""Texts, classes, and gaps of white space and comments with the bar behind them."""
_ESCAPES = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def to_lark(source: str) -> str:
    """The grammar in Lark's syntax, which may be its syntax already.

    Raises:
        GrammarError: an escape is not a character.
        Exception: errors of the converter.
    """
    return source if is_lark_syntax(source) else gbnf_to_lark(_PARTS.sub(_readable, source))


def _readable(part: re.Match[str]) -> str:
    if part["gap"] is None:
        return _ESCAPES.sub(_character, part[0])
    return part["bar"] + part["gap"] if "\n" in part["gap"] else part[0]


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise GrammarError(f"the escape {escape[0]} is not a character")
    return chr(code)
