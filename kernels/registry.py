"""Backend selection: the tables of backends and the choice of one row. Importing this imports no backend.

A row is a name, a dotted path, a preference and a check that returns the refusal reason. An explicitly requested
backend that is refused is an error with that reason; only ``auto`` falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from moe_engine.kernels.attention.workspaces import Workspace
from moe_engine.kernels.device import Device, Need


@dataclass(frozen=True)
class Row:
    """One backend of a family. `why_not` returns the reason for a refusal, or None; it must not import the backend.

    `takes` names the fields of `Need` that its constructor takes, by keyword. `workspace`: scratch bytes of an
    attention backend on an accelerator; None: negligible. `why_not_recorded`: the reason why its launches
    cannot be captured (`AttentionCapabilities.plan_in_place`), or None.
    """

    name: str
    target: str
    preference: int
    why_not: Callable[[Device, Need], str | None]
    takes: tuple[str, ...] = ()
    workspace: Workspace | None = None
    why_not_recorded: Callable[[Device, Need], str | None] | None = None


@dataclass(frozen=True)
class Choice:
    """The selected row, the reason, the refusal reasons of the others, and constructor arguments from the launch."""

    family: str
    row: Row
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Imports the row's module and constructs the backend."""
        module, _, name = self.row.target.partition(":")
        return getattr(import_module(module), name)(**self.options)


def select(family: str, rows: list[Row], asked: str, device: Device, need: Need) -> Choice:
    """Selects a row: the requested one, or with ``auto`` the most preferred that can run here.

    Raises:
        ValueError: with the reason, if the requested row is unknown or cannot run here.
    """

    def choice(row: Row, reason: str, refused: dict[str, str]) -> Choice:
        return Choice(family, row, reason, refused, {name: getattr(need, name) for name in row.takes})

    refusals = {row.name: row.why_not(device, need) for row in rows}
    by_name = {row.name: row for row in rows}
    if asked != "auto":
        if asked not in by_name:
            raise ValueError(f"unknown {family} backend {asked!r}; known: {', '.join(by_name)}")
        if refusals[asked]:
            raise ValueError(f"{family} backend {asked!r} cannot run here: {refusals[asked]}")
        others = {n: why or "not asked for" for n, why in refusals.items() if n != asked}
        return choice(by_name[asked], "asked for", others)
    able = sorted((row for row in rows if refusals[row.name] is None), key=lambda row: -row.preference)
    if not able:
        raise ValueError(f"no {family} backend can run here: " + "; ".join(f"{n}: {w}" for n, w in refusals.items()))
    best = able[0]
    others = {n: why or f"less preferred than {best.name}" for n, why in refusals.items() if n != best.name}
    return choice(best, f"most preferred of {len(able)} that can run on {device.kind}", others)
