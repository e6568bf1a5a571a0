"""``torch.distributed._symmetric_memory`` of simulated devices: memory that all processes of a group have mapped.

Kernels access it by address, so `order` cannot check it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated_cuda.memory import MEMORY, POISON

_files: dict[int, str] = {}  # files of the memory at an address, for other processes
_addresses: set[int] = set()


@dataclass(frozen=True)
class Handle:
    buffer_ptrs: list[int]
    keeps: Sequence[Tensor]


def empty(num_bytes: int, *, dtype: torch.dtype, device: Any) -> Tensor:
    """``empty`` for bytes."""
    assert dtype == torch.uint8
    file = os.memfd_create("symmetric")
    os.truncate(file, num_bytes)
    host = _mapped(f"/proc/{os.getpid()}/fd/{file}")
    _files[host.data_ptr()] = f"/proc/{os.getpid()}/fd/{file}"
    tensor = MEMORY.adopt(host.fill_(POISON), torch.device(device).index)
    MEMORY.block(tensor).shared = True
    return tensor


def rendezvous(tensor: Tensor, group: Any) -> Handle:
    own = tensor.data_ptr()
    files: list[Any] = [None] * group.size()
    dist.all_gather_object(files, _files[own], group=group)
    others = [None if rank == group.rank() else _mapped(file) for rank, file in enumerate(files)]
    addresses = [own if other is None else other.data_ptr() for other in others]
    _addresses.update(addresses)
    return Handle(addresses, [tensor, *(other for other in others if other is not None)])


def leads_there(tensor: Tensor) -> bool:
    """True if a device tensor contains addresses of such memory."""
    if not _addresses or tensor.dtype != torch.int64:
        return False
    return not _addresses.isdisjoint(MEMORY.host(tensor).flatten().tolist())


def _mapped(path: str) -> Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def install() -> None:
    """Installs the module for the whole process; idempotent."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.empty, symmetric.rendezvous = empty, rendezvous
