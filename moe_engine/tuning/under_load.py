"""The cost file of a server: measured points, corrected by what steps and requests cost each other under load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moe_engine.tuning import mixed_probe, work_beside_steps
from moe_engine.tuning.costs.measured import CostFile, MeasuredCosts
from moe_engine.tuning.measured_points import MeasuredPoints


def cost_file(points: MeasuredPoints, measured: Sequence[mixed_probe.Part]) -> CostFile:
    """The cost file without launch, machine and ledger.

    Args:
        measured: with the round of each part.
    """
    file, limits = points.file(), points.limits
    slowness = points.rounds.slowness()
    kept = points.rounds.kept((part.round, part) for part in measured)
    parts = [replace(part, machine=slowness[part.round]) for part in kept]
    file = file.beside_steps(work_beside_steps.factor(parts, file, limits.num_groups))
    found = mixed_probe.effects(parts, MeasuredCosts(file), limits.drafts, limits.num_groups, file.sent_seconds)
    # frontend and client compute `request_seconds` for a request; planning by the engine takes no longer
    most = 2 * file.request_seconds or math.inf
    if found is None:
        return replace(file, arrival_seconds=min(file.arrival_seconds, most))
    arrival = min(found.arrival, most)
    if limits.num_groups > 1:  # schedulers that step together wait for each other
        prefill = found.slowness([part.machine for part in parts])[1]
        file = file.slower(mixed_probe.slowness_by_rows(parts, found), prefill)
    # prompts of a single scheduler were measured while others decode, with the work for their arrival, as under load
    return replace(file, arrival_seconds=arrival, end_seconds=min(found.end, most - arrival), step_spread=found.spread)
