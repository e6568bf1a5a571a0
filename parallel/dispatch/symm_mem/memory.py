"""Memory of this rank that all ranks of a group reach, and where this rank reaches theirs: the seam to what gives it.

Source: torch/distributed/_symmetric_memory/__init__.py, torch/csrc/distributed/c10d/symm_mem (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.parallel.collectives import Group


@dataclass(frozen=True)
class SharedBytes:
    """Attributes:
    own: uint8, zeroed; it lives as long as this tensor.
    addresses: of every rank's bytes as this rank reaches them, in the order of ranks, its own included.
    keeps: what the addresses live by.
    """

    own: Tensor
    addresses: Sequence[int]
    keeps: Any = None


class SymmetricMemory(Protocol):
    """What gives memory to a group of ranks."""

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        """Collective; before any graph is captured. When it returns, every rank's bytes are zero and reachable.

        Raises:
            ValueError: a rank cannot be reached with plain loads and stores.
        """

    def words_for_host(self, count: int) -> Tensor:
        """int32 [count], zeros that kernels write and the host reads without waiting for the device."""


class TorchSymmetricMemory:
    """torch's symmetric memory on CUDA.

    Args:
        process_group: torch's own, of the group's ranks in their order.
    """

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.empty(0, device=group.device).device  # with its number
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        own.zero_()
        try:
            handle = symmetric.rendezvous(own, self._process_group)
        except RuntimeError as error:
            raise ValueError(f"the ranks' GPUs cannot reach each other's memory: {_first_line(error)}") from error
        bases = list(handle.buffer_ptrs)
        unreachable = [rank for rank, base in enumerate(bases) if not base]
        if unreachable:
            raise ValueError(f"no plain pointer leads to ranks {unreachable}: they are in another NVLink domain")
        offset = own.data_ptr() - bases[group.rank]  # of the tensor in what torch allocated, alike everywhere
        own[-1].item()  # the zeros have landed
        group.barrier()
        return SharedBytes(own, [base + offset for base in bases], handle)

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
