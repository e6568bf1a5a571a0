"""Buckets of the histograms of token counts, in SGLang's notation (`--prompt-tokens-buckets`)."""

from __future__ import annotations

import math
from itertools import pairwise

from moe_engine.config.numbers import real_number

_USE = "use `custom 100 1000 10000`, `tse 1000 2 8` or `default`"


def token_buckets(rule: str) -> tuple[float, ...] | None:
    """Upper bounds, rising. None: the default ones.

    ``custom 10 100``: these bounds. ``tse 1000 2 8`` (two-sided exponential): the middle, and 8 / 2 bounds on each side
    at distances 2, 4, 8, ...; bounds below 0 are dropped.

    Raises:
        ValueError: the rule is invalid; the message has the fix.
    """
    kind, *words = rule.split() or [""]
    if kind == "default" and not words:
        return None
    if kind not in ("custom", "tse"):
        raise ValueError(f"not a rule of buckets; {_USE}")
    try:
        numbers = [real_number(word) for word in words]
    except ValueError:
        raise ValueError(f"{kind} takes numbers; {_USE}") from None
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{kind} takes finite numbers; {_USE}")
    if kind == "custom":
        if not numbers or any(a >= b for a, b in pairwise(numbers)) or numbers[0] <= 0:
            raise ValueError(f"custom takes rising numbers above 0; {_USE}")
        return tuple(numbers)
    return _two_sided(numbers)


def _two_sided(numbers: list[float]) -> tuple[float, ...]:
    if len(numbers) != 3 or numbers[0] <= 0 or numbers[1] <= 1 or not 1 <= numbers[2] <= 100 or numbers[2] % 1:
        raise ValueError(f"tse takes a middle above 0, a base above 1 and a count of 1 to 100; {_USE}")
    middle, base, count = numbers
    distances = [base**power for power in range(1, math.ceil(count / 2) + 1)]
    return tuple(sorted({middle, *(middle + d for d in distances), *(max(0.0, middle - d) for d in distances)}))
