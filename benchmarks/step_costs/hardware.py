"""A device's constants, from ``hardware.json``, and the time of a launch by them.

time of a launch = gap + max(shortest kernel, bytes / bandwidth, operations / rate, messages) + programs without work
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.step_costs.costs import Cost

FILE = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind.

    Attributes:
        name: name of the GPU, a key of the file. per_node: GPUs of a node, linked by NVLink.
    """

    name: str
    per_node: int

    @classmethod
    def named(cls, text: str) -> Hardware:
        """``H200x8``: eight to a node.

        Raises:
            ValueError: the file has no such GPU.
        """
        name, _, count = text.partition("x")
        if name not in _table() or (count and not count.isdigit()):
            known = ", ".join(f"{key}x8" for key in _table() if key != "_")
            raise ValueError(f"unknown hardware {text!r}: {FILE.name} has {known}")
        return cls(name, int(count or 8))

    def __getitem__(self, key: str) -> Any:
        return _table()[self.name][key]["value"]

    def microseconds(self, kind: str, cost: Cost, graph: bool) -> float:
        """Time of one launch. kind: ``product``, ``attention`` or ``stream``, each with its own rates."""
        rates = self["product_flops"]
        if kind == "attention":
            compute = cost.total_flops / self["attention_flops"]
        else:
            compute = sum(count / rates[dtype] for dtype, count in cost.flops.items())
        work = max(cost.bytes / self[f"{kind}_bytes_per_s"], compute) * 1e6
        gap = self["graph_node_us" if graph else "eager_gap_us"]
        return gap * cost.launches + max(self["kernel_floor_us"] * cost.launches, work, cost.link_us) + cost.empty_us

    def nccl_us(self, operation: str, num_bytes: int) -> float:
        """Interpolated between measured sizes."""
        return _interpolated(self["nccl_us"][operation], num_bytes)

    def custom_all_reduce_us(self, num_bytes: int) -> float:
        """Time of a launch of the custom all-reduce without its gap, interpolated between measured sizes."""
        return _interpolated(self["custom_all_reduce_us"], num_bytes) - float(self["graph_node_us"])


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
