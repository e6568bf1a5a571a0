"""The scheduler's part of a resolved configuration."""

from __future__ import annotations

from moe_engine.config.slo import parse_slo
from moe_engine.planning.resolve import ResolvedConfig
from moe_engine.scheduler.config import SchedulerConfig


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
        priority_preemption_threshold=flags.priority_scheduling_preemption_threshold,
        vocab_size=config.model.vocab_size,
        ttft_slo=slo.ttft_s,
        itl_slo=slo.itl_s,
    )
