"""What `make test` leaves out: combinations, never a value."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import examples


class Case(SimpleNamespace):
    __hash__ = object.__hash__


def made(marks: tuple[str, ...] = ("each_value",), **indices: int) -> Any:
    return Case(
        name=str(indices), originalname="test", path=Path("file"), callspec=SimpleNamespace(indices=indices),
        get_closest_marker=lambda mark: mark in marks,
    )  # fmt: skip


@pytest.mark.parametrize("factor", [1, 5])
def test_every_value_runs_and_everything_on_demand(monkeypatch: pytest.MonkeyPatch, factor: int) -> None:
    monkeypatch.setattr(examples, "FACTOR", factor)
    items = [made(a=a, b=b, c=c) for a in range(4) for b in range(3) for c in range(2)]
    others = [made((), a=0), made(("exhaustive",), a=1)]
    left = examples.left_out([*items, *others])
    if factor > 1:
        assert not left and examples.examples(7) == 35
        return
    kept = [item for item in items if item not in left]
    assert len(kept) == 4 and left & set(others) == {others[1]}
    for name, count in {"a": 4, "b": 3, "c": 2}.items():
        assert {item.callspec.indices[name] for item in kept} == set(range(count))
