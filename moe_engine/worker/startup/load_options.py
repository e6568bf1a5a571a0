"""How a rank loads its model and its drafter."""

from __future__ import annotations

import torch

from moe_engine.models.loader import LoadOptions
from moe_engine.models.read_ahead import Prefetch
from moe_engine.parallel.context import ParallelContext
from moe_engine.worker.options import WorkerOptions


def load_options(
    options: WorkerOptions, device: torch.device, parallel: ParallelContext, progress: bool
) -> LoadOptions:
    prefetch = None
    if options.weight_loader_prefetch_checkpoints:
        prefetch = Prefetch(options.weight_loader_prefetch_num_threads, parallel.node.rank, parallel.node.size)
    return LoadOptions(
        options.dtype, device, options.load_format, options.dummy_seed, progress, prefetch,
        options.weight_loader_drop_cache_after_load,
    )  # fmt: skip
