"""Remarks on flags and variables without effect in this launch: logged once at start, never an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from ipaddress import ip_address

from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.field import option_of
from moe_engine.config.lora import LoraArgs
from moe_engine.parallel.recording.config import DIRECTORY_VARIABLE
from moe_engine.planning.flags.resolve_storage import STORAGE_VARIABLE
from moe_engine.planning.model.resolve_lora import is_enabled
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan

DEPENDENTS = {
    "log_requests_level": "log_requests",
    "log_requests_format": "log_requests",
    "log_requests_target": "log_requests",
    "otlp_service_name": "enable_trace",
    "extra_metric_labels": "enable_metrics",
    "priority_scheduling_preemption_threshold": "enable_priority_scheduling",
    "disable_priority_preemption": "enable_priority_scheduling",
    "default_priority_value": "enable_priority_scheduling",
    "prefill_decode_interval_min_bs": "prefill_decode_interval",
    **dict.fromkeys(
        (
            "prefill_delayer_max_delay_passes",
            "prefill_delayer_token_usage_low_watermark",
            "prefill_delayer_queue_min_ratio",
            "prefill_delayer_forward_passes_buckets",
            "prefill_delayer_wait_seconds_buckets",
        ),
        "enable_prefill_delayer",
    ),
    "prefill_delayer_max_delay_ms": "prefill_delayer_queue_min_ratio",
    "torch_compile_max_bs": "enable_torch_compile",
    "torch_compile_cache_dir": "enable_torch_compile",
    "tbo_token_distribution_threshold": "enable_two_batch_overlap",
    "eplb_rebalance_layers_per_chunk": "enable_eplb",
    "eplb_min_rebalancing_utilization_threshold": "enable_eplb",
    "expert_distribution_recorder_buffer_size": "expert_distribution_recorder_mode",
    "kv_connector": "enable_hierarchical_cache",
    "hicache_ratio": "enable_hierarchical_cache",
    "hicache_size": "enable_hierarchical_cache",
    "hicache_host_memory_fraction": "enable_hierarchical_cache",
    "hicache_write_policy": "enable_hierarchical_cache",
    "hicache_mem_layout": "enable_hierarchical_cache",
    "hicache_io_backend": "enable_hierarchical_cache",
    "hicache_storage_dir": "hicache_storage_backend",
    "hicache_storage_size": "hicache_storage_backend",
    "hicache_storage_prefetch_policy": "hicache_storage_backend",
    "hicache_storage_backend_extra_config": "hicache_storage_backend",
}
"""Flag -> the flag without which it has no effect."""

BETWEEN_RANKS = ("moe_a2a_backend", "enable_deepep_moe", "enable_ep_moe")
OF_DISPATCH = ("deepep_mode", "deepep_version", "max_dispatch_tokens_per_rank")
OF_GPUS = ("base_gpu_id", "gpu_id_step")

PREFIXES = ("SGLANG_", "SGL_")
READ = (DIRECTORY_VARIABLE, STORAGE_VARIABLE, "SGLANG_TORCH_PROFILER_DIR")
VARIABLES = {
    "ENABLE_JIT_DEEPGEMM": "DeepGEMM is used if it is installed and can run; override it with --moe-runner-backend and "
    "--linear-backend",
    "DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "use --max-dispatch-tokens-per-rank",
    "RECORD_STEP_TIME": "use --record-step-times",
    "DISABLE_SGL_KERNEL": "use --ops-backend",
    "SIMULATE_ACC_LEN": "use --speculative-simulated-accept-length",
}
"""SGLang's variables, without their prefix, that a flag replaces here."""


def flags_without_effect(args: EngineArgs, device: str, plan: ParallelPlan) -> tuple[str, ...]:
    """A line for each flag that differs from its default and has no effect; and for a server without a key."""
    found = [*_dependents(args), *_parallel(args, device, plan)]
    transfers = args.disaggregation
    if (devices := transfers.disaggregation_ib_device) and transfers.disaggregation_transfer_backend != "mooncake":
        found.append(
            f"--disaggregation-ib-device {devices}: no effect (only --disaggregation-transfer-backend mooncake takes "
            "device names; UCX, which nixl uses, reads UCX_NET_DEVICES)"
        )
    if args.server.host in ("0.0.0.0", "::") and args.server.api_key is None:
        found.append(
            f"--host {args.server.host} without --api-key: every client that reaches this machine can use the model"
        )
    if args.server.enable_custom_logit_processor and args.server.api_key is None and not _is_loopback(args.server.host):
        found.append(
            f"--enable-custom-logit-processor with --host {args.server.host} without --api-key: every client that "
            "reaches this machine can run its own Python code in the engine"
        )
    return tuple(found)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def unread_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each variable of SGLang that is set and not read."""
    found = []
    for name in sorted(environ):
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None or name in READ:
            continue
        instead = VARIABLES.get(name.removeprefix(prefix))
        found.append(f"environment variable {name}: moe-engine does not read it" + (f"; {instead}" if instead else ""))
    return tuple(found)


def _differing(args: EngineArgs) -> dict[str, str]:
    """Each flag that is not at its default, with its value as typed."""
    found = {}
    for part, cls in PARTS.items():
        for item in fields(cls):
            value = getattr(getattr(args, part), item.name)
            if value != item.default:
                found[item.name] = option_of(item.name) + ("" if value is True else f" {value}")
    return found


def _dependents(args: EngineArgs) -> Iterator[str]:
    values, typed = args.flat(), _differing(args)
    values["enable_priority_scheduling"] = args.scheduling.uses_priority
    if not is_enabled(args):
        for name in (item.name for item in fields(LoraArgs) if item.name in typed):
            yield f"{option_of(name)} has no effect without --enable-lora"
    for name, needed in DEPENDENTS.items():
        if name in typed and not values[needed]:
            yield f"{option_of(name)} has no effect without {option_of(needed)}"


def _parallel(args: EngineArgs, device: str, plan: ParallelPlan) -> Iterator[str]:
    typed = _differing(args)

    def listed(names: tuple[str, ...]) -> str:
        return ", ".join(typed[name] for name in names if name in typed)

    if (given := listed(OF_GPUS)) and device == "cpu":
        yield f"{given}: no effect (ranks on a CPU use no GPU)"
    tier = args.memory.enable_hierarchical_cache and device == "cpu"
    if tier and (given := listed(("hicache_host_memory_fraction",))):
        yield f"{given}: no effect (on a CPU the memory ledger includes the host-RAM tier)"
    if tier and (given := listed(("hicache_io_backend",))):
        yield f"{given}: no effect (on a CPU a copy to the host-RAM tier is no transfer)"
    if (given := listed(BETWEEN_RANKS)) and plan.topology.tp_size == 1:
        yield f"{given}: no effect (one rank holds all experts; --tp-size adds ranks)"
    if (given := listed(OF_DISPATCH)) and plan.dispatch is None:
        yield f"{given}: no effect (no tokens are dispatched without --moe-a2a-backend)"
