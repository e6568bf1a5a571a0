"""Builds an engine core (scheduler, loop, reporter) from the resolved configuration, for one rank or many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from moe_engine import logs
from moe_engine.config.kv_events import parse_kv_events
from moe_engine.config.parallel import ParallelArgs
from moe_engine.core.core_methods import CoreMethod, ExpertDumps, LoraId, NewWeights, settings_methods
from moe_engine.core.dp_sync import DPSync
from moe_engine.core.engine_info import EngineInfo
from moe_engine.core.executor import StepWorker
from moe_engine.core.kv_arrivals import KVArrivals
from moe_engine.core.kv_event_publisher import KVEventPublisher
from moe_engine.core.kv_transfer.open import open_transfers
from moe_engine.core.loop import CoreTransport, EngineCore, LoopSettings
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.planning.inputs.machine import available_gb
from moe_engine.planning.memory.ledger import GRAPHS_ROW
from moe_engine.planning.output.scheduler_limits import scheduler_config
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.structured_output.backend import GrammarBackend, GrammarSettings
from moe_engine.structured_output.compiler import GrammarCompiler
from moe_engine.structured_output.open_backend import open_backend
from moe_engine.tokenizer.tokenizer import TokenizerSource
from moe_engine.types import StepPlan
from moe_engine.worker.batch.two_batches import find_cut

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker

logger = logging.getLogger("moe_engine")

MAX_MASK_THREADS = 16


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
    first_group: int = 0,
) -> EngineCore:
    """
    Args:
        group: attention group of its replica; first_group: the replica's first among those of all replicas.
        driver: runs plans and calls on the ranks of the group: `SingleRank`, or a `LeaderWorker`.
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
    own = {"dp_rank": first_group + group, "weight_bytes": worker.info.weight_bytes, "kv_bytes": worker.info.kv_bytes}
    kv_arrivals = None
    if config.host_tier_tokens:
        group_size = config.parallel.topology.attn_tp_size if config.storage is not None else 1
        kv_arrivals = KVArrivals(transport.wake, group_size, driver.take_kv_reports)
        worker.on_kv_done(kv_arrivals.report, kv_arrivals.report_storage)
    scheduler = Scheduler(scheduler_config(config))
    if (events := parse_kv_events(config.logging.kv_events_config)) is not None:
        assert scheduler.kv_cache.tree.events is not None
        check = _publishing(KVEventPublisher(events, scheduler.kv_cache.tree.events, group), check)
    if scheduler.kv_cache.transfers is not None:
        check = open_transfers(config, scheduler, worker, driver, transport.wake, check, first_group + group)
    settings = LoopSettings(
        frozenset(config.model.eos_token_ids),
        overlap=not config.scheduling.disable_overlap_schedule,
        group=group,
        first_half=partial(_first_half, config.args.parallel),
        problem_of=lambda plan: config.limits.problem_of(plan.num_tokens, len(plan.rows)),
    )
    return EngineCore(
        scheduler,
        driver,
        transport,
        status,
        StepReporter(config.logging.decode_log_interval, config.logging.record_step_times),
        settings,
        worker_stats=lambda: own | worker.state() | scheduler.table.settings.values(),
        methods=_methods(config, scheduler),
        check=check,
        dp_sync=dp_sync,
        kv_arrivals=kv_arrivals,
        grammars=_grammar_compiler(config),
    )


def _publishing(events: KVEventPublisher, check: Callable[[], None]) -> Callable[[], None]:
    """The core's check of each iteration, which also publishes the events of the one before."""

    def both() -> None:
        check()
        events.flush()

    return both


def _methods(config: ResolvedConfig, scheduler: Scheduler) -> dict[str, CoreMethod]:
    """Methods that the frontend may call, in addition to those of the core itself."""
    table, cache = scheduler.table, scheduler.kv_cache
    found = {"write_experts": ExpertDumps(config.experts.directory).method(), **settings_methods(table.settings)}
    if (slots := table.lora) is not None:
        found["retire_lora"] = CoreMethod(lambda args: slots.retire(args.lora_id), LoraId)
    if (storage := cache.storage) is not None:
        found["renew_storage"] = CoreMethod(lambda args: storage.renew(args.weights), NewWeights)
    if (tier := cache.transfers) is not None:
        found["renew_transfers"] = CoreMethod(lambda args: tier.renew(args.weights), NewWeights)
    return found


def _grammar_compiler(config: ResolvedConfig) -> GrammarCompiler | None:
    """Compiles constraints; tokenizer and backend are loaded for the first one."""
    model, settings = config.args.model, config.select(GrammarSettings)
    if settings.grammar_backend == "none" or model.skip_tokenizer_init:
        return None
    source = TokenizerSource(
        config.tokenizer_path, model.tokenizer_mode, model.trust_remote_code, model.revision
    ).read()

    def open_() -> GrammarBackend:
        eos_ids = tuple(sorted(config.model.eos_token_ids))
        # steps on the CPU hide the mask computation of one thread, and need the other cores
        threads = 1 if config.device == "cpu" else max(1, min(MAX_MASK_THREADS, config.cpu_threads // 2))
        return open_backend(settings, source.load(), config.model.vocab_size, eos_ids, threads)

    return GrammarCompiler(open_)


def _first_half(flags: ParallelArgs, plan: StepPlan) -> int:
    if not flags.enable_two_batch_overlap:
        return 0
    cut = find_cut(plan, flags.tbo_token_distribution_threshold)
    return cut.num_tokens if cut is not None else 0


def engine_info(config: ResolvedConfig, worker: Worker) -> EngineInfo:
    """Facts of the engine, once its worker is ready."""
    model, found = config.model, worker.info
    return config.select(
        EngineInfo,
        model_type=model.model_type,
        architectures=(model.architecture,),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        experts_width=0 if model.moe is None else model.num_layers * model.moe.top_k,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        pooling=model.pooling,
        vision=model.vision,
        weight_bytes=found.weight_bytes,
        kv_bytes=found.kv_bytes,
        graph_bytes=config.ledger.bytes_of(GRAPHS_ROW) if found.num_graphs else 0,
        backends={choice.family: choice.row.name for choice in found.choices},
    )
