"""The share of examples and combinations that `make test` runs. ``MOE_TEST_EXAMPLES=5`` (`make test-exhaustive`)
generates five times as many examples in property tests and runs all combinations of parameters.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from typing import Any

import pytest

from tests.random_seed import seed

FACTOR = int(os.environ.get("MOE_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """For ``settings(max_examples=examples(30))``."""
    return count * FACTOR


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that `make test` skips: tests marked `exhaustive`, and tests that are others in each run: cases of
    functions marked `each_value` beyond a set in which every value of every parameter occurs, those marked
    `one_of(group, value)` with all values but one of each group, then those marked `drawn(count)` beyond `count` of
    each file, or `drawn(count, group)` of all files with this group. Nothing is skipped if tests are named one by
    one."""
    if FACTOR > 1 or any("::" in argument for item in items[:1] for argument in item.config.args):
        return set()
    found = {item for item in items if item.get_closest_marker("exhaustive")} | _others(items)
    functions: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item not in found and item.get_closest_marker("each_value"):
            functions[item.path, getattr(item, "originalname", item.name)].append(item)
    for (_, name), cases in functions.items():
        found |= set(cases) - covering(random.Random(f"{seed()} {name}").sample(cases, len(cases)))
    groups: dict[Any, list[pytest.Item]] = defaultdict(list)
    counts = {}
    for item in items:
        if item not in found and (mark := item.get_closest_marker("drawn")):
            group = mark.kwargs.get("group", item.path)
            groups[group].append(item)
            counts[group] = mark.args[0]
    for group, tests in groups.items():
        draws = random.Random(f"{seed()} {getattr(group, 'name', group)}")
        found |= set(draws.sample(tests, max(0, len(tests) - counts[group])))
    return found


def _others(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests with the values of `one_of` that are not drawn."""
    groups: dict[str, dict[str, set[pytest.Item]]] = defaultdict(lambda: defaultdict(set))
    for item in items:
        if mark := item.get_closest_marker("one_of"):
            group, value = mark.args
            groups[group][value].add(item)
    found = set[pytest.Item]()
    for group, values in groups.items():
        values.pop(random.Random(f"{seed()} {group}").choice(sorted(values)))
        found |= set().union(*values.values())
    return found


def covering(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Cases in which every value of every parameter occurs, by repeatedly adding the case with the most missing values.

    The values are those of the calls of `parametrize`, each a tuple if its call has several arguments. pytest has no
    public list of their names, and `indices` counts the combinations.
    """
    values = {case: set(enumerate(case.callspec._idlist)) for case in cases}  # type: ignore[attr-defined]
    missing = set().union(*values.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen
