"""How the files of a model, and of its drafter, are read through the page cache."""

from __future__ import annotations

from typing import Any

from moe_engine.models.read_ahead import Prefetch
from moe_engine.parallel.context import ParallelContext
from moe_engine.worker.options import WorkerOptions


def file_reads(options: WorkerOptions, parallel: ParallelContext) -> dict[str, Any]:
    """The arguments `prefetch` and `drop_cache` of `models.loader`, from the flags --weight-loader-*."""
    prefetch = None
    if options.weight_loader_prefetch_checkpoints:
        prefetch = Prefetch(options.weight_loader_prefetch_num_threads, parallel.node.rank, parallel.node.size)
    return {"prefetch": prefetch, "drop_cache": options.weight_loader_drop_cache_after_load}
