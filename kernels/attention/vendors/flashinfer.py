"""FlashInfer's wrapper objects: planned on the host once a step, run at each layer.

A wrapper holds one plan at a time, in a page-locked buffer that the device copies from. So a wrapper is planned again
only when the plan before is gone and some others were used since: the copy of a step in flight is left alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries
from moe_engine.kernels.attention.vendors.in_place import Room, widest
from moe_engine.kernels.attention.vendors.paging import Made, StepPlan
from moe_engine.kernels.attention.workspaces import FLASHINFER_BYTES

SPARE = 2
"""Free wrappers that rest before the one freed first is planned again."""


_workspaces: dict[torch.device, Tensor] = {}


def workspace(device: torch.device, num_bytes: int = FLASHINFER_BYTES) -> Tensor:
    """The buffer for partial results, one for all that run on a device, one behind the other. Who asked before for less
    than is needed now keeps the smaller one."""
    known = _workspaces.get(device)
    if known is None or len(known) < num_bytes:
        known = _workspaces[device] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return known


class Planned:
    """A wrapper with a plan in it, and what its owner wants to remember beside it."""

    def __init__(self, wrapper: Any, detail: Any = None) -> None:
        self.wrapper = wrapper
        self.detail = detail


class Wrappers:
    """A supply of wrappers of one class."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: deque[Any] = deque()

    def plan(self, *args: Any, detail: Any = None, **kwargs: Any) -> Planned:
        """A wrapper planned with these arguments; it comes back here when the result is no longer referred to."""
        wrapper = self._free.popleft() if len(self._free) > SPARE else self._make()
        wrapper.plan(*args, **kwargs)
        planned = Planned(wrapper, detail)
        weakref.finalize(planned, self._free.append, wrapper)
        return planned


@dataclass(frozen=True)
class Lists:
    """Where a wrapper of a recorded step keeps the lists of its plan: R requests, up to N pages."""

    query_starts: Tensor  # [R+1] int32
    page_starts: Tensor  # [R+1] int32
    pages: Tensor  # [N] int32, room that all recordings share
    lens: Tensor  # [R] int32

    @classmethod
    def of(cls, queries: PagedQueries, room: Room) -> Lists:
        count, device = queries.num_requests, queries.slot_table.device
        query_starts, page_starts, lens = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (count + 1, count + 1, count)
        )
        return cls(query_starts, page_starts, room.take(count * widest(queries, queries.page_size), device), lens)


class WrapperInPlace(StepPlan):
    """`RenewablePlan` around a wrapper that was made for CUDA graphs: planned anew outside, run inside a recording.

    The wrapper's page-locked buffer is one: before it is written again, its copy to the device must have begun and
    ended. That copy stands in front of the step before last, whose result is known by then, so nobody waits for it.

    Args:
        key: what the plan depends on besides the queries; layers find the wrapper by it.
        arguments: of the wrapper's `plan`, for the queries as they are when it is called.
    """

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
        """What is known. Raises RuntimeError for a layer unlike the ones planned for: its plan would be recorded."""

        def refuse() -> Made:
            raise RuntimeError(f"a step whose layers differ ({key}) cannot be recorded with FlashInfer")

        return super().get(queries, key, refuse)

    def renew(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(**self._arguments())
        if self._copied is not None:
            self._copied.record()
