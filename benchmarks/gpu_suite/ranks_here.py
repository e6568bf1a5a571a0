"""All ranks of a dispatch and combine through symmetric memory, in one process on one GPU.

The ranks' memory is plain memory of this GPU, so NVLink traffic becomes HBM traffic. Launches run phase by phase over
all ranks on one stream, or between ranks on separate streams, where kernels wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.kernels.symm_mem.regions import Regions

if TYPE_CHECKING:  # the module imports Triton, which is not needed to read results
    from moe_engine.kernels.symm_mem.exchange import Arrival, SymmMemExchange

NUM_SLOTS = 2
LIMIT_S = 5.0


@dataclass(frozen=True)
class Load:
    """Sizes of every rank."""

    num_ranks: int
    num_local: int
    top_k: int
    hidden: int
    tokens: int
    dtype: torch.dtype
    fp8: bool

    @property
    def regions(self) -> Regions:
        item = self.dtype.itemsize
        return Regions(self.num_ranks, self.num_local, self.tokens, self.top_k, self.hidden, item, self.fp8)


V3_EP8 = Load(8, 32, 8, 7168, 128, torch.bfloat16, fp8=False)
V3_BESIDE = replace(V3_EP8, num_local=4, tokens=2)
"""Ranks on streams of one GPU: few programs, so that a waiting program never blocks the start of the programs it waits
for."""
TINY = Load(3, 2, 3, 256, 4, torch.bfloat16, fp8=False)
TINY_BESIDE = replace(TINY, num_ranks=1, num_local=4)
"""For a dry run, whose device may serialize launches: one rank waits for no other."""
OnPhase = Callable[[str, Callable[[], Any]], Any]


class RanksHere:
    """All ranks of a load, in one process. Expert e multiplies by 1 + e / E."""

    def __init__(self, load: Load, device: str) -> None:
        from moe_engine.kernels.symm_mem.exchange import SymmMemExchange

        self._load = load
        num_bytes, num_experts = load.regions.num_bytes(NUM_SLOTS), load.num_ranks * load.num_local
        self.memory = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(load.num_ranks)]
        addresses = [own.data_ptr() for own in self.memory]
        self.lost = torch.zeros(load.num_ranks, dtype=torch.int32, pin_memory=device == "cuda")
        self.ranks = [
            SymmMemExchange(load.regions, NUM_SLOTS, rank, own, addresses, self.lost, LIMIT_S, load.dtype)
            for rank, own in enumerate(self.memory)
        ]
        shape = (load.num_ranks, load.tokens)
        self.x = torch.randn(*shape, load.hidden, device=device).to(load.dtype)
        self.ids = torch.rand(*shape, num_experts, device=device).topk(load.top_k).indices.to(torch.int32)
        self.weights = torch.rand(*shape, load.top_k, device=device)
        self._factors = 1 + torch.arange(num_experts, device=device) / num_experts
        self._streams = [torch.cuda.Stream() for _ in self.memory] if device == "cuda" else []
        self.counts: list[Tensor] = []

    def expected(self) -> Tensor:
        """float64 [R, T, D]."""
        factors = self._factors.double()[self.ids.long()]
        return self.x.double() * (self.weights.double() * factors).sum(2, keepdim=True)

    def run(self, number: int, on_phase: OnPhase | None = None, apart: bool = False) -> Tensor:
        """One dispatch and combine of all ranks, phase by phase; `on_phase` runs each and returns its result.
        `apart`: every rank on its own stream of `run_beside`."""

        if apart:
            torch.cuda.synchronize()

        def of_each(launch: Callable[[int, SymmMemExchange], Any]) -> list[Any]:
            results = []
            for r, own in enumerate(self.ranks):
                with torch.cuda.stream(self._streams[r]) if apart else nullcontext():
                    results.append(launch(r, own))
            if apart:
                torch.cuda.synchronize()
            return results

        def run(name: str, launch: Callable[[int, SymmMemExchange], Any]) -> Any:
            return on_phase(name, lambda: of_each(launch)) if on_phase else of_each(launch)

        run("send", lambda r, own: own.send(self.x[r], self.ids[r], self.weights[r], number))
        arrivals = run("receive", lambda r, own: own.receive(number))
        self.counts = [arrival.counts.clone() for arrival in arrivals]
        rows = of_each(lambda r, own: self.experts(r, arrivals[r]))
        run("combine_send", lambda r, own: own.combine_send(rows[r], number))
        return self._stacked(run("sum", lambda r, own: own.sum(self._load.tokens, self._load.dtype, number)))

    def run_beside(self, number: int) -> Tensor:
        """`run` with one stream per rank, whole dispatches, then whole combines: kernels wait for each other.

        The host must not synchronize in between: kernels are loaded and streams have their memory after a `run` apart.
        All waiting programs must be resident on the GPU together with the programs they wait for. A device may run its
        cooperative launches one after the other: no sum starts before the last arrival, which its ranks need.
        """
        rows, out = [], []
        torch.cuda.synchronize()
        for r, (own, stream) in enumerate(zip(self.ranks, self._streams)):
            with torch.cuda.stream(stream):
                rows.append(self.experts(r, own.dispatch(self.x[r], self.ids[r], self.weights[r], number)))
        arrived = [stream.record_event() for stream in self._streams]
        for r, (own, stream) in enumerate(zip(self.ranks, self._streams)):
            with torch.cuda.stream(stream):
                own.combine_send(rows[r], number)
                for event in arrived:
                    stream.wait_event(event)
                out.append(own.sum(self._load.tokens, self._load.dtype, number))
        torch.cuda.synchronize()
        return self._stacked(out)

    def _stacked(self, out: list[Tensor]) -> Tensor:
        """Stacks all ranks' results; their memory may return to their streams."""
        stacked = torch.stack(out)
        if stacked.is_cuda:
            torch.cuda.synchronize()
        return stacked

    def experts(self, rank: int, arrival: Arrival) -> Tensor:
        local = self._load.num_local
        factors = self._factors[rank * local : (rank + 1) * local].to(self._load.dtype)
        return arrival.rows * factors.view(-1, 1, 1)


def error_of(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the expected norm; infinite if any value is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - expected).norm() / expected.norm())
