"""Builds an engine core (scheduler, loop, reporter) from the resolved configuration, for one rank or many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_engine import logs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.core.dp_sync import DPSync
from moe_engine.core.executor import StepWorker
from moe_engine.core.expert_calls import ExpertCalls
from moe_engine.core.loop import CoreTransport, EngineCore
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.planning.ledger import GRAPHS_ROW
from moe_engine.planning.machine import available_gb
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.types import StepPlan
from moe_engine.worker.batch.two_batches import find_cut

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")


def make_core(
    config: ResolvedConfig,
    driver: StepWorker,
    worker: Worker,
    transport: CoreTransport,
    status: SharedStatus,
    *,
    check: Callable[[], None] = lambda: None,
    dp_sync: DPSync | None = None,
    group: int = 0,
) -> EngineCore:
    """
    Args:
        driver: runs the plans: `worker` itself, or the `LeaderWorker` of its group.
    """
    logger.info(
        "%s",
        logs.startup_line(
            config.max_total_num_tokens,
            config.chunked_prefill_size,
            config.max_prefill_tokens,
            config.max_running_requests,
            config.context_len,
            available_gb(config.device),
        ),
    )
    own = {
        "weight_bytes": worker.info.weight_bytes,
        "kv_bytes": worker.info.kv_bytes,
        "chunked_prefill_size": config.chunked_prefill_size,
        "max_running_requests": config.max_running_requests,
        "schedule_conservativeness": config.schedule_conservativeness,
    }
    return EngineCore(
        Scheduler(scheduler_config(config)),
        driver,
        transport,
        status,
        StepReporter(config.logging.decode_log_interval),
        eos_token_ids=frozenset(config.model.eos_token_ids),
        overlap=not config.scheduling.disable_overlap_schedule,
        worker_stats=lambda: own | worker.state(),
        experts=ExpertCalls(driver, config.experts.directory),
        check=check,
        dp_sync=dp_sync,
        group=group,
        first_half=partial(_first_half, config.args.parallel),
        problem_of=lambda plan: config.limits.problem_of(plan.num_tokens, len(plan.rows)),
    )


def _first_half(flags: ParallelArgs, plan: StepPlan) -> int:
    if not flags.enable_two_batch_overlap:
        return 0
    cut = find_cut(plan, flags.tbo_token_distribution_threshold)
    return cut.num_tokens if cut is not None else 0


def scheduler_config(config: ResolvedConfig) -> SchedulerConfig:
    """The scheduler's part of the configuration."""
    flags = config.scheduling
    return SchedulerConfig(
        num_slots=config.max_total_num_tokens,
        context_len=config.context_len,
        page_size=config.page_size,
        max_rows=config.max_running_requests,
        policy=flags.schedule_policy,
        chunked_prefill_size=config.chunked_prefill_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_step_tokens=config.limits.num_tokens,
        enable_mixed_chunk=flags.enable_mixed_chunk,
        schedule_conservativeness=config.schedule_conservativeness,
        disable_radix_cache=flags.disable_radix_cache,
        enable_priority_scheduling=flags.enable_priority_scheduling,
        schedule_low_priority_values_first=flags.schedule_low_priority_values_first,
        priority_preemption_threshold=flags.priority_scheduling_preemption_threshold,
        max_queued_requests=flags.max_queued_requests,
        prefill_max_requests=flags.prefill_max_requests,
        vocab_size=config.model.vocab_size,
        random_seed=config.random_seed,
        speculation=config.speculation,
    )


def core_info(config: ResolvedConfig, worker: Worker) -> dict[str, Any]:
    """The fields of `client_api.EngineInfo`, plus facts of the worker."""
    return {
        "model_path": config.model_path,
        "served_model_name": config.served_model_name,
        "model_type": config.model.model_type,
        "architectures": [config.model.architecture],
        "vocab_size": config.model.vocab_size,
        "context_len": config.context_len,
        "max_total_num_tokens": config.max_total_num_tokens,
        "max_req_input_len": config.max_req_input_len,
        "max_running_requests": config.max_running_requests,
        "eos_token_ids": sorted(config.model.eos_token_ids),
        "page_size": config.page_size,
        "dtype": config.dtype,
        "weight_bytes": worker.info.weight_bytes,
        "kv_bytes": worker.info.kv_bytes,
        "graph_bytes": config.ledger.bytes_of(GRAPHS_ROW) if worker.info.num_graphs else 0,
        "backends": {c.family: c.row.name for c in worker.info.choices},
        "worker": {k: v for k, v in asdict(worker.info).items() if k != "choices"},
    }
