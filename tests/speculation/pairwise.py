"""Pairwise testing: few combinations of many settings that cover every pair of settings (greedy)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Setting = tuple[str, Any]
Allowed = Callable[[Mapping[str, Any]], bool]
_TRIES = 20


def pairs_of(combination: Mapping[str, Any], names: Sequence[str]) -> set[tuple[Setting, Setting]]:
    """The pairs of settings of a combination, each in the order of `names`."""
    return {((a, combination[a]), (b, combination[b])) for a, b in combinations(names, 2)}


def pairwise_cover(factors: Mapping[str, Sequence[Any]], allowed: Allowed, seed: int = 0) -> list[dict[str, Any]]:
    """Combinations of one value per factor that cover every allowed pair of values.

    A combination starts with an uncovered pair; factor by factor, in random order, it takes the value that covers the
    most new pairs. The best of several such attempts is used.

    Args:
        allowed: True for a valid partial combination; every valid partial combination must be completable.
    """
    names = list(factors)
    rng = random.Random(seed)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    }
    cover = []
    while missing:
        first = rng.choice(sorted(missing, key=repr))
        attempts = [_complete(dict(first), factors, allowed, missing, rng) for _ in range(_TRIES)]
        best = max(attempts, key=lambda combination: len(missing & pairs_of(combination, names)))
        cover.append({name: best[name] for name in names})
        missing -= pairs_of(best, names)
    return cover


def _complete(
    chosen: dict[str, Any],
    factors: Mapping[str, Sequence[Any]],
    allowed: Allowed,
    missing: set[tuple[Setting, Setting]],
    rng: random.Random,
) -> dict[str, Any]:
    names = list(factors)
    for name in rng.sample(names, len(names)):
        if name in chosen:
            continue

        def gain(value: Any, name: str = name) -> int:
            tried = {**chosen, name: value}
            return len(missing & pairs_of(tried, [n for n in names if n in tried]))

        values = [value for value in factors[name] if allowed({**chosen, name: value})]
        chosen[name] = max(rng.sample(values, len(values)), key=gain)
    return chosen
