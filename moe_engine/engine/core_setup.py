"""An engine core's parts from the resolved configuration: for the core of a single rank and for those of many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_engine import logs
from moe_engine.config.ledger import GRAPHS_ROW
from moe_engine.config.machine import probe_machine
from moe_engine.config.parallel import ParallelArgs
from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.core import EngineCore, Port, Regroup, StepWorker
from moe_engine.engine.expert_calls import ExpertCalls
from moe_engine.engine.ranks.lockstep import Lockstep
from moe_engine.engine.reporter import StepReporter
from moe_engine.engine.status_board import StatusBoard
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.types import StepPlan
from moe_engine.worker.two_batches import find_cut

if TYPE_CHECKING:
    from moe_engine.parallel.context import ParallelContext
    from moe_engine.worker.worker import Worker, WorkerOptions

logger = logging.getLogger("moe_engine")

GB = 1 << 30
MAX_EXPERT_ROWS = 1 << 16
"""Rows of a grouped product beyond which its tile no longer changes with their number."""


def make_core(
    config: ResolvedConfig,
    driver: StepWorker,
    worker: Worker,
    port: Port,
    board: StatusBoard,
    *,
    check: Callable[[], None] = lambda: None,
    lockstep: Lockstep | None = None,
    group: int = 0,
    regroup: Regroup | None = None,
) -> EngineCore:
    """
    Args:
        driver: what runs the plans: the `worker` itself, or what leads its group.
    """
    logger.info(
        "%s",
        logs.startup_line(
            config.max_total_num_tokens,
            config.chunked_prefill_size,
            config.max_prefill_tokens,
            config.max_running_requests,
            config.context_len,
            _available_gb(config),
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
        port,
        board,
        StepReporter(config.logging.decode_log_interval),
        eos_token_ids=frozenset(config.model.eos_token_ids),
        overlap=not config.scheduling.disable_overlap_schedule,
        worker_stats=lambda: own | worker.state(),
        experts=ExpertCalls(driver, config.experts.directory),
        check=check,
        lockstep=lockstep,
        group=group,
        regroup=regroup,
        first_half=partial(_first_half, config.args.parallel),
        problem_of=lambda plan: config.limits.problem_of(plan.num_tokens, len(plan.rows)),
    )


def _first_half(flags: ParallelArgs, plan: StepPlan) -> int:
    if not flags.enable_two_batch_overlap:
        return 0
    cut = find_cut(plan, flags.tbo_token_distribution_threshold)
    return cut.num_tokens if cut is not None else 0


def make_worker(
    config: ResolvedConfig,
    *,
    device: str | None = None,
    parallel: ParallelContext | None = None,
    progress: bool = True,
) -> Worker:
    """Loads the model; what SGLang's users look for is logged.

    Args:
        device, parallel: of a rank of many.
        progress: a bar on stderr while weights are read.
    """
    import torch  # the slow import: after the front end was told that we live

    from moe_engine.parallel.context import SINGLE
    from moe_engine.worker.worker import Worker

    torch.manual_seed(config.random_seed)
    logger.info("%s", logs.load_begin_line(_available_gb(config)))
    worker = Worker.create(
        worker_options(config, device),
        parallel=parallel or SINGLE,
        progress=progress and logger.isEnabledFor(logging.INFO),
    )
    info = worker.info
    weights, kv = info.weight_bytes / GB, info.kv_bytes / GB
    before_kv = _available_gb(config) + kv
    load_end = logs.load_end_line(info.load_seconds, config.model.architecture, config.dtype, before_kv, weights)
    is_mla = config.model.attention.kind == "mla"
    logger.info("%s", load_end)
    logger.info("%s", logs.kv_line(config.kv_cache_dtype, config.max_total_num_tokens, kv, is_mla=is_mla))
    logger.info("%s", logs.pool_end_line(_available_gb(config)))
    return worker


def _only_device(config: ResolvedConfig) -> str:
    """Of a single process."""
    return config.device if config.device == "cpu" else f"{config.device}:{config.args.parallel.base_gpu_id}"


def worker_options(config: ResolvedConfig, device: str | None = None) -> WorkerOptions:
    """The worker's part of the configuration; `device` of its rank (``cuda:3``), where there are several."""
    from moe_engine.worker.worker import WorkerOptions

    return WorkerOptions(
        model_path=config.model_path,
        model_config=config.model,
        dtype=config.dtype,
        kv_dtype=config.kv_cache_dtype,
        num_slots=config.max_total_num_tokens,
        context_len=config.context_len,
        max_rows=config.max_running_requests,
        page_size=config.page_size,
        device=device or _only_device(config),
        backends=config.asked_backends,
        load_format=config.args.model.load_format,
        num_threads=config.cpu_threads,
        deterministic=config.args.backends.enable_deterministic_inference,
        speculation=config.speculation,
        draft_config=config.draft_model,
        experts=config.experts,
        graphs=config.graphs,
        compiled=config.compiled,
        shapes=largest_shapes(config),
        logits_rows=config.ledger.logits_rows,
    )


def largest_shapes(config: ResolvedConfig) -> StepShapes:
    """The sizes up to which kernels that compile at first use do so before READY."""
    plan, moe, limits = config.parallel, config.model.moe, config.limits
    if moe is None:
        return StepShapes(limits.num_tokens)
    topology = plan.topology
    held = min(moe.top_k, -(-moe.num_experts // topology.ep_size))  # experts of a token that can be on one rank
    rows = min(limits.forward_tokens * topology.attn_dp_size * held, MAX_EXPERT_ROWS)
    capacity = topology.ep_size * limits.low_latency_tokens
    return StepShapes(limits.num_tokens, rows, capacity, plan.dispatch is not None)


def _available_gb(config: ResolvedConfig) -> float:
    return probe_machine(config.device).available_bytes / GB


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
    """The fields of `client_api.EngineInfo`, and what else is worth showing."""
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
