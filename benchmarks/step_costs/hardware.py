"""A device's constants, from ``hardware.json`` and the data sheets of `moe_engine.tuning.hardware`, and the time of a
launch by them.

time of a launch = gap + max(shortest kernel, bytes / bandwidth, operations / rate, messages) + programs without work

The gap of a dependent launch (`kernels/triton/dependent.py`) after one that announces it is shorter, by how early it
is announced.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.step_costs.cost import Cost
from moe_engine.tuning.hardware.table import GpuFacts, parse_cluster

FILE = Path(__file__).with_name("hardware.json")
COMMON = "all"
"""Section of the file with constants of every GPU."""
LINK_SHARE = 0.9
"""Share of NVLink's rate in its data sheet that messages reach."""
DATA_SHEET: Mapping[str, Callable[[GpuFacts], Any]] = {
    "memory_bytes": lambda gpu: gpu.memory_bytes,
    "peak_bytes_per_s": lambda gpu: gpu.peak_bytes_per_s,
    "stream_bytes_per_s": lambda gpu: gpu.sustained_share * gpu.peak_bytes_per_s,
    "peak_flops": lambda gpu: gpu.flops,
    "nvlink_bytes_per_s": lambda gpu: LINK_SHARE * gpu.link_bytes_per_s,
    "graph_node_us": lambda gpu: gpu.graph_node_us,
    "host_launch_us": lambda gpu: gpu.eager_launch_us,
}
"""Constants that the planner has too."""


class Announcement(StrEnum):
    """When a kernel announces the next launch of its stream; the name of the gap of a dependent launch after it."""

    NONE = "graph_node_us"
    FIRST = "dependent_node_us"
    """When its own inputs are complete."""
    LATE = "late_node_us"
    """After its last wait for other ranks, or for programs of its launch."""


@lru_cache
def _facts(name: str) -> GpuFacts:
    return parse_cluster(name).gpu


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind.

    Attributes:
        name: name of the GPU, a key of the file. per_node: GPUs of a node, linked by NVLink.
        others: constants that replace those of the file.
    """

    name: str
    per_node: int
    others: tuple[tuple[str, float], ...] = ()

    @classmethod
    def named(cls, text: str) -> Hardware:
        """``H200x8``: eight to a node.

        Raises:
            ValueError: the file has no such GPU.
        """
        name, _, count = text.partition("x")
        known = [key for key in _table() if key not in ("_", COMMON)]
        if name not in known or (count and not count.isdigit()):
            raise ValueError(f"unknown hardware {text!r}: {FILE.name} has {', '.join(f'{key}x8' for key in known)}")
        return cls(name, int(count or 8))

    def __str__(self) -> str:
        return f"{self.name}x{self.per_node}"

    def with_constants(self, given: Sequence[str]) -> Hardware:
        """given: ``NAME=VALUE`` each.

        Raises:
            ValueError: a name of no number, or no number.
        """
        others = [(name, float(value)) for name, _, value in (text.partition("=") for text in given)]
        known = {*DATA_SHEET, *_table()[COMMON], *_table()[self.name]}
        numbers = sorted(name for name in known if isinstance(self[name], int | float))
        if unknown := sorted(name for name, _ in others if name not in numbers):
            raise ValueError(f"{', '.join(unknown)}: not among the constants {', '.join(numbers)}")
        return replace(self, others=tuple(others))

    def __getitem__(self, key: str) -> Any:
        if (other := dict(self.others).get(key)) is not None:
            return other
        if key in DATA_SHEET:
            return DATA_SHEET[key](self.facts)
        own = _table()[self.name]
        return (own[key] if key in own else _table()[COMMON][key])["value"]

    @property
    def facts(self) -> GpuFacts:
        return _facts(self.name)

    def microseconds(self, kind: str, cost: Cost, graph: bool, announced: Announcement = Announcement.NONE) -> float:
        """Time of one launch with its gap. announced: by the launch before it, if this one is dependent."""
        return self.gap_us(cost, graph, announced) + self.work_us(kind, cost)

    def work_us(self, kind: str, cost: Cost) -> float:
        """Time of one launch. kind: ``product``, ``attention`` or ``stream``, each with its own rates."""
        rates = self["product_flops"]
        if kind == "attention":
            compute = cost.total_flops / self["attention_flops"]
        else:
            compute = sum(count / rates[dtype] for dtype, count in cost.flops.items())
        rate = self[f"{kind}_bytes_per_s"]
        if cost.programs is not None:
            rate = min(rate, cost.programs * self["program_bytes_per_s"])
        work = max(cost.bytes / rate, compute) * 1e6
        return float(max(self["kernel_floor_us"] * cost.launches, work, cost.link_us) + cost.empty_us)

    def gap_us(self, cost: Cost, graph: bool, announced: Announcement = Announcement.NONE) -> float:
        """Time before the kernels of a launch, of the same arguments."""
        if not graph:
            return float(self["eager_gap_us"] * cost.launches)
        return float(self[announced] + self["graph_node_us"] * (cost.launches - 1))

    def nccl_us(self, operation: str, num_bytes: int, ranks: int) -> float:
        """Interpolated between measured sizes."""
        return _interpolated(_of_ranks(self["nccl_us"][operation], ranks), num_bytes)

    def custom_all_reduce_us(self, num_bytes: int, ranks: int) -> float:
        """Time of a launch of the custom all-reduce without its gap, interpolated between measured sizes."""
        whole = _interpolated(_of_ranks(self["custom_all_reduce_us"], ranks), num_bytes)
        return whole - float(self["graph_node_us"])


def _of_ranks(tables: dict[str, list[list[float]]], ranks: int) -> list[list[float]]:
    """The measurement with the fewest GPUs that are at least `ranks`, or the one with the most."""
    counts = sorted(map(int, tables))
    return tables[str(next((count for count in counts if count >= ranks), counts[-1]))]


def _interpolated(points: list[list[float]], num_bytes: int) -> float:
    at = bisect_left([size for size, _ in points], num_bytes)
    if at == 0:
        return float(points[0][1])
    if at == len(points):
        return float(points[-1][1] * num_bytes / points[-1][0])
    (low, first), (high, second) = points[at - 1], points[at]
    return float(first + (second - first) * (num_bytes - low) / (high - low))


@lru_cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found
