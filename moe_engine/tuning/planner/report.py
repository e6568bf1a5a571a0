"""Plans as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moe_engine.tuning.hardware.table import Cluster
from moe_engine.tuning.planner.candidate import Candidate, launches, sbatch_command, serve_command
from moe_engine.tuning.planner.memory import Room
from moe_engine.tuning.planner.predict import NAMES, Prediction
from moe_engine.tuning.planner.search import Found, Plan

SHOWN_REFUSALS = 6
ROUTER = (
    "python -m sglang_router.launch_router --pd-disaggregation --prefill http://PREFILL:30000 8998 "
    "--decode http://DECODE:30000"
)
"""The router for prefill and decode engines."""


def text_of(found: Found, cluster: Cluster | None) -> str:
    """The best plans, then the forms that do not fit. `cluster` None: the plans are launches of this machine."""
    lines: list[str] = []
    for place, plan in enumerate(found.plans, 1):
        name = plan.setup.text if cluster else "this machine"
        lines += [f"{place}. {name}", *(f"   {line}" for line in _plan_lines(plan, cluster)), ""]
    if found.refused:
        lines.append(f"do not fit ({len(found.refused)} forms):")
        for name, why in list(found.refused.items())[:SHOWN_REFUSALS]:
            lines.append(f"   {name}: {why}")
        if (more := len(found.refused) - SHOWN_REFUSALS) > 0:
            lines.append(f"   and {more} more, which --json lists")
    lines.append(f"configurations compared: {found.tried}")
    return "\n".join(lines)


def _plan_lines(plan: Plan, cluster: Cluster | None) -> Iterator[str]:
    setup, prediction = plan.setup, plan.prediction
    unit = "GPU" if cluster else "rank"
    yield (
        f"{prediction.output_per_gpu:,.0f} output tok/s a {unit}, {prediction.output_per_s:,.0f} in all "
        f"(and {prediction.input_per_s:,.0f} prompt tok/s), {setup.concurrency} concurrent requests"
    )
    ttft, itl = f"{_ms(prediction.ttft_s)} median, {_ms(prediction.ttft_p99_s)} p99", _ms(prediction.itl_s)
    yield f"TTFT {ttft}; bound by {binds(prediction.prompt_binds)}"
    yield f"ITL {itl} median, {_ms(prediction.itl_p99_s)} p99; bound by {binds(prediction.decode_binds)}"
    for engine, room in zip(setup.sides, plan.rooms):
        if room.ledger is None:  # not served by this engine
            continue
        yield f"memory of the fullest rank{f' of a {engine.mode} engine' if engine.mode else ''}:"
        yield from (f"  {line}" for line in room.ledger.lines())
        count = launches(engine.replicas, room.flags)
        yield (f"{count} x: " if count > 1 else "") + serve_command(room.flags)
        if cluster is not None:
            yield sbatch_command(room.flags, cluster)
    if len(setup.sides) > 1:
        yield f"{ROUTER}  (a --prefill and a --decode for each engine)"


def binds(shares: Mapping[str, float]) -> str:
    """The largest shares: ``HBM bytes 61 %, all-to-all 20 %``."""
    return ", ".join(f"{NAMES[name]} {share:.0%}" for name, share in shares.items() if share >= 0.05)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def json_of(found: Found, cluster: Cluster | None) -> dict[str, Any]:
    """Times are milliseconds, sizes bytes."""
    return {
        "plans": [plan_json(plan, cluster) for plan in found.plans],
        "pareto": [
            {"form": setup.text, "concurrency": setup.concurrency, "predicted": predicted_json(prediction)}
            for setup, prediction in found.front
        ],
        "refused": found.refused,
        "configurations": found.tried,
    }


def plan_json(plan: Plan, cluster: Cluster | None) -> dict[str, Any]:
    """One plan; with its commands and memory if this engine serves the model. Separate engines are under ``prefill``
    and ``decode``."""
    engines = [_engine_json(engine, room, cluster) for engine, room in zip(plan.setup.sides, plan.rooms)]
    values = {"concurrency": plan.setup.concurrency, "predicted": predicted_json(plan.prediction)}
    if len(engines) == 1:
        return engines[0] | values
    return {side.mode: engine for side, engine in zip(plan.setup.sides, engines)} | values | {"router": ROUTER}


def _engine_json(engine: Candidate, room: Room, cluster: Cluster | None) -> dict[str, Any]:
    values: dict[str, Any] = {"form": dataclasses.asdict(engine.form) | {"replicas": engine.replicas}}
    if room.ledger is not None:
        flags, ledger = room.flags, room.ledger
        values["flags"] = dict(flags)
        values["command"] = serve_command(flags)
        if cluster is not None:
            values["sbatch"] = sbatch_command(flags, cluster)
        values["launches"] = launches(engine.replicas, flags)
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
