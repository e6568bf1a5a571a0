"""Grammars in GBNF as llguidance's converter reads them: it accepts no `|` at the beginning of a line, and writes `\\u`
and `\\U` escapes without their leading zeros."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from moe_engine.structured_output.backend import GrammarError

__all__ = ["is_lark_syntax", "to_lark"]

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?P<gap>(?:[ \t\r\n]|#[^\n]*)+)(?P<bar>\|?)', re.DOTALL)
"""Texts, classes, and gaps of white space and comments with the bar after them."""
_RULE = re.compile(r"Rule '(.*)' not found")
_ESCAPES = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def to_lark(source: str) -> str:
    """The grammar in Lark's syntax, which may be its syntax already.

    Raises:
        GrammarError: it is not GBNF; names line and column.
    """
    if is_lark_syntax(source):
        return source
    text = _PARTS.sub(_readable, source)
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(_place(text, error.pos.pos) + str(error).removesuffix(f" at {error.pos}")) from None
    except Exception as error:  # of names that no rule defines
        reason = str(error)
        name = _RULE.fullmatch(reason)
        plain = _PARTS.sub(lambda part: " " * len(part[0]) if part["gap"] is None else _no_comments(part[0]), source)
        use = name and re.search(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", plain)
        raise GrammarError((_place(source, use.start()) if use else "") + reason) from None


def _no_comments(gap: str) -> str:
    return re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), gap)


def _place(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - begin + 1}: "


def _readable(part: re.Match[str]) -> str:
    if part["gap"] is None:
        return _ESCAPES.sub(_character, part[0])
    if "\n" not in part["gap"]:
        return part[0]
    return part["bar"] + part["gap"] + " " * len(part["bar"])  # columns are unchanged


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
