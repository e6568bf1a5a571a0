"""`nvshmem`, low latency by NVSHMEM's Python package: its all-to-all over symmetric memory, launched on the stream.

The ranks agree on NVSHMEM's unique id over their own group, without MPI. The library's all-to-all accepts only whole
allocations, of equal parts for all ranks: the messages of `StaticAllToAll`. It needs no further barrier: the data of
every rank arrive only after that rank has consumed, in stream order, the data of the buffer's previous use. Memory is
kept until the process ends; freeing it would be collective.
Source: nvshmem4py 0.4.1 (nvshmem/core: init_fini.py, interop/torch.py, collective.py).
Legend: R ranks, M max tokens of a rank.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.payload import RecordFormat, write_parts
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchStream:
    """A stream in the form that the package accepts."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


class Nvshmem:
    """The package, initialized for this rank's device: symmetric memory with an all-to-all. All collective over the
    world.

    Args:
        core: `nvshmem.core`. device: `cuda.core.Device` of this rank.
    """

    def __init__(self, core: Any, device: Any, group: Group) -> None:
        self._core, self._group = core, group
        device.set_current()
        unique_id = core.get_unique_id(empty=group.rank != 0)
        content = unique_id._data.view(np.int8)  # as in the package's own bootstraps
        sent = torch.from_numpy(content.reshape(-1).copy()).to(group.device)
        content.reshape(-1)[:] = group.broadcast(sent, source=0).cpu().numpy()
        core.init(device=device, uid=unique_id, rank=group.rank, nranks=group.size, initializer_method="uid")

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], uninitialized; before any graph capture."""
        return self._core.bytetensor((num_bytes,), dtype=torch.uint8)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        """Part r of `x` to rank r; asynchronous. Both are whole tensors of `empty`."""
        group = self._group
        stream = LaunchStream(0 if group.on_host else torch.cuda.current_stream(group.device).cuda_stream)
        self._core.alltoall(self._core.Teams.TEAM_WORLD, out, x, stream=stream)


def load(group: Group) -> Nvshmem | None:
    """None if the package fails to load on any rank: then all ranks use torch's shuffles. Collective."""
    core = device = None
    try:
        core, device = _modules(group.device)
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("NVSHMEM's Python package does not load (%s): torch's shuffles replace it", error)
    loaded = torch.tensor([core is not None], dtype=torch.int32, device=group.device)
    return Nvshmem(core, device, group) if bool(group.all_gather(loaded).all()) else None


def _modules(device: torch.device) -> tuple[ModuleType, Any]:
    core = importlib.import_module("nvshmem.core")
    return core, importlib.import_module("cuda.core").Device(device.index)


@dataclass(frozen=True)
class SymmetricHandle:
    slot: int
    num_tokens: int


class NvshmemAllToAll:
    """An `Exchange` with the messages of `StaticAllToAll`: M rows for every pair of ranks, and no host wait."""

    def __init__(self, group: Group, shape: DispatchShape, memory: Nvshmem) -> None:
        self._group, self._memory, self._shape = group, memory, shape
        form, rows = RecordFormat.of(shape), shape.max_tokens * group.size
        self._sent = memory.empty(rows * form.num_bytes)
        self._received = [memory.empty(rows * form.num_bytes) for _ in range(NUM_LIVE)]
        records = self._sent.view(rows, -1)
        self._parts = form.view(records)
        self._of_ranks = records.view(group.size, shape.max_tokens, -1)
        self._arrived = [form.view(received.view(rows, -1)) for received in self._received]
        sums = rows * shape.hidden * shape.dtype.itemsize
        self._partial = memory.empty(sums)
        self._returned = [memory.empty(sums) for _ in range(NUM_LIVE)]

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, SymmetricHandle]:
        count = len(tokens.ids)
        write_parts(tokens, self._parts.first(count))
        self._parts.ids[count : self._shape.max_tokens] = -1
        self._of_ranks[1:] = self._of_ranks[0]
        self._memory.all_to_all(self._received[slot], self._sent)
        arrived = self._arrived[slot]
        ids = arrived.ids - self._group.rank * self._shape.num_local
        return arrived.with_ids(ids), SymmetricHandle(slot, count)

    def collect(self, partial: Tensor, handle: SymmetricHandle) -> Tensor:
        self._partial.copy_(partial.contiguous().view(torch.uint8).view(-1))
        returned = self._returned[handle.slot]
        self._memory.all_to_all(returned, self._partial)
        sums = returned.view(self._shape.dtype).view(self._group.size, self._shape.max_tokens, -1)
        return sums[:, : handle.num_tokens].sum(0)
