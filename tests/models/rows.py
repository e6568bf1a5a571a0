"""The kernel rows whose models these tests run, on the CPU: rows that exist in every family and support a CPU.

Rows for GPUs have tests of their own (`tests/kernels/triton`, `tests/kernels/vendors`, those marked `gpu`), because
the models of these tests are always on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need, cpu_device
from moe_engine.kernels.registry import Row

_FAMILIES = (tables.OPS, tables.LINEAR, tables.EXPERTS, tables.MLA, tables.GQA)
_EQUIPPED = replace(cpu_device(), compiler="c++")
"""This machine's CPU with all optional features."""


def why_not(name: str, device: Device, dtype: str = "float32") -> str | None:
    """The reason why a whole model cannot run with that row in every family, or None."""
    for family in _FAMILIES:
        found = next((row for row in family if row.name == name), None)
        reason = f"no {name} row in every family" if found is None else found.why_not(device, Need(dtype=dtype))
        if reason:
            return reason
    return None


def cpu_rows() -> list[str]:
    """Names of the rows that can run a model on some CPU."""
    names = dict.fromkeys(row.name for family in _FAMILIES for row in family)
    return [name for name in names if why_not(name, _EQUIPPED) is None]


def cpu_rows_of(family: list[Row]) -> list[Row]:
    """The rows of one family that can run on some CPU."""
    return [row for row in family if row.why_not(_EQUIPPED, Need("float32")) is None]


def all_rows() -> list[object]:
    """Parameters for `pytest.mark.parametrize`: `cpu_rows`, skipped with the reason if this machine lacks a feature."""
    reasons = {name: why_not(name, cpu_device()) for name in cpu_rows()}
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [])
        for name, why in reasons.items()
    ]
