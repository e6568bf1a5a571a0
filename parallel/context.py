"""Who this rank is among the ranks. Handed to constructors; there is no global getter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelContext:
    """Sizes and ranks along each axis; a single process is every axis at size 1."""

    world_size: int = 1
    world_rank: int = 0
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @property
    def log_tag(self) -> str:
        """What opens a log line after the time: `` DP0 TP1``, only axes wider than one."""
        tag = f" DP{self.attn_dp_rank}" if self.attn_dp_size > 1 else ""
        return tag + (f" TP{self.world_rank}" if self.world_size > 1 else "")


SINGLE = ParallelContext()
