"""``moe-engine plan --cost-file``: predicts a launch on this machine from its measured step costs."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from moe_engine.config.args import EngineArgs
from moe_engine.config.slo import Slo
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.measured import CostFile, MeasuredCosts, other_launch
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.given_form import OURS
from moe_engine.tuning.planner.launch import form_of
from moe_engine.tuning.planner.memory import Room, room_of
from moe_engine.tuning.planner.predict import Prediction, predicted
from moe_engine.tuning.planner.search import Found, Plan, pareto
from moe_engine.tuning.planner.space import ROWS, WHOLE
from moe_engine.tuning.planner.steady import Load, MeasuredTimes
from moe_engine.tuning.planner.workload import Workload

Point = tuple[Candidate, Prediction]


def measured_launch(path: str, args: EngineArgs) -> tuple[CostFile, ResolvedConfig]:
    """The cost file and the launch that it was measured with.

    Raises:
        ConfigError: the file is of another launch.
    """
    file, config = CostFile.load(path), prepare(args)
    values = config.flat()
    if other := other_launch(file.launch, {name: values.get(name) for name in args.given}):
        raise ConfigError(
            f"--cost-file {path}: measured with {other}; give the flags of the measured launch, or run `moe-engine "
            "calibrate` with these flags"
        )
    if file.disturbed:
        print(f"note: {path} may be wrong: {file.disturbed}; calibrate again", file=sys.stderr)
    return file, config


def plan_measured(
    file: CostFile, config: ResolvedConfig, workload: Workload, slo: Slo, concurrency: int | None, top: int,
    acceptance: float | None,
) -> Found:  # fmt: skip
    """The launch with `concurrency` requests; None: with the numbers of requests that yield most within the limits.

    Args:
        acceptance: of each draft position; None: as measured.

    Raises:
        ConfigError: no request fits, or none meets the limits.
    """
    room = room_of(config)
    load = workload.load(not config.scheduling.disable_radix_cache)
    most = min(room.running, int(room.tokens / load.held))
    form, replicas = form_of(config), config.parallel.num_replicas
    schedulers = form.attn_dp * replicas
    rows = ROWS if concurrency is None else (-(-concurrency // schedulers),)
    if most < rows[0]:
        raise ConfigError(
            f"--workload {workload.text}: {most * schedulers} requests of this length run at once; lower --concurrency "
            "or the lengths, or give more memory"
        )
    chunk = room.chunk if room.chunk > 0 else WHOLE
    base = Candidate(form, replicas, config.kv_cache_dtype, chunk, 1, 0, config.args.model.model_path or "MODEL")
    points = [
        _best_depth(
            file, base.with_rows(count, concurrency), room, load, acceptance, config.scheduling.enable_mixed_chunk
        )
        for count in rows
        if count <= most
    ]
    met = [(c, p) for c, p in points if slo.missed(p.ttft_s, p.itl_s, p.tpot_s) <= 1]
    if not met:
        candidate, near = min(points, key=lambda pair: slo.missed(pair[1].ttft_s, pair[1].itl_s, pair[1].tpot_s))
        raise ConfigError(
            f"--slo: this launch does not meet it; the nearest is ttft={near.ttft_s:.3g}s,"
            f"itl={max(near.itl_s, near.tpot_s) * 1e3:.3g}ms with {candidate.concurrency} requests"
        )
    best = sorted(met, key=lambda point: -point[1].output_per_s)[:top]
    return Found(tuple(Plan(c, p, (room,)) for c, p in best), tuple(pareto(points)), {}, len(points))


def _best_depth(
    file: CostFile, candidate: Candidate, room: Room, load: Load, acceptance: float | None, mixed: bool
) -> Point:
    found = [_point(file, candidate.with_drafts(depth), load, acceptance, mixed) for depth in room.depths]
    return max(found, key=lambda point: point[1].output_per_s)


def _point(file: CostFile, candidate: Candidate, load: Load, acceptance: float | None, mixed: bool) -> Point:
    drafts = candidate.drafts
    # beyond the measured positions drafts are accepted like the last one
    known = file.acceptance or (0.0,)
    chances = [known[min(place, len(known) - 1)] if acceptance is None else acceptance for place in range(drafts)]
    accepted = sum(math.prod(chances[: place + 1]) for place in range(drafts))
    # the measured steps contain what the constants of a GPU stand for
    alone = candidate.concurrency <= candidate.form.attn_dp * candidate.replicas
    answer_s = file.answer_seconds + (file.idle_seconds if alone else file.busy_seconds)
    share, steps = replace(load_efficiency(OURS), request_ms=answer_s * 1e3), load.output / (1 + accepted)
    token_s = file.token_seconds + file.results_seconds * candidate.replicas / max(candidate.concurrency, 1)
    times = MeasuredTimes(beside_s=file.beside_seconds(steps), front_end_s=file.request_seconds + steps * token_s)
    prediction = predicted(MeasuredCosts(file), candidate, load, share, accepted, mixed, times=times)
    return candidate, prediction
