"""The performance of a candidate under a workload: rates, latencies, and the resources that bind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from moe_engine.tuning.costs.efficiency import Efficiency, deviation_keys
from moe_engine.tuning.costs.form import Form, Held, precision_of
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.costs.step_cost import StepCost, StepCostModel, StepShape
from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.steady import STEPS_ALONE, Load, MeasuredTimes, Steady, queued, steady_state

TAIL = 4.6
"""The 99th percentile of an exponential waiting time over its mean."""

RARE = 0.01
ACCEPTANCE = 0.8
"""Chance that an MTP draft is accepted if those before it were."""

KNOWN_STEPS = 1024
FIELDS = attrgetter(*(field.name for field in dataclasses.fields(StepShape)))

NAMES = {
    "hbm": "HBM bytes", "flops": "FLOPs", "all_to_all": "all-to-all", "all_reduce": "all-reduce",
    "launches": "launches", "host": "host", "bus": "copies of weights",
    "decode": "decodes", "prefill": "prompts",
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Seconds and tokens a second of all replicas. `binds`: share of a decode step and of a prompt by resource."""

    ttft_s: float
    ttft_p99_s: float
    tpot_s: float
    itl_s: float
    itl_p99_s: float
    output_per_s: float
    input_per_s: float
    gpus: int
    decode_binds: Mapping[str, float]
    prompt_binds: Mapping[str, float]

    @property
    def output_per_gpu(self) -> float:
        return self.output_per_s / self.gpus


class RememberedCosts:
    """A `StepCostModel` that computes equal steps of `costs` once: sizes of one form have many in common."""

    def __init__(self, costs: StepCostModel) -> None:
        self.costs = costs
        self._step = lru_cache(KNOWN_STEPS)(lambda *fields: costs.step(StepShape(*fields)))

    def step(self, shape: StepShape) -> StepCost:
        return self._step(*FIELDS(shape))


class Predictor:
    """Predictions for one model on one cluster, with the constants of one engine.

    Args:
        acceptance: chance that a draft token is accepted if those before it were.
        dtype: of the experts' weights.
        host_bytes: `Form.host_bytes` of every form.
        held: the kernels of a form, if they are known.
        mixed: of `steady_state`.
    """

    def __init__(
        self, facts: ModelFacts, cluster: Cluster, share: Efficiency, dtype: str, acceptance: float = ACCEPTANCE,
        host_bytes: int = 0, held: Callable[[Form], Held | None] | None = None, mixed: bool = False,
    ) -> None:  # fmt: skip
        self.host_bytes, self.held, self._mixed = host_bytes, held, mixed
        self.facts, self.cluster, self.share, self.dtype, self.acceptance = facts, cluster, share, dtype, acceptance
        self._costs: dict[tuple[Form, str], tuple[RememberedCosts, float]] = {}

    def cost(self, form: Form, kv: str) -> tuple[RememberedCosts, float]:
        """The cost model of a form, and the measured factor on times to the first token."""
        key = (form, kv)
        if key not in self._costs:
            held = None if self.held is None else self.held(form)
            precision = dataclasses.replace(precision_of(self.dtype, kv, not self.facts.num_experts), held=held)
            plain = dataclasses.replace(form, redundant=0, overlap=False, host_bytes=0)
            form = dataclasses.replace(form, host_bytes=self.host_bytes)
            keys = deviation_keys(self.facts, precision, self.cluster.gpu_key, plain)
            model = RooflineCost(self.facts, form, precision, self.cluster, self.share, self.share.deviation(keys))
            self._costs[key] = RememberedCosts(model), self.share.deviation(keys, prompt=True)
        return self._costs[key]

    def accepted(self, drafts: int) -> float:
        """Mean accepted draft tokens of a step."""
        return accepted_drafts(drafts, self.acceptance)

    def predict(self, candidate: Candidate, load: Load, clients: float = 1.0) -> Prediction:
        """clients: requests for each one that runs, as in `queued`."""
        cost, late = self.cost(candidate.form, candidate.kv)
        accepted, times = self.accepted(candidate.drafts), MeasuredTimes(prompt_deviation=late)
        return predicted(cost, candidate, load, self.share, accepted, self._mixed, clients, times)


def predicted(
    cost: StepCostModel, candidate: Candidate, load: Load, share: Efficiency, accepted: float, mixed: bool,
    clients: float = 1.0, times: MeasuredTimes = STEPS_ALONE,
) -> Prediction:  # fmt: skip
    """The prediction by a model of step costs. `accepted`, `mixed`, `times`: of `steady_state`."""
    state = steady_state(
        cost, candidate.form, load, candidate.concurrency / candidate.replicas, share, candidate.chunk,
        candidate.drafts, accepted, mixed=mixed, times=times,
    )  # fmt: skip
    found = _prediction(state, candidate, load, accepted, share)
    late = queued(state, load, clients).ttft_s - state.ttft_s
    return dataclasses.replace(found, ttft_s=found.ttft_s + late, ttft_p99_s=found.ttft_p99_s + late)


def _prediction(state: Steady, candidate: Candidate, load: Load, accepted: float, share: Efficiency) -> Prediction:
    itl = state.step_s / (1 + accepted)
    chunks = max(1.0, load.computed / candidate.chunk)
    step_with_prompt = state.step_s + state.prompt_s / chunks
    mixed = state.busy * state.tpot_s * load.output / max(1e-9, step_with_prompt) / max(1.0, load.output)
    waiting = max(0.0, state.ttft_s - share.request_ms * 1e-3 - state.prompt_s)
    # of requests in step, the last prompt is computed when the first ones have waited for it
    late = state.busy * state.tpot_s * load.output if load.equal else (TAIL - 1) * waiting
    output = state.output_per_s * candidate.replicas
    return Prediction(
        ttft_s=state.ttft_s,
        ttft_p99_s=state.ttft_s + late,
        tpot_s=state.tpot_s,
        itl_s=itl if mixed < 0.5 else step_with_prompt,
        itl_p99_s=step_with_prompt if mixed > RARE else state.step_s,
        output_per_s=output,
        input_per_s=output * load.computed / load.output,
        gpus=candidate.gpus,
        decode_binds=shares(state.decode_parts),
        prompt_binds=shares(state.prompt_parts),
    )


def accepted_drafts(drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """Mean accepted draft tokens of a step."""
    return sum(acceptance**place for place in range(1, drafts + 1))


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Largest first."""
    total = sum(parts.values()) or 1.0
    return dict(sorted(((name, value / total) for name, value in parts.items()), key=lambda pair: -pair[1]))
