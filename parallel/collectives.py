"""Collectives of a group of ranks, over any backend of torch.distributed (gloo on CPUs, NCCL on GPUs).

A `Group` is passed to its users; there is no global state. Every operation is collective: all ranks of the group call
it in the same order. Tensors are sent as bytes, so that every dtype works (gloo rejects float8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.errors import EngineDeadError

Observer = Callable[[str, list[int]], None]


class PeerLost(EngineDeadError):
    """A collective failed: a peer died, timed out or is unreachable. The message names the operation."""

    @classmethod
    def late(cls, operation: str, group: Group, ranks: Sequence[int]) -> PeerLost:
        """`ranks` did not reach a kernel's barrier within the group's timeout."""
        return cls(
            f"{operation} through symmetric memory on rank {group.rank} of {group.size}: ranks {list(ranks)} did not "
            f"arrive within {group.timeout_s:g} s"
        )


class Group(Protocol):
    """A group of ranks and its collectives. Operations raise `PeerLost`."""

    size: int
    rank: int
    timeout_s: float
    device: torch.device
    alive: Tensor | None
    """bool [size] on the device: ranks that take part; the other ranks send no data; None: all."""
    on_host: bool
    """True if the host moves the bytes (gloo): operations block, and tensors are in host memory."""

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        """Sends x_rows[r] rows of `x` to each rank r, in order, and receives out_rows[r] rows from each into `out`.

        Both tensors are contiguous, [rows, ...], of one dtype; None means equal shares. With `on_host`, a rank may send
        fewer rows than the receiver expects: they fill the start of its part, and their number is not transmitted.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """x, of the same shape on every rank -> [size, *x.shape]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size, ...] -> the sum over ranks of their x[rank], in x's dtype."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, bit-identical on all ranks; may overwrite x."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Fills `x` with the source rank's values; returns it."""

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        """Sends values[r] to rank r; returns the value received from each rank. Blocks: the result is on the host."""

    def barrier(self) -> None:
        """Returns when every rank has entered the barrier."""

    def check(self) -> None:
        """Raises `PeerLost` if the group's pending operations were aborted."""


class SingleRank:
    """A group of one rank, without communication."""

    size = 1
    rank = 0
    timeout_s = 0.0
    alive: Tensor | None = None
    on_host = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        out.copy_(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def barrier(self) -> None:
        return None

    def check(self) -> None:
        return None


class DistributedGroup:
    """A process group of torch.distributed as a `Group`.

    Args:
        process_group: created with `timeout_s`; torch's default timeout (half an hour) would hide a dead peer.
        device: device of the communicated tensors.
        observe: called with the name of every operation and its bytes for each rank (its own included).
    """

    alive: Tensor | None = None

    def __init__(
        self, process_group: Any, timeout_s: float, device: torch.device | str = "cpu", observe: Observer | None = None
    ) -> None:
        self.size: int = process_group.size()
        self.rank: int = process_group.rank()
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self.on_host = dist.get_backend(process_group) == "gloo"
        self._process_group = process_group
        self._observe = observe

    @classmethod
    def of(
        cls, ranks: Sequence[int], backend: str, timeout_s: float, device: torch.device | str = "cpu"
    ) -> DistributedGroup | None:
        """A new group of these world ranks; None on a rank outside it. Collective over the world."""
        process_group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
        return cls(process_group, timeout_s, device) if dist.get_rank() in ranks else None

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        if self._observe is not None:
            shares = x_rows if x_rows is not None else [len(x) // self.size] * self.size
            row_bytes = x.nbytes // max(len(x), 1)
            self._observe("all_to_all", [rows * row_bytes for rows in shares])
        call = _gloo_all_to_all if self.on_host else dist.all_to_all_single
        self._run("all_to_all", call, _bytes(out), _bytes(x), _list(out_rows), _list(x_rows))

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        self.report("all_gather", [x.nbytes] * self.size)
        self._run("all_gather", _all_gather, _bytes(out).flatten(), _bytes(x.contiguous()).flatten())
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        self.report("reduce_scatter", [out.nbytes] * self.size)
        self._run("reduce_scatter", _reduce_scatter, out.flatten(), x.contiguous().flatten())
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.report("all_reduce", [x.nbytes] * self.size)
        self._run("all_reduce", dist.all_reduce, x)
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.report("broadcast", [x.nbytes if self.rank == source else 0] * self.size)
        self._run("broadcast", dist.broadcast, _bytes(x), group_src=source)
        return x

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        return exchange_ints(self, values)

    def barrier(self) -> None:
        self._run("barrier", dist.barrier)

    def check(self) -> None:
        return None

    def report(self, operation: str, num_bytes: list[int]) -> None:
        """Reports the bytes about to be sent to each rank to the observer."""
        if self._observe is not None:
            self._observe(operation, num_bytes)

    def _run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, group=self._process_group, **kwargs)
        except RuntimeError as error:  # gloo raises only this type; torch's errors derive from it
            raise self._peer_lost(operation, error) from error

    def _peer_lost(self, operation: str, error: RuntimeError) -> PeerLost:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return PeerLost(
            f"{operation} failed on rank {self.rank} of {self.size} (timeout {self.timeout_s:g} s): {reason}"
        )


def exchange_ints(group: Group, values: Sequence[int]) -> list[int]:
    """`Group.exchange_ints` in terms of `Group.all_to_all`."""
    sent = torch.tensor(values, dtype=torch.int64, device=group.device)
    received = torch.empty_like(sent)
    group.all_to_all(received, sent)
    return received.tolist()


# torch 2.13 renames both
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gloo_all_to_all(
    out: Tensor, x: Tensor, out_rows: list[int] | None, x_rows: list[int] | None, group: Any, async_op: bool = False
) -> Any:
    """dist.all_to_all_single without its checks, which take as long as a small message."""
    work = group.alltoall_base(out, x, out_rows or [], x_rows or [], dist.AllToAllOptions())
    return work if async_op else work.wait()


def _bytes(x: Tensor) -> Tensor:
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def _list(rows: Sequence[int] | None) -> list[int] | None:
    return None if rows is None else list(rows)
