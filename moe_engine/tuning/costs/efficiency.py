"""The share of the hardware that an engine reaches, and its own times: fitted by `benchmarks.planner_fit`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path

from moe_engine.errors import ConfigError
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.model_facts import ModelFacts

FOLDER = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Efficiency:
    """Constants of one engine.

    Attributes:
        hbm, experts_hbm, attention_hbm: share of peak bandwidth of projections, routed experts and KV.
        flops, attention_flops: share of the peak rate of large products and of attention.
        kernel_us: time of one kernel besides its bytes and operations: launch, gap, shortest time. prefill_kernel_us:
        additional time in a step with prompts, which runs without a graph. step_us, row_us: host time of a step for
        which the device waits, and of one request in it.
        message: factor on the latency of collectives. link: share of a link's bandwidth.
        token_ns: time of one prompt token in one layer besides products, per 1,000 channels: norms, routing,
        permutation.
        prompt_weight: seconds that a decode loses for a second of other requests' prompts.
        queue: share of other requests' prompts for which a new prompt waits in a closed loop; None: as in this engine's
        scheduler.
        prompts_first: whether all waiting prompts are computed before any request decodes, so that requests of equal
        lengths stay in step.
        request_ms: time of a request outside steps.
        memory: share of a GPU's memory for weights and KV.
        kv: dtype of the KV cache unless the launch gives another.
        deviations: factor on the time of a step by `deviation_keys`, if measured.
        prompt_deviations: the same for the time to the first token.
    """

    engine: str
    hbm: float = 0.75
    experts_hbm: float = 0.7
    attention_hbm: float = 0.6
    flops: float = 0.55
    attention_flops: float = 0.45
    kernel_us: float = 2.5
    prefill_kernel_us: float = 3.5
    step_us: float = 500.0
    row_us: float = 5.0
    message: float = 1.0
    link: float = 0.6
    token_ns: float = 3.0
    prompt_weight: float = 1.0
    queue: float | None = None
    prompts_first: bool = False
    request_ms: float = 10.0
    memory: float = 0.88
    kv: str = "bf16"
    deviations: Mapping[str, float] = field(default_factory=dict)
    prompt_deviations: Mapping[str, float] = field(default_factory=dict)

    def deviation(self, keys: tuple[str, ...], prompt: bool = False) -> float:
        """The product of the factors that are known."""
        table, found = self.prompt_deviations if prompt else self.deviations, 1.0
        for key in keys:
            found *= table.get(key, 1.0)
        return found


def deviation_keys(model: ModelFacts, precision: Precision, gpu: str, form: Form) -> tuple[str, ...]:
    """Keys of the properties that two measured points may share, coarse to fine: model and dtype, GPU, form."""
    coarse = f"{model.key} {precision.experts}"
    return coarse, f"{coarse} {gpu}", f"{coarse} {gpu} {form.ranks}/dp{form.attn_dp}/ep{form.ep}"


def engines() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@lru_cache
def load_efficiency(engine: str) -> Efficiency:
    """The constants of an engine.

    Raises:
        ConfigError: there are none for this name.
    """
    if engine not in engines():
        raise ConfigError(f"--like {engine}: must be one of {', '.join(engines())}")
    raw = tomllib.loads((FOLDER / f"{engine}.toml").read_text())
    names = {item.name for item in fields(Efficiency)}
    values = raw["constants"] | {name: raw.get(name, {}) for name in ("deviations", "prompt_deviations")}
    return Efficiency(engine=engine, **{name: value for name, value in values.items() if name in names})
