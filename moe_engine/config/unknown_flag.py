"""The message for a flag that does not exist: it suggests only flags that are accepted."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from moe_engine.config.dropped import DROPPED, FOREIGN
from moe_engine.config.unsupported_flags import UNSUPPORTED_FLAGS
from moe_engine.config.values import nearest


def keyword_of(option: str) -> str:
    """``--page-size`` -> ``page_size``."""
    return option.lstrip("-").replace("-", "_")


def unknown_flag(word: str, known: Iterable[str]) -> str:
    """The error text for `word`; names the nearest flag if that one is accepted.

    Args:
        known: every spelling that the parser knows, refused ones included, in the same form as `word`.
    """
    keyword = keyword_of(word)
    if keyword in FOREIGN:
        return f"unknown flag; it is {FOREIGN[keyword]}"
    spellings = {keyword_of(spelling): spelling for spelling in known}
    close = nearest(keyword, list(spellings))
    if close is None or close in _refused():
        return "unknown flag"
    return f"unknown flag (did you mean {spellings[close]}?)"


def accepted_matches(message: str) -> str:
    """argparse's message for an ambiguous abbreviation, without flags that are refused where others match."""
    head, match, names = message.partition("could match ")
    accepted = [name for name in names.split(", ") if keyword_of(name) not in _refused()]
    return head + match + (", ".join(accepted) or names)


@lru_cache
def _refused() -> frozenset[str]:
    rows = (*UNSUPPORTED_FLAGS.values(), *DROPPED.values())
    return frozenset(keyword_of(spelling) for row in rows for spelling in (row.option, *row.spellings))
