"""An emulator of `nvshmem.core` of nvshmem4py 0.4.1 by its source, over gloo. It refuses the calls that the library
refuses.

Contracts: core/init_fini.py (unique id), core/interop/torch.py (whole allocations only), core/collective.py (a stream,
equal dtypes, separate memory). Memory is not zeroed, and a call outside the world's order is refused.
"""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.dispatch.deepep_emulator import must


class UniqueId:
    """``bindings.uniqueid``: a record of numpy."""

    def __init__(self) -> None:
        self._data = np.zeros(1, dtype=[("version", np.int32), ("internal", np.int8, 124)])


class Device:
    """``cuda.core.Device``."""

    def __init__(self) -> None:
        self.is_current = False

    def set_current(self) -> None:
        self.is_current = True


class Core:
    """``nvshmem.core`` of one rank."""

    Teams = SimpleNamespace(TEAM_WORLD=0)

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ready = False
        self._allocations: dict[int, Tensor] = {}

    def get_unique_id(self, empty: bool = False) -> UniqueId:
        made = UniqueId()
        if not empty:
            made._data["internal"] = np.frombuffer(secrets.token_bytes(124), dtype=np.int8)
        return made

    def init(self, device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method="") -> None:
        must(initializer_method == "uid" and None not in (uid, rank, nranks), "invalid parameters for UID based init")
        must(device is not None and device.is_current, "no device is current")
        must(not self._ready, "initialized twice")
        ids = self._share(uid._data.tobytes())
        must(len(set(ids)) == 1 and any(ids[0]), "ranks wait for each other under different unique ids")
        must((rank, nranks) == (self._group.rank(), self._group.size()), "another rank than its own")
        self._ready = True

    def bytetensor(self, shape, dtype=torch.float32, release=False, morder="C", except_on_del=True) -> Tensor:
        must(self._ready, "NVSHMEM Library is not initialized")
        num_bytes = int(np.prod(shape)) * 1  # always uint8
        must(len(set(self._share(num_bytes))) == 1, "ranks allocate different sizes")
        made = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self._allocations[made.data_ptr()] = made
        return made

    def alltoall(self, team, dst_array, src_array, stream=None) -> None:
        must(self._ready and team == self.Teams.TEAM_WORLD, "not the world's team")
        must(stream is not None and stream.__cuda_stream__()[0] == 0, "a stream is needed")
        out, x = (self._allocations.get(tensor.data_ptr()) for tensor in (dst_array, src_array))
        must(out is not None and x is not None and out is not x, "memory that is not tracked by nvshmem")
        assert out is not None and x is not None
        must(dst_array.dtype == src_array.dtype, "non-matching data types")
        must(len(out) == len(x) and len(x) % self._group.size() == 0, "parts of different sizes")
        everyone = self._share(x.view(self._group.size(), -1).clone())
        out.copy_(torch.cat([parts[self._group.rank()] for parts in everyone]))

    def _share(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, value, group=self._group)
        return found
