"""Creates a rank's worker from the resolved configuration, for one rank or many."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moe_engine import logs
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.planning.inputs.machine import available_gb
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.worker.options import WorkerOptions

if TYPE_CHECKING:
    from moe_engine.parallel.context import ParallelContext
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")

GB = 1 << 30
MAX_EXPERT_ROWS = 1 << 16
"""Rows of a grouped GEMM beyond which its tile no longer depends on their number."""


def make_worker(
    config: ResolvedConfig, *, device: str | None = None, parallel: ParallelContext | None = None, progress: bool = True
) -> Worker:
    """Loads the model; logs SGLang's startup lines.

    Args:
        device, parallel: of one of several ranks.
        progress: show a progress bar on stderr while weights are read.
    """
    import torch  # slow import: deferred until the process has reported that it is alive

    from moe_engine.parallel.context import SINGLE
    from moe_engine.worker.device_stream import DeviceStream
    from moe_engine.worker.worker import Worker

    DeviceStream(device or _only_device(config)).bind_thread()
    torch.manual_seed(config.random_seed)
    logger.info("%s", logs.load_begin_line(available_gb(config.device)))
    worker = Worker.create(
        worker_options(config, device),
        parallel=parallel or SINGLE,
        progress=progress and logger.isEnabledFor(logging.INFO),
    )
    info = worker.info
    weights, kv = info.weight_bytes / GB, info.kv_bytes / GB
    before_kv = available_gb(config.device) + kv
    load_end = logs.load_end_line(info.load_seconds, config.model.architecture, config.dtype, before_kv, weights)
    is_mla = config.model.attention.kind == "mla"
    logger.info("%s", load_end)
    logger.info("%s", logs.kv_line(config.kv_cache_dtype, config.max_total_num_tokens, kv, is_mla=is_mla))
    states, copies = worker.runner.rows.states, worker.runner.kv_copies
    if states is not None:
        logger.info("%s", logs.state_line(states.max_rows, states.num_bytes / GB))
    if copies is not None:
        policy = config.hicache_write_policy
        logger.info("%s", logs.host_tier_line(config.host_tier_tokens, copies.num_bytes, policy))
    logger.info("%s", logs.pool_end_line(available_gb(config.device)))
    return worker


def _only_device(config: ResolvedConfig) -> str:
    """Device of a single-process engine."""
    return config.device if config.device == "cpu" else f"{config.device}:{config.args.parallel.base_gpu_id}"


def worker_options(config: ResolvedConfig, device: str | None = None) -> WorkerOptions:
    """The worker's part of the configuration; `device`: of its rank (``cuda:3``) if there are several."""
    return config.select(
        WorkerOptions,
        num_slots=config.max_total_num_tokens,
        max_rows=config.max_running_requests,
        device=device or _only_device(config),
        shapes=largest_shapes(config),
        logits_rows=config.ledger.logits_rows,
    )


def largest_shapes(config: ResolvedConfig) -> StepShapes:
    """Largest step shapes: kernels that compile at first use are warmed up to these before READY."""
    plan, moe, limits = config.parallel, config.model.moe, config.limits
    if moe is None:
        return StepShapes(limits.num_tokens, dtype=config.dtype)
    topology = plan.topology
    held = min(moe.top_k, -(-moe.num_experts // topology.ep_size))  # max experts of one token on one rank
    rows = min(limits.forward_tokens * topology.attn_dp_size * held, MAX_EXPERT_ROWS)
    pads = plan.dispatch is None or plan.dispatch.pads
    capacity = topology.ep_size * limits.low_latency_tokens if pads else 0
    return StepShapes(limits.num_tokens, rows, capacity, plan.dispatch is not None, config.dtype)
