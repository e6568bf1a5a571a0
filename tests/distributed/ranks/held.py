"""The model of these drills: a tiny real model, equal on all ranks, with a collective in each step.

A test can block one rank at a chosen place, to kill or stop the rank there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import CheckpointError
from moe_engine.executor.options import RankPlace
from moe_engine.executor.progress import Progress

HOLD_SECONDS = 60.0


@dataclass(frozen=True)
class Hold:
    """Rank `rank` blocks for a minute in the `occurrence`-th load, prefill or decode, and writes `flag` first."""

    rank: int
    phase: str
    flag: Path
    occurrence: int = 1


@dataclass
class Meeting:
    """A model whose forward starts with a collective; blocks at the configured place."""

    model: Any
    group: Any
    place: RankPlace
    hold: Hold | None
    seen: int = 0

    def forward(self, batch: Any) -> Any:
        import torch

        phase = "prefill" if batch.num_tokens > 3 else "decode"
        hold_here(self.hold, self.place, phase, self)
        sums = self.group.all_gather(torch.tensor([batch.num_tokens, int(batch.positions.sum())]))
        assert (sums == sums[0]).all(), "the ranks run different steps"
        return self.model.forward(batch)

    def logits(self, hidden: Any, sizes: Any = None, out: Any = None) -> Any:
        return self.model.logits(hidden, sizes, out)


@dataclass
class Count:
    seen: int = 0


def hold_here(hold: Hold | None, place: RankPlace, phase: str, count: Any) -> None:
    if hold is None or place.rank != hold.rank or phase != hold.phase:
        return
    count.seen += 1
    if count.seen == hold.occurrence:
        hold.flag.write_text(str(os.getpid()))
        time.sleep(HOLD_SECONDS)


def meeting_worker(config: Any, place: RankPlace, progress: Progress, hold: Hold | None = None) -> Any:
    import torch.distributed as dist

    from moe_engine.executor.make_worker import make_worker
    from moe_engine.parallel.collectives import DistributedGroup

    progress.phase = lambda: "loading"
    hold_here(hold, place, "load", Count())
    worker = make_worker(config, progress=False)  # the whole model on every rank: all compute the same tokens
    progress.phase = lambda: worker.runner.phase
    group = DistributedGroup(dist.group.WORLD, 30.0, observe=progress.observe)
    worker.runner.forward.model = Meeting(worker.runner.model, group, place, hold)  # after the warm-up of each rank
    return worker


def broken_worker(config: Any, place: RankPlace, progress: Progress) -> Any:
    """Rank 1 finds a broken checkpoint while the others are still loading."""
    if place.rank == 1:
        raise CheckpointError("model-00002.safetensors: truncated")
    time.sleep(HOLD_SECONDS)
