"""FlashInfer's wrapper objects: planned on the host once per step, run at each layer.

A wrapper holds one plan at a time, in a page-locked buffer that the device copies from. A wrapper is reused only after
its plan was released and several other wrappers were used since, so the copy of a step in flight is never overwritten.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.vendors.in_place import PageBuffer, widest
from moe_engine.kernels.attention.vendors.paging import Made, StepPlan
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.workspaces import FLASHINFER_BYTES

SPARE = 2
"""Min free wrappers before the one freed first is planned again."""


_workspaces: dict[torch.device, Tensor] = {}


def workspace(device: torch.device, num_bytes: int = FLASHINFER_BYTES) -> Tensor:
    """Scratch buffer for partial results, one per device, shared in stream order. A caller that requested a smaller
    size earlier keeps its smaller buffer."""
    known = _workspaces.get(device)
    if known is None or len(known) < num_bytes:
        known = _workspaces[device] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return known


class Planned:
    """A wrapper with a plan, and the owner's data for it."""

    def __init__(self, wrapper: Any, detail: Any = None) -> None:
        self.wrapper = wrapper
        self.detail = detail


class Wrappers:
    """A pool of wrappers of one class."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: deque[Any] = deque()

    def plan(self, *args: Any, detail: Any = None, **kwargs: Any) -> Planned:
        """A wrapper planned with these arguments; returned to the pool when the result is released."""
        wrapper = self._free.popleft() if len(self._free) > SPARE else self._make()
        wrapper.plan(*args, **kwargs)
        planned = Planned(wrapper, detail)
        weakref.finalize(planned, self._free.append, wrapper)
        return planned


@dataclass(frozen=True)
class Lists:
    """Plan lists of a captured step's wrapper: R requests, up to N pages."""

    query_starts: Tensor  # [R+1] int32
    page_starts: Tensor  # [R+1] int32
    pages: Tensor  # [N] int32, shared by all captured graphs
    lens: Tensor  # [R] int32

    @classmethod
    def of(cls, queries: PagedQueries, buffer: PageBuffer) -> Lists:
        count, device = queries.num_requests, queries.slot_table.device
        query_starts, page_starts, lens = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (count + 1, count + 1, count)
        )
        pages = buffer.take(count * widest(queries, queries.page_size), queries)
        return cls(query_starts, page_starts, pages, lens)


class WrapperInPlace(StepPlan):
    """`RenewablePlan` around a wrapper in CUDA-graph mode: replanned outside the graph, run inside.

    The wrapper has one page-locked buffer: before it is overwritten, its copy to the device must have completed. That
    copy precedes the step before last, whose result is already known, so no wait is needed.

    Args:
        key: plan parameters besides the queries; layers look the wrapper up by it.
        arguments: arguments of the wrapper's `plan`, for the queries at call time.
    """

    on_device = False
    common = False

    def __init__(
        self,
        batch: AttentionBatch,
        queries: PagedQueries,
        key: Any,
        wrapper: Any,
        arguments: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__(batch)
        self._wrapper, self._arguments = wrapper, arguments
        device = queries.slot_table.device
        self._copied = None if device == torch.device("cpu") else torch.Event(device)
        super().get(queries, key, lambda: Planned(wrapper))
        self.renew()

    def get(self, queries: PagedQueries, key: Any, make: Callable[[], Made]) -> Made:
        """The cached value. Raises RuntimeError for an unplanned layer type: its plan would be captured."""

        def refuse() -> Made:
            raise RuntimeError(f"a step whose layers differ ({key}) cannot be captured with FlashInfer")

        return super().get(queries, key, refuse)

    def renew(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(**self._arguments())
        if self._copied is not None:
            self._copied.record()
