"""The kernel rows that can run here: every row of the tables whose module exists and that refuses nothing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from moe_engine.kernels import tables
from moe_engine.kernels.device import Need, cpu_device

_FAMILIES = (tables.OPS, tables.LINEAR, tables.EXPERTS, tables.MLA, tables.GQA)


def why_not(row: str, dtype: str = "float32") -> str | None:
    """Why a whole model cannot run with that row in every family, or None."""
    for family in _FAMILIES:
        found = next((r for r in family if r.name == row), None)
        if found is None:
            return f"no {row} row in every family"
        if find_spec(found.target.partition(":")[0]) is None:
            return f"{found.target} does not exist yet"
        reason = found.why_not(cpu_device(), Need(dtype=dtype))
        if reason:
            return reason
    return None


def all_rows() -> list[object]:
    """Parameters for `pytest.mark.parametrize`: row names, skipped with the reason where they cannot run."""
    names = dict.fromkeys(row.name for family in _FAMILIES for row in family)
    reasons = {name: why_not(name) for name in names}
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [])
        for name, why in reasons.items()
    ]
