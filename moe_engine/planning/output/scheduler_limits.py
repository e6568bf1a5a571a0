"""The scheduler's part of a resolved configuration."""

from __future__ import annotations

from moe_engine.config.kv_events import parse_kv_events
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.slo import parse_slo
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.types.prefill_delay import DEFAULT_DELAY_MS, PASSES_BUCKETS, SECONDS_BUCKETS, DelayerSettings

CPU_DELAYED_TOKENS = 48 * 2048
"""`max_delayed_tokens` on a CPU: whole chunks for up to 48 waiting requests, 384 tokens for 256 of them."""


def scheduler_config(config: ResolvedConfig) -> SchedulerConfig:
    """The scheduler's part of the configuration."""
    flags = config.scheduling
    slo = parse_slo(flags.slo)
    return config.select(
        SchedulerConfig,
        num_slots=config.max_total_num_tokens,
        max_rows=config.max_running_requests,
        max_step_tokens=config.limits.num_tokens,
        policy=flags.schedule_policy,
        uses_priority=flags.uses_priority,
        priority_preemption_threshold=flags.priority_scheduling_preemption_threshold,
        vocab_size=config.model.vocab_size,
        jump_forward=_jumps(config),
        delayer=_delayer(flags),
        kv_events=parse_kv_events(config.logging.kv_events_config) is not None,
        **_cadence(config),
        ttft_slo=slo.ttft_s,
        itl_slo=slo.itl_s,
        whole_images=config.model.vision is not None and config.model.vision.sees_whole,
    )


def _cadence(config: ResolvedConfig) -> dict[str, int]:
    """How prompts alternate with decodes, where it is not the scheduler's default.

    On a CPU a prompt token costs about as much as a decode. A chunk of the default size would delay hundreds of running
    requests by several decode steps, and prompts that arrive faster than they are computed by several chunks. On a GPU
    a decode step costs little compared with a chunk and little more for more requests, so prompts come first, as in
    SGLang. The autopilot, and a chunk size that was given, decide by themselves.
    """
    if config.device != "cpu" or config.scheduling.autopilot or config.args.memory.chunked_prefill_size is not None:
        return {}
    return {"max_consecutive_prefills": 1, "max_delayed_tokens": CPU_DELAYED_TOKENS}


def _delayer(flags: SchedulingArgs) -> DelayerSettings | None:
    if not flags.enable_prefill_delayer:
        return None
    delay_ms, passes, seconds = (
        flags.prefill_delayer_max_delay_ms,
        flags.prefill_delayer_forward_passes_buckets,
        flags.prefill_delayer_wait_seconds_buckets,
    )
    return DelayerSettings(
        flags.prefill_delayer_max_delay_passes,
        flags.prefill_delayer_token_usage_low_watermark,
        flags.prefill_delayer_queue_min_ratio,
        DEFAULT_DELAY_MS if delay_ms is None else delay_ms,
        flags.prefill_max_requests,
        PASSES_BUCKETS if passes is None else tuple(map(float, passes.split())),
        SECONDS_BUCKETS if seconds is None else tuple(map(float, seconds.split())),
    )


def _jumps(config: ResolvedConfig) -> bool:
    """Whether forced tokens of a grammar share a step (`scheduler.jump_forward`). Not where decodes are replays of a
    graph or compiled, which are faster than steps of other shapes; drafts propose forced tokens themselves."""
    fixed = bool(config.graphs.sizes) or config.compiled.max_tokens > 0
    several = config.parallel.topology.attn_dp_size > 1
    return not (fixed or several or config.speculation is not None or config.window)
