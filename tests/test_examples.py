"""The cases that `make test` skips: combinations, never a value."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import examples


class Case(SimpleNamespace):
    __hash__ = object.__hash__


def made(
    *values: int, mark: str = "each_value", count: int = 0, file: str = "file", argument: str = "tests", **more: Any
) -> Any:
    found = SimpleNamespace(args=more.pop("group") if mark == "one_of" else (count,), kwargs=more)
    return Case(
        name=str(values), originalname="test", path=Path(file), callspec=SimpleNamespace(_idlist=values),
        get_closest_marker=lambda name: found if name == mark else None, config=SimpleNamespace(args=[argument]),
    )  # fmt: skip


@pytest.mark.parametrize("factor", [1, 5])
def test_every_value_runs_and_everything_on_demand(monkeypatch: pytest.MonkeyPatch, factor: int) -> None:
    monkeypatch.setattr(examples, "FACTOR", factor)
    items = [made(a, b, c) for a in range(4) for b in range(3) for c in range(2)]
    others = [made(0, mark=""), made(1, mark="exhaustive")]
    left = examples.left_out([*items, *others])
    if factor > 1:
        assert not left and examples.examples(7) == 35
        return
    assert left & set(others) == {others[1]}
    draws = set()
    for seed in range(50):
        monkeypatch.setenv("MOE_TEST_SEED", str(seed))
        left = examples.left_out(items)
        assert left == examples.left_out(items)
        kept = [item for item in items if item not in left]
        assert 4 <= len(kept) <= 6
        for place, count in enumerate((4, 3, 2)):
            assert {item.callspec._idlist[place] for item in kept} == set(range(count))
        draws |= set(kept)
    assert draws == set(items)


def test_other_tests_are_drawn_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "FACTOR", 1)
    items = [made(i, mark="drawn", count=3, file=file) for file in ("a", "b") for i in range(8)]
    draws = set()
    for seed in range(30):
        monkeypatch.setenv("MOE_TEST_SEED", str(seed))
        left = examples.left_out(items)
        assert left == examples.left_out(items)
        assert [sum(item.path == Path(file) for item in left) for file in ("a", "b")] == [5, 5]
        draws |= set(items) - left
        jobs = [made(i, mark="drawn", count=2, file=file, group="jobs") for file in ("a", "b") for i in range(3)]
        assert len(examples.left_out([*items, *jobs]) - left) == 4
    assert draws == set(items)
    assert not examples.left_out([made(i, mark="drawn", count=1, argument="tests/a.py::test") for i in range(3)])


def test_one_value_is_drawn_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "FACTOR", 1)
    places = {value: [made(i, mark="one_of", group=("machines", value)) for i in range(3)] for value in "abc"}
    items, draws = [item for tests in places.values() for item in tests], set[str]()
    for seed in range(30):
        monkeypatch.setenv("MOE_TEST_SEED", str(seed))
        kept = set(items) - examples.left_out(items)
        draws |= {value for value, tests in places.items() if kept == set(tests)}
        assert len(kept) == 3
    assert draws == {"a", "b", "c"}


@pytest.mark.each_value
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", ["a", "b"])
def test_pytest_gives_the_values_of_each_parameter(request: pytest.FixtureRequest, first: int, second: str) -> None:
    assert request.node.callspec._idlist == [second, str(first)]
    chosen = {name for name in request.session.items if name.originalname == request.node.originalname}
    assert len(chosen) in ((1, 4) if examples.FACTOR > 1 else (1, 2))
