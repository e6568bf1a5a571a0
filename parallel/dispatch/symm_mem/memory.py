"""Symmetric memory: memory of each rank that all ranks of a group can access; the interface to its provider.

Source: torch/distributed/_symmetric_memory/__init__.py, torch/csrc/distributed/c10d/symm_mem (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.symm_mem.availability import without_multicast


@dataclass(frozen=True)
class SharedBytes:
    """Attributes:
    own: uint8, zeroed; freed with this tensor.
    addresses: addresses of every rank's bytes in this rank's address space, in rank order, its own included.
    keeps: objects that keep the addresses valid.
    """

    own: Tensor
    addresses: Sequence[int]
    keeps: Any = None


class SymmetricMemory(Protocol):
    """Provider of symmetric memory for a group of ranks."""

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        """Collective; before any graph capture. On return, every rank's bytes are zero and accessible.

        Raises:
            ValueError: a rank's memory is not accessible with plain loads and stores; on all ranks.
        """

    def words_for_host(self, count: int) -> Tensor:
        """int32 [count], zeros that kernels write and the host reads without waiting for the device."""


class TorchSymmetricMemory:
    """torch's symmetric memory on CUDA.

    Args:
        process_group: torch's process group, of the group's ranks in their order.
    """

    def __init__(self, process_group: Any) -> None:
        without_multicast()
        self._process_group = process_group

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.empty(0, device=group.device).device  # with its index
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        own.zero_()
        handle, bases, reason = None, [0] * group.size, ""
        try:
            handle = symmetric.rendezvous(own, self._process_group)
        except RuntimeError as error:
            reason = f"the ranks' GPUs cannot access each other's memory: {_first_line(error)}"
        else:
            bases = list(handle.buffer_ptrs)
            unreachable = [rank for rank, base in enumerate(bases) if not base]
            if unreachable:
                reason = f"ranks {unreachable} are in another NVLink domain, not accessible by plain pointers"
        own[-1].item()  # waits until the zeros are written
        reasons: list[str] = [""] * group.size
        dist.all_gather_object(reasons, reason, group=self._process_group)
        failed = [rank for rank, why in enumerate(reasons) if why]
        if failed:
            raise ValueError(f"rank {failed[0]}: {reasons[failed[0]]}")
        offset = own.data_ptr() - bases[group.rank]  # offset of the tensor in torch's allocation, the same on all ranks
        return SharedBytes(own, [base + offset for base in bases], handle)

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
