"""A rank's worker from the resolved configuration: what `RankGroupOptions.make_worker` is in a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.rank_options import RankPlace
from moe_engine.worker.rank_progress import Progress

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker


def replicated_worker(config: ResolvedConfig, place: RankPlace, progress: Progress) -> Worker:
    """The whole model on every rank: all compute the same tokens."""
    import torch

    from moe_engine.engine.core_main import worker_options
    from moe_engine.worker.worker import Worker

    torch.manual_seed(config.random_seed)
    progress.phase = lambda: "loading"
    worker = Worker.create(worker_options(config))
    progress.phase = lambda: worker.runner.phase
    return worker
