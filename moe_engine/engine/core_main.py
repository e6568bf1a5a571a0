"""The engine core process: builds worker and scheduler from the resolved configuration and serves until told to stop.

Run as ``python -m moe_engine.engine.core_main`` by `core_process`, with the specification on standard input.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import zmq

from moe_engine import logs
from moe_engine.config.machine import probe_machine
from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine import messages
from moe_engine.engine.core import EngineCore, StepWorker
from moe_engine.engine.core_process import CoreSpec
from moe_engine.engine.process import read_spec
from moe_engine.engine.rank_leader import RankGroup
from moe_engine.engine.reporter import StepReporter
from moe_engine.engine.status_board import StatusBoard
from moe_engine.engine.zmq_port import ZmqPort
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.models import registry
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker, WorkerOptions

logger = logging.getLogger("moe_engine")

GB = 1 << 30


def main() -> int:
    # torch's OpenMP threads would spin for milliseconds after each of its operators and take the cores from our own
    # threads, the front end and everybody else. Read when torch is imported, so it is set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    spec: CoreSpec = read_spec()
    config: ResolvedConfig = spec.config
    logs.setup_logging(config.logging.log_level)
    ready: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    ready.connect(spec.ready_address)
    group: RankGroup | None = None
    try:
        if spec.ranks is not None:
            tag = spec.ranks.places[0].name
            logs.setup_logging(config.logging.log_level, tag)
            group = RankGroup(config, spec.ranks, spec.board_path.parent, config.logging.log_level)
        core, port, info = _build(spec, group)
    except Exception as error:
        kind = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
        text = str(error) if isinstance(error, ConfigError) else f"engine core failed to start: {kind}: {error}"
        ready.send(messages.encode(messages.CoreFailed(text, kind, _details(error))))
        ready.close(5000)
        return _leave(group, 1)
    ready.send(messages.encode(messages.CoreReady(info)))
    ready.close(5000)
    # What start-up left behind lives as long as the process: the collector need not walk it in the middle of a step.
    gc.collect()
    gc.freeze()
    return _leave(group, _serve(core, port))


def _leave(group: RankGroup | None, code: int) -> int:
    """Ends the followers, if there are any, and this process with them: a thread may hang in a lost collective."""
    if group is None:
        return code
    group.close()
    zmq.Context.instance().destroy(1000)
    os._exit(code)


def _details(error: Exception) -> str:
    """The traceback, but of a lost rank: what happened, happened elsewhere."""
    return "" if isinstance(error, EngineDeadError) else "".join(traceback.format_exception(error))


def _serve(core: EngineCore, port: ZmqPort) -> int:
    try:
        core.run()
    except Exception as error:
        logger.error("engine core stops: %s\n%s", error, _details(error))
        port.send(messages.CoreFailed(f"{type(error).__name__}: {error}"))
        port.close()
        return 1
    port.close()
    return 0


def _build(spec: CoreSpec, group: RankGroup | None) -> tuple[EngineCore, ZmqPort, dict[str, Any]]:
    config: ResolvedConfig = spec.config
    sys.path.extend(entry for entry in spec.import_path if entry not in sys.path)
    for architecture in spec.outside_models:
        registry.register(*architecture)
    board = StatusBoard(spec.board_path)
    driver: StepWorker
    if group is None:
        driver = worker = _make_worker(config)
    else:
        driver, worker = group.start()
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
    info = _info(config, worker)
    port = ZmqPort(spec.to_core_address, spec.from_core_address)
    core = EngineCore(
        Scheduler(scheduler_config(config)),
        driver,
        port,
        board,
        StepReporter(config.logging.decode_log_interval),
        eos_token_ids=frozenset(config.model.eos_token_ids),
        overlap=not config.scheduling.disable_overlap_schedule,
        random_seed=config.random_seed,
        worker_stats=lambda: {"weight_bytes": info["weight_bytes"], "kv_bytes": info["kv_bytes"]},
        check=group.check if group is not None else lambda: None,
    )
    board.write(ready=1, last_turn=time.monotonic())
    return core, port, info


def _make_worker(config: ResolvedConfig) -> Worker:
    import torch  # the slow import: after the front end was told that we live

    from moe_engine.worker.worker import Worker

    torch.manual_seed(config.random_seed)
    logger.info("%s", logs.load_begin_line(_available_gb(config)))
    worker = Worker.create(worker_options(config), progress=logger.isEnabledFor(logging.INFO))
    info = worker.info
    weights, kv = info.weight_bytes / GB, info.kv_bytes / GB
    before_kv = _available_gb(config) + kv
    load_end = logs.load_end_line(info.load_seconds, config.model.architecture, config.dtype, before_kv, weights)
    is_mla = config.model.attention.kind == "mla"
    logger.info("%s", load_end)
    logger.info("%s", logs.kv_line(config.kv_cache_dtype, config.max_total_num_tokens, kv, is_mla=is_mla))
    logger.info("%s", logs.pool_end_line(_available_gb(config)))
    return worker


def worker_options(config: ResolvedConfig) -> WorkerOptions:
    """The worker's part of the configuration."""
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
        device=config.device,
        backends=config.asked_backends,
        load_format=config.args.model.load_format,
        num_threads=config.cpu_threads,
        deterministic=config.args.backends.enable_deterministic_inference,
        speculation=config.speculation,
        draft_config=config.draft_model,
    )


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
        enable_mixed_chunk=flags.enable_mixed_chunk,
        schedule_conservativeness=flags.schedule_conservativeness,
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


def _info(config: ResolvedConfig, worker: Worker) -> dict[str, Any]:
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
        "backends": {c.family: c.row.name for c in worker.info.choices},
        "worker": {k: v for k, v in asdict(worker.info).items() if k != "choices"},
    }


if __name__ == "__main__":
    sys.exit(main())
