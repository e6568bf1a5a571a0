"""How much of what could be drawn or combined `make test` runs. ``MOE_TEST_EXAMPLES=5`` (`make test-exhaustive`) draws
five times as many examples in property tests and runs all combinations of parameters.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest

FACTOR = int(os.environ.get("MOE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """For ``settings(max_examples=examples(30))``."""
    return count * FACTOR


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that `make test` does not run: those marked `exhaustive`, and of functions marked `each_value` all
    cases but so many that every value of every parameter occurs."""
    if FACTOR > 1:
        return set()
    found = {item for item in items if item.get_closest_marker("exhaustive")}
    functions: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item not in found and item.get_closest_marker("each_value"):
            functions[item.path, getattr(item, "originalname", item.name)].append(item)
    for cases in functions.values():
        found |= set(cases) - covering(cases)
    return found


def covering(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Cases in which every value of every parameter occurs: always the one with the most values that are missing."""
    values = {case: set(case.callspec.indices.items()) for case in cases}  # type: ignore[attr-defined]
    missing = set().union(*values.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen
