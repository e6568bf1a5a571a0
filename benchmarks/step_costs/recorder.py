"""Records the launches of a step on a simulated device, with their costs, and the host's waits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, kernel_cost, memory_of, size
from benchmarks.step_costs.hardware import Announcement

OUTSIDE = "outside"
"""The section of launches outside the decoder's layers."""
DRAFT = "draft"
"""The section of MTP layers."""
NGRAMS = "n-gram layer"
"""Begins the sections of rows of n-gram tables, with the section that they interrupt."""
ROOMS = ("/models/", "/parallel/", "/worker/", "/kernels/")
HELPERS = ("/tests/", "/torch/", "/triton/", "/benchmarks/")
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm"}
GATHERS = {"aten::index_select", "aten::embedding", "aten::index", "aten::gather"}
SCATTERS = {
    "aten::index_copy", "aten::index_copy_", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::scatter", "aten::scatter_",
}  # fmt: skip
OVERWRITES = {"aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_"}
"""In-place operators that do not read their destination."""
LATE = {"one_shot_kernel", "two_shot_kernel", "sum_kernel", "receive_kernel", "route_kernel"}
"""Kernels that announce the next launch after their last wait for ranks, or for programs of their launch; beside them
`place_kernel` and `norm_route_kernel`, if they wait."""
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "fp32",
    torch.float64: "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One launch."""

    name: str
    section: str
    """``layer 3``, or another section of the step."""
    place: str
    """The file of the engine that launched it, with its line."""
    stream: int
    graph: bool
    cost: Cost
    tick: int = 0
    """Index of the launch in its stream."""
    behind: Mapping[int, int] = field(default_factory=dict)
    """The last launch of each other stream, by its tick, that ends before this launch begins."""
    announced: Announcement = Announcement.NONE
    """For a dependent launch: the announcement by the launch directly before it in its stream."""

    @property
    def early(self) -> bool:
        """It starts while the launch before it ends."""
        return self.announced is not Announcement.NONE


@dataclass(frozen=True)
class HostWait:
    """The host waited for the device. thread: the waiting thread; where: the innermost frames of the engine."""

    section: str
    what: str
    thread: str
    where: str


class Recorder:
    """Implements `tests.simulated_cuda.observer.Observer`. Launches of a graph count when it is replayed."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self.settings = settings
        """By section; other layers count as outside."""
        self.lines: list[Line] | None = None
        """Launches of the recorded step; None between steps."""
        self.section = OUTSIDE
        self.waits: list[HostWait] = []
        self._graphs: dict[int, list[Line]] = {}
        self._announced: dict[tuple[int, int], tuple[Announcement, Mapping[int, int]]] = {}
        """By graph and stream: the last launch's announcement of the next, and the progress of other streams that it
        waited for."""

    @property
    def setting(self) -> Setting:
        return self.settings.get(self.section, self.settings[OUTSIDE])

    def forget_graphs(self) -> None:
        """Called before other graphs are captured."""
        self._graphs.clear()
        self._announced.clear()

    # -- Observer

    def operator(self, launch: Any, op: Any, given: list[Tensor], written: list[Tensor], results: list[Tensor]) -> None:
        self._add(launch, str(op).removeprefix("aten."), operator_cost(op, given, written, results))

    def copy(self, launch: Any, num_bytes: int, upload: bool) -> None:
        name = "copy host to device" if upload else "copy device to host"
        self._add(launch, name, Cost(read=0 if upload else num_bytes, written=num_bytes if upload else 0))

    def kernel(self, launch: Any, name: str, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        from moe_engine.kernels.triton import dependent  # not before the process has chosen Triton's interpreter

        given = SimpleNamespace(grid=grid, **arguments)
        declared = name in dependent.KERNELS
        waits = declared and not dependent.COOPERATIVE.items() <= arguments.items()
        announces = Announcement.FIRST if declared else Announcement.NONE
        if name in LATE or arguments.get("WAITS"):
            announces = Announcement.LATE
        self._add(launch, name, lambda: kernel_cost(name, given, self.setting), waits, announces)
        if name in ("router_select_kernel", "route_kernel", "norm_route_kernel"):
            choose_evenly(given.ids, given.EXPERTS)

    def library(
        self, launch: Any, name: str, cost: Cost, dependent: bool = False, announces: Announcement = Announcement.NONE
    ) -> None:
        """A call of a library's stand-in; dependent: it is launched so; announces: its kernel announces the next."""
        self._add(launch, name, cost, dependent, announces)

    def collective(self, launch: Any, name: str, out: list[Tensor], given: list[Tensor], group: Any) -> None:
        self._add(
            launch,
            name,
            lambda: kernel_cost(name, SimpleNamespace(name=name, out=out, given=given, group=group), self.setting),
        )

    def waited(self, wait: Any) -> None:
        self.waits.append(HostWait(self.section, wait.what, wait.thread, wait.where))

    def replayed(self, graph: Any) -> None:
        if self.lines is not None:
            self.lines += self._graphs[id(graph)]

    # --

    def _add(
        self, launch: Any, name: str, cost: Any, dependent: bool = False, announces: Announcement = Announcement.NONE
    ) -> None:
        if launch.graph is None and self.lines is None:
            return
        stream, behind = (id(launch.graph), launch.stream.number), dict(launch.stream.clock)
        others = {number: tick for number, tick in behind.items() if number != launch.stream.number}
        announced, waited = self._announced.get(stream, (Announcement.NONE, others))
        if not dependent or launch.graph is None or waited != others:
            announced = Announcement.NONE
        line = Line(
            name, self.section, place(), launch.stream.number, launch.graph is not None,
            cost() if callable(cost) else cost, launch.tick, behind, announced,
        )  # fmt: skip
        self._announced[stream] = announces, others
        if launch.graph is None:
            assert self.lines is not None
            self.lines.append(line)
        else:
            self._graphs.setdefault(id(launch.graph), []).append(line)


def choose_evenly(ids: Tensor, num_experts: int) -> None:
    """ids [T, K]: different experts for each token, all equally often. Dispatchers check the ids that they send."""
    from tests.simulated_cuda.memory import MEMORY

    tokens, top_k = ids.shape
    first = torch.arange(tokens).unsqueeze(1) * top_k
    MEMORY.host(ids).copy_((first + torch.arange(top_k)) % num_experts)


def place() -> str:
    """The innermost frame of the engine outside its kernels, else inside them."""
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
    """Cost of a torch operator, from its tensors: each input is read, each output written, once."""
    name, makes, reads = op._schema.name, [*written, *results], list(given)
    if not name.endswith("_") or name in OVERWRITES:
        for x in written:  # the destination counts once: it may be an input, too
            del reads[max(i for i, other in enumerate(reads) if other is x)]
    if name in PRODUCTS:
        a, b = reads[-2:]
        return Cost(size(*reads), size(*makes), {DTYPES[a.dtype]: 2.0 * a.numel() * b.shape[-1]}, weights=memory_of(b))
    if name in GATHERS:  # reads only the gathered elements
        return Cost(size(*reads[1:]) + size(*makes), size(*makes))
    if name in SCATTERS:  # writes only the given elements
        return Cost(size(*reads[1:]), size(reads[-1]))
    return Cost(size(*reads), size(*makes))
