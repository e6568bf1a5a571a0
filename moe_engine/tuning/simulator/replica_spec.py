"""What a simulated engine is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.costs.step_cost import StepCostModel
from moe_engine.tuning.simulator.expert_load import ExpertLoad
from moe_engine.types.step_settings import GraphSettings


@dataclass(frozen=True)
class ReplicaSpec:
    """A replica: the limits of its schedulers, the number of attention groups, the cost of its steps.

    `acceptance`: chance that a draft at each position is accepted if those before it were. `exact`: the scheduler plans
    every step, even if nothing can change. `arrival_seconds`, `end_seconds`: delays of the running step by a request
    that arrives or has ended, if the frontend shares the step's cores. `sent_seconds`: delay of a step by each request
    with tokens from the step before, which are sent meanwhile. `step_spread`: standard deviation of the seconds of
    equal steps over their mean. `idle_seconds`: additional time of the first step after an idle time. `load_seconds`:
    of a token from the host-RAM tier, copied while its step runs.
    """

    scheduler: SchedulerConfig
    costs: StepCostModel
    num_groups: int = 1
    overlap: bool = True
    acceptance: tuple[float, ...] = ()
    expert_skew: float = 0.0
    """Load of the busiest rank's experts over the mean; 0: the cost model's expectation. `experts` has precedence."""
    experts: ExpertLoad | None = None
    exact: bool = False
    graphs: GraphSettings = field(default_factory=GraphSettings)
    """Sizes of decode steps that are recorded; they show in the log alone, the costs contain their effect."""
    arrival_seconds: float = 0.0
    end_seconds: float = 0.0
    sent_seconds: float = 0.0
    step_spread: float = 0.0
    idle_seconds: float = 0.0
    load_seconds: float = 0.0
