"""The scheduler: requests, KV slots, and the plan of each step. Imports no torch and no numpy."""

from moe_engine.scheduler.config import POLICIES, SchedulerConfig
from moe_engine.scheduler.events import PlanFacts, RequestEvent, RequestTiming, SchedulerStats
from moe_engine.scheduler.scheduler import NEEDS_RESULT, NeedsResult, Scheduler

__all__ = [
    "NEEDS_RESULT",
    "POLICIES",
    "NeedsResult",
    "PlanFacts",
    "RequestEvent",
    "RequestTiming",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
]
