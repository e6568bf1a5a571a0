"""Kernel rows and the choice of one. Importing this imports no backend.

A row is a name, a dotted path, a preference and a check that returns the refusal reason. An explicitly requested
backend that is refused is an error with that reason; only ``auto`` falls back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from moe_engine.kernels.device import Device, ExpertWidths, Need
from moe_engine.kernels.weight_forms import WeightForm
from moe_engine.kernels.workspaces import Workspace

logger = logging.getLogger(__name__)

WINDOWS = "sliding windows"
"""`AttentionCapabilities.windows`"""
CHUNKED = "chunked attention"
"""`AttentionCapabilities.chunked`"""
SPARSE = "sparse attention"
"""MLA: `AttentionCapabilities.sparse`; GQA: contexts of slots in any order, in pages of one"""
SPANS = "attention among all tokens of an image"
"""GQA: as `SPARSE`"""
SINKS = "attention sinks"
"""`AttentionCapabilities.sinks`; of MLA `SparseAttention.sinks`"""
CAPPED = "bounded scores"
"""`AttentionCapabilities.capped`"""
BIASES = "biases of experts"
"""`ExpertsCapabilities.biases`"""
CLAMPS = "clamped activation of experts"
"""`ExpertsCapabilities.clamps`"""

EXACT_LENGTHS = 15
"""Highest preference of rows for which steps with drafts wait: below this project's kernels, above torch's."""


@dataclass(frozen=True)
class Row:
    """One backend of a family. `why_not` returns the reason for a refusal, or None; it must not import the backend.

    Args:
        takes: fields of `Need` that its constructor takes, by keyword.
        workspace: scratch bytes of an attention backend on an accelerator; None: negligible.
        why_not_captured: the reason why its launches cannot be captured (`AttentionCapabilities.plan_in_place`), or
        None.
        prefers: preference by device, heads and dtypes; None: always `preference`.
        pages: page sizes of the KV cache that its fastest kernels need; () for any.
        lacks_expanded: it has no kernels for the expanded form of MLA: its constructor takes `expanded`, the most
            preferred other row.
        fused: an experts backend that takes `fused` batches, and no others.
        lacks_plain: an experts backend of block FP8 only: its constructor takes `plain`, the most preferred other row.
        experts_workspace: bytes of an experts backend's scratch memory for (a rank's experts, their number, tokens) on
            an accelerator; None: in the activations of a step.
        supports: optional parts of attention or experts that it has, such as `WINDOWS`.
        multiplies: forms of quantized weights that a linear or experts backend multiplies as stored.
        exact_lengths: an attention backend whose captured launches are planned on the host by exact lengths.
        reads_fp8: an experts backend that reads FP8 rows on this device if weights are in block FP8; None: never.
    """

    name: str
    target: str
    preference: int
    why_not: Callable[[Device, Need], str | None]
    takes: tuple[str, ...] = ()
    workspace: Workspace | None = None
    why_not_captured: Callable[[Device, Need], str | None] | None = None
    prefers: Callable[[Device, Need], int] | None = None
    pages: tuple[int, ...] = ()
    lacks_expanded: bool = False
    lacks_plain: bool = False
    fused: bool = False
    experts_workspace: Callable[[ExpertWidths, int, int], int] | None = None
    supports: tuple[str, ...] = ()
    reads_fp8: Callable[[Device], bool] | None = None
    multiplies: frozenset[WeightForm] = frozenset()
    exact_lengths: bool = False

    def score(self, device: Device, need: Need) -> int:
        """Preference on this device for this model; the highest runs."""
        score = self.preference if self.prefers is None else self.prefers(device, need)
        return min(score, EXACT_LENGTHS) if self.exact_lengths and need.chains else score

    def refuses_capture(self, device: Device, need: Need) -> str | None:
        """The reason why its launches cannot be captured as CUDA graphs, or None."""
        return None if self.why_not_captured is None else self.why_not_captured(device, need)


@dataclass(frozen=True)
class Choice:
    """The selected row, the reason, the refusal reasons of the others, and constructor arguments from the launch.

    A constructor argument that is a `Choice` is built first.
    """

    family: str
    row: Row
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Imports the row's module and constructs the backend."""
        module, _, name = self.row.target.partition(":")
        options = {name: arg.build() if isinstance(arg, Choice) else arg for name, arg in self.options.items()}
        return getattr(import_module(module), name)(**options)


def select(
    family: str,
    rows: list[Row],
    asked: str,
    device: Device,
    need: Need,
    *,
    captured: bool = False,
    failed: Mapping[str, str] | None = None,
) -> Choice:
    """Selects a row: the requested one, or with ``auto`` the most preferred that can run here.

    Args:
        captured: decodes are captured as CUDA graphs if the rows allow it, which saves more than the fastest kernel:
            ``auto`` prefers rows that can be captured.
        failed: rows that could not be built, with the reasons.

    Raises:
        ValueError: with the reason, if the requested row is unknown or cannot run here.
    """
    failed = failed or {}
    refusals = {row.name: failed.get(row.name) or _refusal(family, row, device, need) for row in rows}
    if asked == "auto":
        best, reason, refused = _preferred(family, rows, refusals, device, need, captured)
        here = _refusal(family, best, device.with_own_libraries, need) if device.has_libraries else None
    else:
        here = refusals.get(asked)
        if here and device.elsewhere:
            named = next(row for row in rows if row.name == asked)
            refusals[asked] = _refusal(family, named, device.for_named_row, need)
        best, reason, refused = _asked_for(family, rows, refusals, asked)
    if here:
        reason += f"; not on this machine: {here}"
    options: dict[str, Any] = {name: getattr(need, name) for name in best.takes}
    others = [row for row in rows if row is not best]
    if best.lacks_expanded:  # the expanded form reads keys in the activation dtype whatever the cache holds
        options["expanded"] = select(family, others, "auto", device, replace(need, kv_dtype="auto"))
    if best.lacks_plain:
        options["plain"] = select(family, others, "auto", device, need)
    return Choice(family, best, reason, refused, options)


NAMED = "named by its flag"
Refusals = Mapping[str, str | None]
"""Why a row cannot run here, by its name; None: it can."""


def _asked_for(family: str, rows: list[Row], refusals: Refusals, asked: str) -> tuple[Row, str, dict[str, str]]:
    """Row, reason and refusals of a `Choice`. Raises ValueError as `select` does."""
    if asked not in refusals:
        raise ValueError(f"unknown {family} backend {asked!r}; known: {', '.join(refusals)}")
    if refusals[asked]:
        raise ValueError(f"{family} backend {asked!r} cannot run here: {refusals[asked]}")
    best = next(row for row in rows if row.name == asked)
    return best, NAMED, {name: why or f"the flag names {asked}" for name, why in refusals.items() if name != asked}


def _preferred(
    family: str, rows: list[Row], refusals: Refusals, device: Device, need: Need, captured: bool
) -> tuple[Row, str, dict[str, str]]:
    """As `_asked_for`, of the most preferred row."""
    able = [row for row in rows if refusals[row.name] is None]
    if not able:
        listed = "; ".join(f"{name}: {why}" for name, why in refusals.items())
        raise ValueError(f"no {family} backend can run here: {listed}")
    uncaptured = {row.name: row.refuses_capture(device, need) for row in able} if captured else {}
    best = max(able, key=lambda row: (uncaptured.get(row.name) is None, row.score(device, need)))
    reason = f"most preferred of {len(able)} that can run on {device.kind}"
    if any(row.score(device, need) > best.score(device, need) for row in able):
        reason += " and be captured as CUDA graphs"
    refused = {
        row.name: refusals[row.name]
        or uncaptured.get(row.name)
        or _waits(row, need)
        or f"less preferred than {best.name}"
        for row in rows
        if row is not best
    }
    return best, reason, refused


def build(family: str, rows: list[Row], asked: str, device: Device, need: Need) -> Any:
    """The kernel of a family outside the `KernelPlan`: of the requested row, or with ``auto`` of the most preferred one
    that loads; each failure is logged.

    Raises:
        ValueError: the requested row cannot run here or fails to load, or no row is left.
    """
    failed: dict[str, str] = {}
    while True:
        choice = select(family, rows, asked, device, need, failed=failed)
        try:
            return choice.build()
        except Exception as error:
            name = choice.row.name
            if asked != "auto":
                raise ValueError(f"{family} backend {name!r} failed to load: {error}") from error
            logger.warning("%s: not using %s kernels, because they failed to load: %s", family, name, error)
            failed[name] = f"failed to load: {error}"


def _waits(row: Row, need: Need) -> str | None:
    waits = need.chains and row.exact_lengths
    return "plans by exact lengths, for which every step with drafts would wait" if waits else None


def _needed_parts(family: str, need: Need) -> list[str]:
    """Optional parts that the model needs of a family's row."""
    parts = {
        "attention": {
            WINDOWS: need.windows, CHUNKED: need.chunked, SPARSE: need.index is not None or need.compression,
            SINKS: need.sinks, CAPPED: need.capped, SPANS: need.spans,
        },
        "experts": {BIASES: need.biases, CLAMPS: need.clamped},
    }  # fmt: skip
    return [part for part, needed in parts.get(family, {}).items() if needed]


def _refusal(family: str, row: Row, device: Device, need: Need) -> str | None:
    if missing := next((part for part in _needed_parts(family, need) if part not in row.supports), None):
        return f"no {missing}"
    if family == "experts" and row.fused != (need.experts is not None and need.experts.fused):
        alone = "runs only with --moe-a2a-backend megamoe"
        return alone if row.fused else "does not run with --moe-a2a-backend megamoe"
    return row.why_not(device, need)
