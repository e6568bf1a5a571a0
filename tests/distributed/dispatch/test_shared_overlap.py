"""The shared expert is computed during dispatch by default with DeepEP or symmetric memory between GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.executor.sharded_worker import _overlaps_by_default


@pytest.mark.parametrize(
    "row,width,disabled,expected",
    [
        ("deepep", 2048, False, True),
        ("deepep", 2048, True, False),
        ("deepep", 0, False, False),
        ("symm_mem", 2048, False, True),
        ("all_to_all", 2048, False, False),
        (None, 2048, False, False),
    ],
)
def test_where_it_is_the_default(row: str | None, width: int, disabled: bool, expected: bool) -> None:
    dispatch = None if row is None else SimpleNamespace(row=SimpleNamespace(name=row))
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(dispatch=dispatch),
        model=SimpleNamespace(moe=SimpleNamespace(shared_width=width)),
        args=SimpleNamespace(parallel=SimpleNamespace(disable_shared_expert_overlap=disabled)),
    )
    assert _overlaps_by_default(config) is expected
