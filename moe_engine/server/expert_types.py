"""Answers of the endpoints of the expert page."""

from __future__ import annotations

from typing import TypedDict


class ExpertLaunch(TypedDict):
    """`mode`: --expert-distribution-recorder-mode. `ranks`: expert-parallel ranks."""

    model: str
    version: str
    mode: str | None
    ranks: int
    nodes: int
    redundant_experts: int
    eplb: bool


class ExpertGainRow(TypedDict):
    """Balancedness (mean over busiest rank) with the experts in order and with EPLB, and the busiest rank's tokens
    with EPLB relative to the former."""

    ep_size: int
    redundant_experts: int
    trivial: float
    eplb: float
    slowest_rank: float
    is_launch: bool


class ExpertGain(TypedDict):
    """`ranks`, `planned`: tokens of each rank of the launch with the experts in order, and with EPLB's placement."""

    ranks: list[int]
    planned: list[int]
    rows: list[ExpertGainRow]


ExpertView = TypedDict(
    "ExpertView",
    {
        "layers": int,
        "experts": int,
        "counts": list[list[int]] | None,  # [layers][experts]
        "balancedness": dict[str, float],
        "recording": bool,
        "pass": int,
        "launch": ExpertLaunch,
    },
)
