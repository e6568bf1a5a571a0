"""Rank 0 of many on a simulated device: the other ranks do not exist, so collectives move no data.

Results of an operation are uninitialized memory of the right shape, as for every large launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, cost_of, size
from benchmarks.step_costs.hardware import Hardware
from tests.simulated_cuda import nccl, observer

OPERATIONS = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "alltoall",
}  # fmt: skip
"""torch's names, and the names in the measured table."""


class AloneNCCL(nccl.ProcessGroupNCCL):
    """A group in which only this process runs."""

    hardware: Hardware

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self._timeout = options._timeout
        self._stream: Any = None
        self._device: Any = None

    def _set_sequence_number_for_group(self) -> None:
        """No effect: there are no other ranks."""

    def barrier(self, opts: Any = None) -> Any:
        return nccl._Done()

    def abort(self) -> None:
        """No effect: nothing runs."""

    def _do(
        self, name: str, out: Sequence[Tensor], x: Sequence[Tensor], opts: Any, alone: Any, *rows: list[int],
        sums: bool = False,
    ) -> Any:  # fmt: skip
        if not self._takes([*out, *x], sums):
            raise NotImplementedError("groups of the host")
        launch, stream = self._launch(name, out[0].device, opts.asyncOp)
        for tensor in x:
            launch.input_format(tensor)
        for tensor in out:
            launch.writes(tensor)
        assert observer.observer is not None
        observer.observer.collective(launch, name, list(out), list(x), self)
        return self._work(stream, [*out, *x])


class AloneSymmetricMemory:
    """`TorchSymmetricMemory` with this rank's memory only."""

    def __init__(self, process_group: Any) -> None:
        """The other ranks have no memory."""

    def allocate(self, group: Any, num_bytes: int) -> Any:
        from moe_engine.parallel.dispatch.symm_mem.memory import SharedBytes

        own = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device)
        return SharedBytes(own, [own.data_ptr()] * group.size)

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)


@cost_of(*OPERATIONS, "broadcast")
def collective(a: Any, s: Setting) -> Cost:
    """a: out, given, group, and the operation's name. Time from the measured table."""
    ranks, operation = a.group.size(), OPERATIONS.get(a.name, "all_gather")
    moved = max(size(*a.out), size(*a.given))
    rounds = 2 if operation == "all_reduce" else 1
    sent = rounds * moved * (ranks - 1) / ranks
    time = a.group.hardware.nccl_us(operation, moved, ranks)
    return Cost(size(*a.given), size(*a.out), nvlink=sent, link_us=time)


def create_worker(config: Any, hardware: Hardware) -> Any:
    """The worker of rank 0, created by the engine's own code for a rank."""
    from moe_engine.executor.sharded_worker import sharded_worker
    from moe_engine.parallel.dispatch.symm_mem import memory

    memory.TorchSymmetricMemory = AloneSymmetricMemory  # type: ignore[misc, assignment]
    AloneNCCL.hardware = hardware
    nccl.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = AloneNCCL  # type: ignore
    ranks = config.parallel.topology.tp_size
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)
    place = SimpleNamespace(rank=0, size=ranks, device="cuda:0")
    progress = SimpleNamespace(phase=None, observe=None)
    return sharded_worker(config, place, progress)  # type: ignore[arg-type]
