"""Dispatch backend selection (MoE all-to-all): the backends, their refusal reasons, and the mode of each phase.

Adding a backend takes one adapter file, one row here and one maker in `build.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING

from moe_engine.kernels.device import Device
from moe_engine.kernels.registry import NAMED
from moe_engine.kernels.vendors.limits import MEGA_RANKS
from moe_engine.kernels.vendors.probe import MEGA_MOE
from moe_engine.parallel import host_support
from moe_engine.parallel.dispatch import symm_mem
from moe_engine.parallel.dispatch.deepep import generation as deepep

if TYPE_CHECKING:  # the protocol imports torch; selection does not need it
    from moe_engine.parallel.dispatch.protocol import Mode, Phase

MODES: tuple[Mode, ...] = ("normal", "low_latency")


@dataclass(frozen=True)
class Place:
    """Inputs of the selection.

    Attributes:
        device: of each rank.
        num_ranks: of the expert-parallel group.
        num_nodes: hosts; ranks are numbered host by host.
        deepep_version: of DeepEP, see `deepep.generation.VERSIONS`.
        top_k, hidden, num_experts: experts of a token, channels of its rows, routed experts; 0 if unknown.
        unlinked: why the GPUs of this host cannot access each other's memory, according to the driver; else None.
    """

    device: Device
    num_ranks: int
    num_nodes: int = 1
    unlinked: str | None = None
    deepep_version: str = "auto"
    top_k: int = 0
    hidden: int = 0
    num_experts: int = 0


@dataclass(frozen=True)
class FixedSizes:
    """Supported max tokens of a rank in a low-latency dispatch: multiples of `multiple`, at most `most`."""

    multiple: int = 1
    most: int | None = None
    reason: str = ""


def _any_size(place: Place) -> FixedSizes:
    return FixedSizes()


def _any_place(place: Place) -> str | None:
    return None


@dataclass(frozen=True)
class DispatchRow:
    """One backend. `why_not` returns the reason for a refusal, or None; it must import no vendor library."""

    name: str
    modes: tuple[Mode, ...]
    preference: int
    why_not: Callable[[Place], str | None]
    fixed_sizes: Callable[[Place], FixedSizes] = _any_size
    fused: bool = False
    """Exchange and products of the experts are one call (layout `fused`)."""
    why_not_low_latency: Callable[[Place], str | None] = _any_place
    """The reason why the place has no low latency although the backend has, or None."""
    instead: str | None = None
    """The row that replaces it, unless it was named, if the ranks cannot reach each other's memory at the start."""


@dataclass(frozen=True)
class DispatchChoice:
    """The selected backend, the mode of each phase, the reason, the refusal reasons of the others, the sizes of its
    low-latency dispatch, and whether a flag named it."""

    row: DispatchRow
    modes: dict[Phase, Mode]
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    deepep_version: str = "auto"
    sizes: FixedSizes = FixedSizes()
    named: bool = True

    @property
    def pads(self) -> bool:
        """True if low latency delivers `padded` batches."""
        return deepep.is_first_generation(self.deepep_version) if self.row.name == "deepep" else not self.row.fused


def _local(place: Place) -> str | None:
    return None if place.num_ranks == 1 else f"the experts are on {place.num_ranks} ranks"


def _many(place: Place) -> str | None:
    return "there is only one rank" if place.num_ranks == 1 else None


def _shared_memory(place: Place) -> str | None:
    if place.device.kind != "cpu":
        return f"needs host memory; the device is {place.device.kind}"
    if place.num_nodes > 1:
        return f"works inside one host; there are {place.num_nodes} nodes"
    return _many(place) or host_support.why_not()


def _deepep(place: Place) -> str | None:
    reason = _many(place) or deepep.why_not(place.device, place.deepep_version)
    return reason or deepep.why_not_hidden(place.deepep_version, place.hidden)


def _deepep_sizes(place: Place) -> FixedSizes:
    if not deepep.is_first_generation(place.deepep_version):
        return FixedSizes()
    return FixedSizes(4 // gcd(4, place.num_ranks), deepep.FIRST_GENERATION_TOKENS, "the kernels of DeepEP 1")


def _deepep_low_latency(place: Place) -> str | None:
    return deepep.why_not_low_latency(place.deepep_version, place.hidden, place.top_k)


def _symm_mem(place: Place) -> str | None:
    reason = _many(place) or symm_mem.why_not(place.device, place.num_nodes) or place.unlinked
    return reason or symm_mem.why_not_width(place.hidden)


def _nvshmem(place: Place) -> str | None:
    if place.device.has_libraries:
        return _many(place)
    return _many(place) or symm_mem.why_not_nvshmem(place.device.kind, place.num_ranks, place.num_experts)


def _megamoe(place: Place) -> str | None:
    reason = _many(place) or symm_mem.why_not(place.device, place.num_nodes) or place.unlinked
    if reason is None and place.num_ranks > MEGA_RANKS:
        return f"MegaMoE supports at most {MEGA_RANKS} ranks; there are {place.num_ranks}"
    if reason is None and not place.device.has_libraries and MEGA_MOE.installed() is None:
        return f"DeepGEMM is not installed ({MEGA_MOE.install})"
    return reason


def _two_hop(place: Place) -> str | None:
    if place.num_nodes == 1:
        return "there is only one node"
    if place.num_ranks % place.num_nodes:
        return f"{place.num_ranks} ranks are not distributed evenly over {place.num_nodes} nodes"
    return "every node has one rank" if place.num_ranks == place.num_nodes else None


ROWS = [
    DispatchRow("local", ("normal",), 50, _local),
    DispatchRow("deepep", MODES, 40, _deepep, _deepep_sizes, why_not_low_latency=_deepep_low_latency),
    DispatchRow("shared_memory", MODES, 30, _shared_memory),
    DispatchRow("two_hop", MODES, 20, _two_hop),
    DispatchRow("symm_mem", MODES, 15, _symm_mem, instead="all_to_all"),
    DispatchRow("all_to_all", MODES, 10, _many),
    # only on request: none has been measured on several GPUs
    DispatchRow("nvshmem", MODES, 4, _nvshmem),
    DispatchRow("megamoe", MODES, 3, _megamoe, fused=True),
    DispatchRow("allgather", MODES, 0, _many),
]


def choose(place: Place, asked: str = "auto", mode: str = "auto") -> DispatchChoice:
    """The requested backend, or the most preferred available one; `mode` auto: low latency for decode only.

    Raises:
        ValueError: the requested backend or mode is unknown or unavailable; with the reason.
    """
    by_name, device = {row.name: row for row in ROWS}, place.device
    refusals = {row.name: row.why_not(place) or _lacks(row, place, mode) for row in ROWS}
    here = refusals.get(asked)
    if here and device.elsewhere:
        there = replace(place, device=device.for_named_row)
        refusals[asked] = by_name[asked].why_not(there) or _lacks(by_name[asked], there, mode)
    if asked == "auto":
        able = sorted((row for row in ROWS if refusals[row.name] is None), key=lambda row: -row.preference)
        if not able:
            raise ValueError("no dispatch backend is available: " + "; ".join(f"{n}: {w}" for n, w in refusals.items()))
        row, reason = able[0], f"most preferred of {len(able)} available"
        here = row.why_not(replace(place, device=device.with_own_libraries)) if device.has_libraries else None
    elif asked not in by_name:
        raise ValueError(f"unknown dispatch backend {asked!r}; known: {', '.join(by_name)}")
    elif refusals[asked]:
        raise ValueError(f"dispatch backend {asked!r} is unavailable: {refusals[asked]}")
    else:
        row, reason = by_name[asked], NAMED
    if here:
        reason += f"; not on this machine: {here}"
    left_over = f"the flag names {asked}" if asked != "auto" else f"less preferred than {row.name}"
    others = {name: why or left_over for name, why in refusals.items() if name != row.name}
    sizes = row.fixed_sizes(place)
    modes, named = _modes(row, mode), asked != "auto"
    return DispatchChoice(row, modes, reason, others, place.deepep_version, sizes, named)


def _lacks(row: DispatchRow, place: Place, mode: str) -> str | None:
    if mode not in ("auto", *MODES):
        raise ValueError(f"unknown dispatch mode {mode!r}; known: auto, {', '.join(MODES)}")
    if mode != "auto" and mode not in row.modes:
        return f"has no {mode} mode"
    return row.why_not_low_latency(place) if mode != "normal" else None


def _modes(row: DispatchRow, mode: str) -> dict[Phase, Mode]:
    fast: Mode = "low_latency" if "low_latency" in row.modes else "normal"
    if mode == "auto":
        return {"prefill": "normal", "decode": fast}
    one: Mode = "normal" if mode == "normal" else "low_latency"
    return {"prefill": one, "decode": one}
