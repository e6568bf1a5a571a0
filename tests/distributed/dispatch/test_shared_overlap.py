"""The shared expert is computed during dispatch by default where DeepEP carries tokens between GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.executor.sharded_worker import _overlaps_by_default


@pytest.mark.parametrize(
    "row,device,width,disabled,expected",
    [
        ("deepep", "cuda", 2048, False, True),
        ("deepep", "cuda", 2048, True, False),
        ("deepep", "cuda", 0, False, False),
        ("symm_mem", "cuda", 2048, False, False),
        ("deepep", "cpu", 2048, False, False),
        (None, "cuda", 2048, False, False),
    ],
)
def test_where_it_is_the_default(row: str | None, device: str, width: int, disabled: bool, expected: bool) -> None:
    dispatch = None if row is None else SimpleNamespace(row=SimpleNamespace(name=row))
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(dispatch=dispatch),
        model=SimpleNamespace(moe=SimpleNamespace(shared_width=width)),
        args=SimpleNamespace(parallel=SimpleNamespace(disable_shared_expert_overlap=disabled)),
    )
    parallel: Any = SimpleNamespace(ep=SimpleNamespace(device=SimpleNamespace(type=device)))
    assert _overlaps_by_default(config, parallel) is expected
