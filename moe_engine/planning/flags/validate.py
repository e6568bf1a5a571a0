"""Validates flags: values out of range, and pairs of flags that contradict each other (the error names both)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF, REFUSED_TRANSPORTS, TRANSPORT_LIBRARIES
from moe_engine.config.field import option_of
from moe_engine.config.kv_events import parse_kv_events
from moe_engine.config.scheduling import CACHE_AWARE_POLICIES
from moe_engine.config.slo import parse_slo
from moe_engine.errors import ConfigError
from moe_engine.kv_connectors import connector_class
from moe_engine.planning.flags.image_flags import image_problems
from moe_engine.planning.flags.resolve_loading import EXTRA_CONFIG, loader_threads
from moe_engine.planning.flags.resolve_storage import storage_problems
from moe_engine.planning.flags.validate_server import installed, loadable, server_problems
from moe_engine.scheduler.kv_cache.eviction_policy import eviction_policy

# field -> least value
LEAST = {
    "context_length": 8,
    "max_running_requests": 1,
    "max_total_tokens": 1,
    "max_prefill_tokens": 1,
    "page_size": 1,
    "max_queued_requests": 1,
    "prefill_max_requests": 1,
    "prefill_decode_interval": 0,
    "prefill_decode_interval_min_bs": 0,
    "prefill_delayer_max_delay_passes": 1,
    "prefill_delayer_token_usage_low_watermark": 0,
    "prefill_delayer_queue_min_ratio": 0,
    "prefill_delayer_max_delay_ms": 0,
    "stream_interval": 1,
    "priority_scheduling_preemption_threshold": 0,
    "cpu_threads": 1,
    "weight_loader_prefetch_num_threads": 1,
    "log_requests_level": 0,
    "max_logprobs": -1,
    "decode_log_interval": 1,
    "port": 0,
    "tp_size": 1,
    "cuda_graph_max_bs_decode": 1,
    "torch_compile_max_bs": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "ep_size": 1,
    "base_gpu_id": 0,
    "gpu_id_step": 1,
    "dist_timeout": 1,
    "max_dispatch_tokens_per_rank": 1,
    "ep_num_redundant_experts": 0,
    "eplb_rebalance_num_iterations": 1,
    "eplb_rebalance_layers_per_chunk": 1,
    "random_seed": -(2**63),
    "hicache_size": 0,
    "cpu_offload_gb": 0,
    "session_hold": 0,
    "timeout_keep_alive": 1,
    "timeout_graceful_shutdown": 0,
}
MAX_RANKS = 4096
"""Upper bound of sizes: far above any cluster, and small enough to search for sizes that fit."""
MAX_INT = 2**63 - 1
MOST = {
    **dict.fromkeys(("tp_size", "dp_size", "attn_dp_size", "ep_size", "nnodes"), MAX_RANKS),
    "log_requests_level": 3,
    "weight_loader_prefetch_num_threads": 256,
    "port": 65535,
    "random_seed": 2**63 - 1,
    "speculative_eagle_topk": 64,
    "hicache_size": 1 << 20,
    "cpu_offload_gb": 1 << 20,
}


def check_ranges(args: EngineArgs) -> None:
    """Raises ConfigError for the first value out of range; a search over launches checks it before the first one."""
    for complaint in _ranges(args):
        raise ConfigError(complaint)


def check(args: EngineArgs) -> None:
    """Raises ConfigError for the first value out of range and the first pair of flags that contradict each other."""
    checks = (
        _ranges,
        _scheduling,
        _prefill_delays,
        _loading,
        _memory,
        _host_tier,
        _transfers,
        _kv_events,
        server_problems,
        _hidden_states,
        image_problems,
    )
    for complaint in chain.from_iterable(part(args) for part in checks):
        raise ConfigError(complaint)


def _ranges(args: EngineArgs) -> Iterator[str]:
    for name, value in args.flat().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isnan(value) or math.isinf(value):
            yield f"{option_of(name)} {value}: must be a finite number"
        if name in LEAST and value < LEAST[name]:
            yield f"{option_of(name)} {value}: must be at least {LEAST[name]}"
        if value > (most := MOST.get(name, MAX_INT)):
            yield f"{option_of(name)} {value}: must be at most {most}"
    fraction = args.memory.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        yield f"--mem-fraction-static {fraction:g}: must be a fraction of the memory, between 0 and 1 (0.85 is common)"
    if args.scheduling.schedule_conservativeness < 0:
        yield f"--schedule-conservativeness {args.scheduling.schedule_conservativeness:g}: must not be negative"
    for name in ("request_waiting_timeout", "request_running_timeout"):
        limit = getattr(args.scheduling, name)
        if limit is not None and limit <= 0:
            yield f"{option_of(name)} {limit:g}: must be more than 0 seconds; leave it out for no limit"
    if args.server.watchdog_timeout <= 0:
        yield f"--watchdog-timeout {args.server.watchdog_timeout:g}: must be more than 0 seconds"
    chunk = args.memory.chunked_prefill_size
    if chunk is not None and chunk != -1 and chunk < 1:
        yield f"--chunked-prefill-size {chunk}: must be at least 1, or -1 for no chunking"


def _loading(args: EngineArgs) -> Iterator[str]:
    model = args.model
    threads = model.weight_loader_prefetch_num_threads
    if threads != 4 and not model.weight_loader_prefetch_checkpoints:
        yield (
            f"--weight-loader-prefetch-num-threads {threads}: only with --weight-loader-prefetch-checkpoints; add "
            "that, or drop this"
        )
    asked = loader_threads(model)
    if asked is not None and model.weight_loader_prefetch_checkpoints and asked != threads:
        yield (
            f"{EXTRA_CONFIG} asks for {asked} threads that read the files, and --weight-loader-prefetch-checkpoints "
            f"for {threads}; drop one of them"
        )
    for name in ("weight_loader_prefetch_checkpoints", "weight_loader_drop_cache_after_load"):
        if getattr(model, name) and model.load_format == "dummy":
            yield f"{option_of(name)} with --load-format dummy: no files are loaded; drop one of them"


def _scheduling(args: EngineArgs) -> Iterator[str]:
    scheduling, memory = args.scheduling, args.memory
    policy = scheduling.schedule_policy
    if policy in CACHE_AWARE_POLICIES and scheduling.disable_radix_cache:
        yield (
            f"--schedule-policy {policy} orders by cached prefixes, and --disable-radix-cache caches none; "
            "drop one of them"
        )
    eviction_policy(scheduling.radix_eviction_policy, scheduling.radix_eviction_policy_config)
    if scheduling.radix_eviction_policy != "lru" and scheduling.disable_radix_cache:
        yield "--radix-eviction-policy orders the radix cache, --disable-radix-cache has none; drop one of them"
    if args.parallel.load_balance_method == "cache_aware" and scheduling.disable_radix_cache:
        yield "--load-balance-method cache_aware follows cached prefixes, --disable-radix-cache caches none; drop one"
    if scheduling.enable_priority_scheduling and policy not in ("fcfs", "lof", "priority"):
        yield f"--enable-priority-scheduling works with --schedule-policy fcfs, lof or priority, not with {policy}"
    if scheduling.schedule_low_priority_values_first and not scheduling.uses_priority:
        yield "--schedule-low-priority-values-first needs --enable-priority-scheduling"
    parse_slo(scheduling.slo)
    if scheduling.slo is not None and not scheduling.autopilot:
        yield "--slo is the target of --autopilot while serving; give both or none of them"
    if scheduling.enable_mixed_chunk and memory.chunked_prefill_size == -1:
        yield "--enable-mixed-chunk mixes decodes into chunks, and --chunked-prefill-size -1 disables them; drop one"


def _prefill_delays(args: EngineArgs) -> Iterator[str]:
    scheduling = args.scheduling
    share = scheduling.prefill_delayer_token_usage_low_watermark
    if share is not None and share > 1:
        yield f"--prefill-delayer-token-usage-low-watermark {share:g}: must be a share of the KV pool, from 0 to 1"
    if scheduling.enable_prefill_delayer and args.disaggregation.disaggregation_mode == "decode":
        yield (
            "--enable-prefill-delayer: belongs to the prefill server; on a decode server it would delay the last token "
            "of prompts whose KV has arrived; drop it"
        )


def _host_tier(args: EngineArgs) -> Iterator[str]:
    memory = args.memory
    yield from storage_problems(args)
    if not memory.enable_hierarchical_cache:
        return
    if args.scheduling.disable_radix_cache:
        yield "--enable-hierarchical-cache keeps cached prefixes, --disable-radix-cache caches none; drop one of them"
    if not memory.hicache_size and memory.hicache_ratio is not None and memory.hicache_ratio <= 0:
        yield f"--hicache-ratio {memory.hicache_ratio:g}: must be positive"
    if not 0 < memory.hicache_host_memory_fraction <= 1:
        yield f"--hicache-host-memory-fraction {memory.hicache_host_memory_fraction:g}: must be above 0, and at most 1"
    connector_class(memory.kv_connector)


def _transfers(args: EngineArgs) -> Iterator[str]:
    mode = args.disaggregation.disaggregation_mode
    if mode == OFF:
        return
    if args.scheduling.disable_radix_cache:
        yield f"--disaggregation-mode {mode} moves cached prefixes, --disable-radix-cache caches none; drop one of them"
    if args.memory.kv_connector != "host":
        yield f"--disaggregation-mode {mode} is a KV connector of its own; drop --kv-connector"
    backend = args.disaggregation.disaggregation_transfer_backend
    if backend in REFUSED_TRANSPORTS:
        yield f"--disaggregation-transfer-backend {backend}: not supported; use tcp, shm, nixl or mooncake"
    module, extra = TRANSPORT_LIBRARIES.get(backend, ("moe_engine", ""))
    if not installed(module):
        yield (
            f"--disaggregation-transfer-backend {backend}: {module} is not installed; pip install -e '.[{extra}]', or "
            "use tcp"
        )
    elif module == "mooncake" and not loadable("libibverbs.so.1"):  # its import fails, behind the load of the weights
        yield (
            f"--disaggregation-transfer-backend {backend}: mooncake needs the system's libibverbs, which is absent "
            "(Debian, Ubuntu: apt-get install libibverbs1); install it, or use tcp"
        )
    if (devices := args.disaggregation.disaggregation_ib_device or "").endswith((".json", "}")):
        yield f"--disaggregation-ib-device {devices}: devices by GPU are not supported; give names, as mlx5_0,mlx5_1"
    if not 0 < args.disaggregation.disaggregation_bootstrap_port < 1 << 16:
        yield f"--disaggregation-bootstrap-port {args.disaggregation.disaggregation_bootstrap_port}: 1 to 65535"


def _kv_events(args: EngineArgs) -> Iterator[str]:
    if parse_kv_events(args.logging.kv_events_config) is None:
        return
    if args.scheduling.disable_radix_cache:
        yield "--kv-events-config publishes cached prefixes, --disable-radix-cache caches none; drop one of them"
    if args.parallel.dp_size > 1 and not args.parallel.enable_dp_attention:
        yield "--kv-events-config with replicas (--dp-size): their ports are the same; start one server per replica"


def attention_groups(args: EngineArgs) -> int:
    """Attention groups that the flags request; each has its own KV pool."""
    flags = args.parallel
    return max(1, flags.dp_size if flags.enable_dp_attention else flags.attn_dp_size)


def _memory(args: EngineArgs) -> Iterator[str]:
    memory = args.memory
    if not 0 < memory.swa_full_tokens_ratio <= 1:
        yield f"--swa-full-tokens-ratio {memory.swa_full_tokens_ratio:g}: must be above 0 and at most 1"
    page = memory.page_size or 1
    chunk = memory.chunked_prefill_size
    if chunk is not None and chunk != -1:
        if chunk < page:
            yield f"--chunked-prefill-size {chunk} is smaller than --page-size {page}: no chunk could fill a page"
        if chunk % page:
            below, above = chunk - chunk % page, chunk - chunk % page + page
            yield f"--chunked-prefill-size {chunk} is not a multiple of --page-size {page}; use {below} or {above}"
    for option, tokens in (
        ("--max-total-tokens", memory.max_total_tokens),
        ("--max-prefill-tokens", memory.max_prefill_tokens),
    ):
        if tokens is not None and tokens < page:
            yield f"{option} {tokens} is smaller than --page-size {page}"
    if memory.max_total_tokens == 1:
        yield "--max-total-tokens 1: a request needs 2 (one prompt token, one output token); use at least 2"
    running, total, groups = memory.max_running_requests, memory.max_total_tokens, attention_groups(args)
    if running is not None and total is not None and running // groups * page > total:
        yield (
            f"--max-running-requests {running} with --max-total-tokens {total}: each request holds at least a page "
            f"of {page}, so at most {total // page * groups} can run"
        )


def _hidden_states(args: EngineArgs) -> Iterator[str]:
    if not args.server.enable_return_hidden_states:
        return
    algorithm, parallel = args.speculative.speculative_algorithm, args.parallel
    for given, reason in (
        (f"--speculative-algorithm {algorithm}" if algorithm else "", "states of drafts would have to be removed"),
        ("--enable-two-batch-overlap" if parallel.enable_two_batch_overlap else "", "steps are cut in two"),
    ):
        if given:
            yield f"--enable-return-hidden-states: not available yet with {given} ({reason}); leave one out"
