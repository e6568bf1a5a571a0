"""Dispatch and combine through peers' memory with all ranks in one process on one GPU: are the kernels right there,
and what does each launch take when nobody is waited for.

The ranks' memory is plain memory of this GPU, so what would cross NVLink crosses HBM. Launches go phase by phase over
all ranks on one stream. In the end the ranks run on streams of their own, where waiting kernels do wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.peer_memory.exchange import Arrival, PeerExchange
from moe_engine.kernels.peer_memory.regions import Regions

NUM_SLOTS = 2
LIMIT_S = 5.0


@dataclass(frozen=True)
class Load:
    """What every rank brings."""

    num_ranks: int
    num_local: int
    top_k: int
    hidden: int
    tokens: int
    dtype: torch.dtype
    fp8: bool

    @property
    def regions(self) -> Regions:
        pairs, capacity = self.tokens * self.top_k, self.tokens * self.num_ranks
        item = self.dtype.itemsize
        return Regions(self.num_ranks, self.num_local, pairs, capacity, self.hidden, item, self.fp8)


V3_EP8 = Load(8, 32, 8, 7168, 128, torch.bfloat16, fp8=False)


class RanksHere:
    """All ranks of a load, in this process. Expert e multiplies by 1 + e / E."""

    def __init__(self, load: Load, device: str) -> None:
        self._load = load
        num_bytes, num_experts = load.regions.num_bytes(NUM_SLOTS), load.num_ranks * load.num_local
        memory = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(load.num_ranks)]
        addresses = [own.data_ptr() for own in memory]
        self.lost = torch.zeros(load.num_ranks, dtype=torch.int32, pin_memory=device != "cpu")
        self._ranks = [
            PeerExchange(load.regions, NUM_SLOTS, rank, own, addresses, self.lost, LIMIT_S, load.dtype)
            for rank, own in enumerate(memory)
        ]
        shape = (load.num_ranks, load.tokens)
        self.x = torch.randn(*shape, load.hidden, device=device).to(load.dtype)
        self.ids = torch.rand(*shape, num_experts, device=device).topk(load.top_k).indices.to(torch.int32)
        self.weights = torch.rand(*shape, load.top_k, device=device)
        self._factors = 1 + torch.arange(num_experts, device=device) / num_experts
        self.counts: list[Tensor] = []

    def expected(self) -> Tensor:
        """float64 [R, T, D]."""
        factors = self._factors.double()[self.ids.long()]
        return self.x.double() * (self.weights.double() * factors).sum(2, keepdim=True)

    def run(self, number: int, on_phase: Callable[[str, Callable[[], Any]], Any] | None = None) -> Tensor:
        """One dispatch and combine of all ranks, phase by phase; `on_phase` runs each and returns what it returned."""

        def run(name: str, launch: Callable[[int, PeerExchange], Any]) -> Any:
            def call() -> list[Any]:
                return [launch(r, own) for r, own in enumerate(self._ranks)]

            return on_phase(name, call) if on_phase else call()

        run("announce", lambda r, own: own.announce(self.ids[r], number))
        run("send", lambda r, own: own.send(self.x[r], self.ids[r], number))
        arrivals = run("receive", lambda r, own: own.receive(number))
        self.counts = [arrival.counts.clone() for arrival in arrivals]
        rows = [self._experts(r, arrival) for r, arrival in enumerate(arrivals)]
        run("give_back", lambda r, own: own.give_back(rows[r], number))
        return torch.stack(run("sum", lambda r, own: own.sum(self.weights[r], self._load.dtype, number)))

    def run_beside(self, number: int) -> Tensor:
        """The same on a stream for each rank, whole dispatches and combines: kernels wait for each other."""
        streams = [torch.cuda.Stream() for _ in self._ranks]
        out = []
        torch.cuda.synchronize()
        for r, (own, stream) in enumerate(zip(self._ranks, streams)):
            with torch.cuda.stream(stream):
                rows = self._experts(r, own.dispatch(self.x[r], self.ids[r], number))
                out.append(own.combine(rows, self.weights[r], number))
        torch.cuda.synchronize()
        return torch.stack(out)

    def _experts(self, rank: int, arrival: Arrival) -> Tensor:
        local = self._load.num_local
        factors = self._factors[rank * local : (rank + 1) * local].to(self._load.dtype)
        return arrival.rows * factors.view(-1, 1, 1)


def error_of(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm expected; infinite where anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - expected).norm() / expected.norm())


def measure() -> dict[str, Any]:
    """DeepSeek V3's experts on 8 ranks, 128 tokens each, rows in bf16 and in FP8: error and microseconds a rank."""
    from dataclasses import replace

    from benchmarks.gpu_suite.clock import Clock

    clock, lines = Clock(), []
    for fp8, bound in ((False, 1e-2), (True, 6e-2)):
        load = replace(V3_EP8, fp8=fp8)
        ranks = RanksHere(load, "cuda")
        expected = ranks.expected()
        line: dict[str, Any] = {"name": f"v3_ep8.t{load.tokens}{'.fp8' if fp8 else ''}", "bound": bound}
        line["error"] = max(error_of(ranks.run(number % 2), expected) for number in range(3))
        line["error_beside"] = max(error_of(ranks.run_beside(number % 2), expected) for number in range(2))
        line["lost"] = ranks.lost.nonzero().flatten().tolist()
        line["ok"] = max(line["error"], line["error_beside"]) <= bound and not line["lost"]
        line["us"] = _times(ranks, clock, load.num_ranks)
        lines.append(line)
        del ranks
        torch.cuda.empty_cache()
    return {"lines": lines, "wrong": sum(not line["ok"] for line in lines)}


def _times(ranks: RanksHere, clock: Any, num_ranks: int) -> dict[str, float]:
    """Microseconds a rank of each phase. A phase may be launched again, by all ranks: it finds what it found before."""
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        result = call()
        found[name] = clock.seconds(call) / num_ranks * 1e6
        return result

    ranks.run(0, timed)
    return found


def as_text(values: dict[str, Any]) -> str:
    """For people."""
    from benchmarks.report import table

    cells = []
    for line in values["lines"]:
        times = [f"{name} {us:.1f}" for name, us in line["us"].items()]
        cells.append((line["name"], f"{max(line['error'], line['error_beside']):.1e}", "yes" if line["ok"] else "NO",
                      ", ".join(times)))  # fmt: skip
    return table(("exchange, all ranks on this GPU", "error", "holds", "us a rank"), cells)
