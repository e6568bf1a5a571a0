"""The rows of each kernel family that can run on this GPU, and the refusal reasons of the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice, Row
from moe_engine.kernels.triton.availability import why_not as triton_why_not

PARTS = {"quantization": {"torch": "quantization.reference", "triton": "quantization.triton_rows"}}
"""Kernels that are parts of other families' rows: modules, used as rows."""

FAMILIES = {family: rows for family, rows in tables.FAMILIES.items() if family not in PARTS}


@cache
def triton_row(family: str) -> Any:
    """This project's kernel of a family, whatever this machine's device is."""
    if family in PARTS:
        return import_module(f"moe_engine.kernels.{PARTS[family]['triton']}")
    row = next(row for row in FAMILIES[family] if row.name == "triton")
    return Choice(family, row, "to be compiled").build()


class Rows:
    """Kernels by family and row name, each built once. `refused`: the reasons of the others."""

    def __init__(self, device: Device, asked: Sequence[str] | None = None) -> None:
        self.kernels: dict[str, dict[str, Any]] = {family: {} for family in (*FAMILIES, *PARTS)}
        self.refused: dict[str, str] = {}
        for family, rows in FAMILIES.items():
            for row in rows:
                if asked is not None and row.name not in asked:
                    continue
                attention = family if family in ("mla", "gqa") else "mla"
                why = row.why_not(device, Need("bfloat16", attention=attention))
                if why is None:
                    why = self._build(family, row)
                if why is not None:
                    self.refused[f"{family}.{row.name}"] = why

        for part, modules in PARTS.items():
            for name, module in modules.items():
                why = triton_why_not(device, "bfloat16") if name == "triton" else None
                if why is None and (asked is None or name in asked):
                    self.kernels[part][name] = import_module(f"moe_engine.kernels.{module}")

    def interpret_triton(self) -> None:
        """Adds Triton's rows, whose launches run in its interpreter on a CPU, with the number formats of a GPU."""
        os.environ["TRITON_INTERPRET"] = "1"
        from triton import knobs

        from tests.kernels.triton import interpreter

        if not knobs.runtime.interpret or "TRITON_INTERPRET" not in os.environ:
            raise RuntimeError("Triton was imported before its interpreter was asked for")
        interpreter.install()
        for family, kernels in self.kernels.items():
            self.refused.pop(f"{family}.triton", None)
            kernels["triton"] = triton_row(family)

    def _build(self, family: str, row: Row) -> str | None:
        """The reason why a supported row fails to load; None if it loads."""
        try:
            self.kernels[family][row.name] = Choice(family, row, "measured").build()
        except Exception as error:
            return f"failed to load: {type(error).__name__}: {error}"
        return None
