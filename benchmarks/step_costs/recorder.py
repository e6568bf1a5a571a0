"""Records the launches of a step on a simulated device, with their costs, and the host's waits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.costs import Cost, Setting, kernel_cost, size

aten = torch.ops.aten
OUTSIDE = "outside"
"""The section of launches outside the decoder's layers."""
ROOMS = ("/models/", "/parallel/", "/worker/", "/kernels/")
HELPERS = ("/tests/", "/torch/", "/triton/", "/benchmarks/")
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.mm.out, aten.bmm.out, aten.matmul.default}
GATHERS = {aten.index_select.default, aten.embedding.default, aten.index.Tensor, aten.gather.default}
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "fp32",
    torch.float64: "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One launch."""

    name: str
    section: str
    """``layer 3``, or where else in the step."""
    place: str
    """The file of the engine that launched it, with its line."""
    stream: int
    graph: bool
    cost: Cost


class Recorder:
    """Implements `tests.simulated_cuda.observer.Observer`. Launches of a graph count when it is replayed."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.lines: list[Line] | None = None
        """Of the step that is recorded; None between steps."""
        self.section = OUTSIDE
        self._graphs: dict[int, list[Line]] = {}

    def forget_graphs(self) -> None:
        """Before others are captured."""
        self._graphs.clear()

    # -- Observer

    def operator(self, launch: Any, op: Any, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> None:
        self._add(launch, str(op).removeprefix("aten."), operator_cost(op, given, written, results))

    def copy(self, launch: Any, num_bytes: int, upload: bool) -> None:
        name = "copy host to device" if upload else "copy device to host"
        self._add(launch, name, Cost(read=0 if upload else num_bytes, written=num_bytes if upload else 0))

    def kernel(self, launch: Any, name: str, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        self._add(launch, name, lambda: kernel_cost(name, SimpleNamespace(grid=grid, **arguments), self.setting))

    def library(self, launch: Any, name: str, cost: Cost) -> None:
        """A call of a library's stand-in."""
        self._add(launch, name, cost)

    def collective(self, launch: Any, name: str, out: list[Tensor], given: list[Tensor], group: Any) -> None:
        self._add(launch, name, lambda: kernel_cost(name, SimpleNamespace(out=out, given=given, group=group), self.setting))

    def replayed(self, graph: Any) -> None:
        if self.lines is not None:
            self.lines += self._graphs[id(graph)]

    # --

    def _add(self, launch: Any, name: str, cost: Any) -> None:
        if launch.graph is None and self.lines is None:
            return
        line = Line(
            name, self.section, place(), launch.stream.number, launch.graph is not None,
            cost() if callable(cost) else cost,
        )  # fmt: skip
        if launch.graph is None:
            assert self.lines is not None
            self.lines.append(line)
        else:
            self._graphs.setdefault(id(launch.graph), []).append(line)


def place() -> str:
    """The innermost frame of the engine outside its kernels, else within."""
    frame, inner = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in HELPERS) and any(part in name for part in ROOMS):
            found = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            if "/kernels/" not in name:
                return found
            inner = inner or found
        frame = frame.f_back  # type: ignore[assignment]
    return inner


def operator_cost(op: Any, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> Cost:
    """Of an operator of torch, from its tensors: each input is read, each output written, once."""
    makes = [*written, *results]
    reads = [x for x in given if not any(x is other for other in written)]
    if op in PRODUCTS:
        a, b = reads[-2], reads[-1]
        flops = 2.0 * a.numel() * b.shape[-1]
        return Cost(size(*reads), size(*makes), {DTYPES[a.dtype]: flops})
    if op in GATHERS:  # reads what it takes
        return Cost(size(*reads[1:]) + size(*makes), size(*makes))
    if op in SCATTERS:  # writes what it is given
        values = reads[-1]
        return Cost(size(*reads), size(values))
    in_place = [x for x in written if READS_TOO(op)]
    return Cost(size(*reads, *in_place), size(*makes))


SCATTERS = {aten.index_copy_.default, aten.index_put_.default, aten._index_put_impl_.default, aten.scatter_.src}


def READS_TOO(op: Any) -> bool:  # noqa: N802
    """Whether an operator reads the tensor that it changes."""
    name = op._schema.name
    return name.endswith("_") and name not in ("aten::copy_", "aten::fill_", "aten::zero_")
