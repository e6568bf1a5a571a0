"""Plans as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.candidate import launches, sbatch_command, serve_command
from moe_engine.tuning.planner.predict import NAMES, Prediction
from moe_engine.tuning.planner.search import Found, Plan

SHOWN_REFUSALS = 6


def text_of(found: Found, cluster: Cluster) -> str:
    """The best plans, then the forms that do not fit."""
    lines: list[str] = []
    for place, plan in enumerate(found.plans, 1):
        lines += [f"{place}. {plan.candidate.text}", *(f"   {line}" for line in _plan_lines(plan, cluster)), ""]
    if found.refused:
        lines.append(f"do not fit ({len(found.refused)} forms):")
        for name, why in list(found.refused.items())[:SHOWN_REFUSALS]:
            lines.append(f"   {name}: {why}")
    lines.append(f"{found.tried} configurations were compared.")
    return "\n".join(lines)


def _plan_lines(plan: Plan, cluster: Cluster) -> Iterator[str]:
    candidate, prediction = plan.candidate, plan.prediction
    yield (
        f"{prediction.output_per_gpu:,.0f} output tok/s a GPU, {prediction.output_per_s:,.0f} in all "
        f"(and {prediction.input_per_s:,.0f} prompt tok/s), {candidate.concurrency} requests at once"
    )
    ttft, itl = f"{_ms(prediction.ttft_s)} median, {_ms(prediction.ttft_p99_s)} p99", _ms(prediction.itl_s)
    yield f"TTFT {ttft}; bound by {binds(prediction.prompt_binds)}"
    yield f"ITL {itl} median, {_ms(prediction.itl_p99_s)} p99; bound by {binds(prediction.decode_binds)}"
    if plan.room.ledger is None:  # this engine does not start it
        return
    yield "memory of the fullest rank:"
    yield from (f"  {line}" for line in plan.room.ledger.lines())
    flags = plan.room.flags
    count = launches(candidate.replicas, flags)
    yield (f"{count} x: " if count > 1 else "") + serve_command(flags)
    yield sbatch_command(flags, cluster)


def binds(shares: Mapping[str, float]) -> str:
    """The largest shares: ``HBM bytes 61 %, all-to-all 20 %``."""
    return ", ".join(f"{NAMES[name]} {share:.0%}" for name, share in shares.items() if share >= 0.05)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def json_of(found: Found, cluster: Cluster) -> dict[str, Any]:
    """Times are milliseconds, sizes bytes."""
    return {
        "plans": [plan_json(plan, cluster) for plan in found.plans],
        "pareto": [
            {"form": candidate.text, "concurrency": candidate.concurrency, "predicted": predicted_json(prediction)}
            for candidate, prediction in found.front
        ],
        "refused": found.refused,
        "configurations": found.tried,
    }


def plan_json(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """One plan; with its command and memory if this engine serves the model."""
    candidate, prediction, ledger = plan.candidate, plan.prediction, plan.room.ledger
    values: dict[str, Any] = {
        "form": dataclasses.asdict(candidate.form) | {"replicas": candidate.replicas},
        "concurrency": candidate.concurrency,
        "predicted": predicted_json(prediction),
    }
    if ledger is not None:
        flags = plan.room.flags
        values["flags"] = dict(flags)
        values["command"], values["sbatch"] = serve_command(flags), sbatch_command(flags, cluster)
        values["launches"] = launches(candidate.replicas, flags)
        values["memory"] = {
            "rows": [dataclasses.asdict(row) for row in ledger.all_rows()],
            "total_bytes": ledger.total_bytes,
            "limit_bytes": ledger.limit_bytes,
        }
    return values


def predicted_json(prediction: Prediction) -> dict[str, Any]:
    return {
        "ttft_ms": prediction.ttft_s * 1e3,
        "ttft_p99_ms": prediction.ttft_p99_s * 1e3,
        "tpot_ms": prediction.tpot_s * 1e3,
        "itl_ms": prediction.itl_s * 1e3,
        "itl_p99_ms": prediction.itl_p99_s * 1e3,
        "output_tokens_per_second": prediction.output_per_s,
        "output_tokens_per_second_per_gpu": prediction.output_per_gpu,
        "input_tokens_per_second": prediction.input_per_s,
        "binds": {"decode": dict(prediction.decode_binds), "prefill": dict(prediction.prompt_binds)},
    }
