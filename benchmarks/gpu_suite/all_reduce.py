"""The all-reduce through symmetric memory with all ranks in one process on one GPU, each on a stream of its own, where
kernels wait for each other: correctness, and the time of a call of all ranks.

The ranks' memory is plain memory of this GPU. Few rows: all waiting programs must be resident at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.ranks_here import LIMIT_S, error_of
from moe_engine.kernels.quantization.protocol import UNQUANTIZED
from moe_engine.kernels.symm_mem.all_reduce_layout import Arenas

ROWS = (2, 24)
"""Of 8 ranks with DeepSeek V3's hidden size: one exchange, and two."""
EPS = 1e-6


def shape_of(dry: bool) -> tuple[int, int]:
    """Ranks and hidden size: in a dry run one rank, because its device may run one launch after the other."""
    return (1, 256) if dry else (8, 7168)


class RanksOfSum:
    """All ranks of an all-reduce of x [R, T, D], with the residual and the norm that follow."""

    def __init__(self, num_ranks: int, rows: int, width: int, device: str) -> None:
        from moe_engine.kernels.symm_mem.all_reduce import SymmMemAllReduce

        arenas = Arenas(num_ranks, width, torch.bfloat16.itemsize)
        self._memory = [torch.zeros(arenas.num_bytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
        addresses = [own.data_ptr() for own in self._memory]
        self.lost = torch.zeros(num_ranks, dtype=torch.int32, pin_memory=device == "cuda")
        self.ranks = [
            SymmMemAllReduce(arenas, rank, own, addresses, self.lost, LIMIT_S)
            for rank, own in enumerate(self._memory)
        ]  # fmt: skip
        self.x = torch.randn(num_ranks, rows, width, device=device).bfloat16()
        self.residual = torch.randn(rows, width, device=device).bfloat16()
        self.weight = torch.rand(width, device=device)
        self._streams = [torch.cuda.Stream() for _ in self.ranks] if device == "cuda" else []
        for stream in self._streams:  # memory of each stream: while a kernel waits nothing may be allocated
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                kept = [self.residual.clone() for _ in range(3)]
            del kept

    def expected(self) -> Tensor:
        """The norm that each rank has, float64."""
        stream = (self.x.double().sum(0).bfloat16() + self.residual).double()
        return stream * (stream.square().mean(1, keepdim=True) + EPS).rsqrt() * self.weight.double()

    def call(self, rank: int) -> Tensor:
        found = self.ranks[rank].add_rms_norm(UNQUANTIZED, self.x[rank], self.residual.clone(), self.weight, EPS)
        assert isinstance(found, Tensor)
        return found

    def run_beside(self) -> Tensor:
        """The results [R, T, D] of one call of all ranks at the same time."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        found = []
        for rank, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                found.append(self.call(rank))
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        return torch.stack(found)


def measure(num_ranks: int, width: int, rows: int, clock: Any) -> dict[str, Any]:
    """A line: the error over several calls, and microseconds of a call, launches of all ranks included."""
    ranks = RanksOfSum(num_ranks, rows, width, "cuda")
    expected = ranks.expected()
    error = max(error_of(found, expected) for _ in range(3) for found in ranks.run_beside())
    lost = ranks.lost.nonzero().flatten().tolist()
    us = clock.seconds(ranks.run_beside) * 1e6
    return {"bound": 1e-2, "error": error, "lost": lost, "ok": error <= 1e-2 and not lost, "us": {"all ranks": us}}
