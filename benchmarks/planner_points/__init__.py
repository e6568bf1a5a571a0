"""Measured end-to-end points of MoE models, for `benchmarks.planner_fit`; see NOTICE."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.planner_points.launches import UNKNOWN, Launch, launch_of, of_inferencex
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import ModelFacts, model_facts

FOLDER = Path(__file__).parent
GPUS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300"}
ALIASES = {
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}
UNIFORM = 0.9
"""Mean of random lengths between 0.8 and 1.0 of the nominal length, as in InferenceX."""

DOUBLED = "2026-04"
"""Date of the first InferenceX rows whose forms are products; their run configurations have the sizes."""


@dataclass(frozen=True)
class Point:
    """A measured point of one pool. Lengths are means in tokens. `drafts`: tokens that MTP drafts in a step.
    `launch`: flags that change the times. `equal`: all requests have these lengths."""

    engine: str
    model: str
    gpu: str
    dtype: str
    form: Form
    prompt: float
    output: float
    concurrency: float
    ttft_ms: float
    tpot_ms: float
    setting: tuple[str, ...]
    drafts: int = 0
    launch: Launch = UNKNOWN
    equal: bool = False

    @property
    def facts(self) -> ModelFacts:
        return facts_of(self.model)


@lru_cache
def facts_of(model: str) -> ModelFacts:
    configs = json.loads((FOLDER / "models.json").read_text())
    return model_facts(configs[ALIASES.get(model, model)], model)


def read_points(path: Path = FOLDER / "one_pool.csv") -> list[Point]:
    """The points of a file with the columns of aiconfigurator's table."""
    with path.open() as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: Mapping[str, Any]) -> Point:
    sizes = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, moe_tp, ep = (int(float(row[name] or 1)) for name in sizes)
    form = form_of(tp, dp, moe_tp, ep, doubled=row["silicon_data_source"] >= DOUBLED)
    drafts = row.get("drafts") or ""
    mean = UNIFORM if of_inferencex(row) else 1.0
    names = ("model_path", "system", "backend", "precision", "isl", "osl", "concurrency")
    return Point(
        engine=row["backend"],
        model=row["model_path"],
        gpu=GPUS.get(row["system"], row["system"]),
        dtype=row["precision"],
        form=form,
        prompt=float(row["isl"]) * mean,
        output=float(row["osl"]) * mean,
        concurrency=float(row["concurrency"]),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
        setting=(*(row[name] for name in names), str(form), drafts),
        drafts=int(drafts or 0),
        equal=not of_inferencex(row),
        launch=launch_of(row, GPUS.get(row["system"], row["system"])),
    )


def form_of(tp: int, dp: int, moe_tp: int, ep: int, doubled: bool) -> Form:
    """The ranks of a row.

    Args:
        doubled: with expert parallelism the row has the product of the tensor-parallel and the expert-parallel size,
            which are equal and mean the same ranks (`DOUBLED`).
    """
    if doubled and moe_tp == 1 < tp == dp and ep == tp * dp:  # vLLM: the attention is tensor parallel
        return Form(tp, 1, tp)
    if doubled and moe_tp == ep > 1:
        tp, dp, moe_tp = (1, ep, 1) if dp > 1 else (ep, 1, 1)
    ranks = max(tp * dp, moe_tp * ep)
    return Form(ranks, dp, ep if ranks % ep == 0 else 1, travels=dp > 1 and ep > 1)
