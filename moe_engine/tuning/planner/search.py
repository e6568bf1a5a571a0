"""The search over forms of parallelism, their options and sizes, and over prefill and decode on separate engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_engine.config.slo import Slo
from moe_engine.errors import ConfigError
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.disaggregated import Disaggregated, DisaggregatedSearch
from moe_engine.tuning.planner.memory import Room, RoomOf
from moe_engine.tuning.planner.predict import Prediction, Predictor
from moe_engine.tuning.planner.space import CHUNKS, EVERYTHING, Space
from moe_engine.tuning.planner.workload import Workload

Progress = Callable[[str], None]
Setup = Candidate | Disaggregated
Point = tuple[Setup, Prediction]


@dataclass(frozen=True)
class Plan:
    """A setup that fits, with its prediction and the room of each kind of engine."""

    setup: Setup
    prediction: Prediction
    rooms: tuple[Room, ...]


@dataclass(frozen=True)
class Found:
    """Best plans, one a form; the Pareto front; refused forms by name with the sum of their memory."""

    plans: tuple[Plan, ...]
    front: tuple[Point, ...]
    refused: dict[str, str]
    tried: int


class Search:
    """Predicts candidates, then checks the memory ledger of the best.

    Args:
        space: the values to try.
        concurrency: total requests; None: any number.
        progress: called with a line for each stage.
    """

    def __init__(
        self,
        predictor: Predictor,
        memory: RoomOf,
        workload: Workload,
        slo: Slo,
        space: Space = EVERYTHING,
        concurrency: int | None = None,
        progress: Progress = lambda text: None,
    ) -> None:
        self.predictor, self.memory, self.workload, self.slo = predictor, memory, workload, slo
        self.space, self.concurrency, self.progress = space, concurrency, progress
        self.load = workload.load(space.caches)

    def run(self, gpus: int, model_path: str, top: int) -> Found:
        """Raises ConfigError: nothing fits, or nothing meets the objective."""
        facts, refused, tried, most = self.predictor.facts, dict[str, str](), 0, 0
        points: list[Point] = []
        all_forms = list(self.space.forms(facts, gpus))
        for done, (form, replicas) in enumerate(all_forms):
            self.progress(f"{done}/{len(all_forms)} forms, {tried} configurations")
            for candidate in self.space.options(facts, form, model_path, replicas):
                room = self._base(candidate)
                if room.refusal:
                    refused.setdefault(_name(candidate), room.refusal)
                    break
                most = max(most, int(room.tokens // self.load.held) * candidate.form.attn_dp * candidate.replicas)
                for rows in self._rows(candidate, room):
                    tried += 1
                    chosen = candidate.with_rows(rows, self.concurrency)
                    points.append((chosen, self.predictor.predict(chosen, self.load)))
        of_whole = dict(refused)
        if self.concurrency is None and self.space.separate:
            apart = DisaggregatedSearch(self.predictor, self.memory, self.load, self.space, self.progress)
            points += apart.run(gpus, model_path, refused)
            tried = len(points)
        if not (points or refused or all_forms):
            raise ConfigError(_no_form(self.space, gpus))
        if not points and self.concurrency is not None and most:
            raise ConfigError(
                f"--concurrency {self.concurrency}: {gpus}x{self.predictor.cluster.gpu_key} has memory for {most} "
                "requests of this length at once; lower it, or use more GPUs or shorter requests"
            )
        if not points:
            raise ConfigError(_nothing_fits(of_whole or refused, gpus, self.predictor.cluster.gpu_key))
        met = [(c, p) for c, p in points if self._ratio(p) <= 1]
        if not met:
            raise ConfigError(self._missed(points))
        self.progress(f"{tried} configurations, checking the memory of the best")
        return Found(self._best(met, top, refused), tuple(pareto(points)), refused, tried)

    def _base(self, candidate: Candidate) -> Room:
        """Room with the sizes that leave the most for KV; variants of a form share it."""
        form = replace(candidate.form, overlap=False, redundant=0)
        drafts = min(1, candidate.drafts)
        return self.memory.of(replace(candidate, form=form, chunk=CHUNKS[0], rows=8, drafts=drafts))

    def _rows(self, candidate: Candidate, room: Room) -> Iterator[int]:
        fit = int(room.tokens // self.load.held)
        found = self.space.rows(candidate.form)
        if self.concurrency is not None:
            rows = -(-self.concurrency // (candidate.form.attn_dp * candidate.replicas))
            found = (rows,) if self.space.running is None or rows <= found[0] else ()
        yield from (rows for rows in found if rows <= fit)

    def _best(self, met: list[Point], top: int, refused: dict[str, str]) -> tuple[Plan, ...]:
        """The best of each form whose exact launches fit."""
        plans: list[Plan] = []
        taken: set[tuple[int, ...]] = set()
        fits: dict[Candidate, float] = {}  # rows of an engine's options that fit, as far as known
        for setup, prediction in sorted(met, key=lambda point: -point[1].output_per_gpu):
            engine = setup.decode
            variant = replace(engine, rows=0, replicas=0)
            if setup.form_key in taken or engine.rows > fits.get(variant, engine.rows):
                continue
            rooms = tuple(self.memory.of(side.of_one_launch) for side in setup.sides)
            refusals = [(side.text, room.refusal) for side, room in zip(setup.sides, rooms) if room.refusal]
            if refusals:
                refused.setdefault(*refusals[0])
            rows = 0.0 if rooms[-1].refusal else min(rooms[-1].tokens / self.load.held, rooms[-1].running)
            if rows < engine.rows:
                fits[variant] = rows or engine.rows / 2
            if refusals or rows < engine.rows:
                continue
            plans.append(Plan(setup, prediction, rooms))
            taken.add(setup.form_key)
            if len(plans) == top:
                break
        if not plans:
            raise ConfigError(_nothing_fits(refused, met[0][0].gpus, self.predictor.cluster.gpu_key))
        return tuple(plans)

    def _ratio(self, prediction: Prediction) -> float:
        return self.slo.missed(prediction.ttft_s, prediction.itl_s, prediction.tpot_s)

    def _missed(self, points: list[Point]) -> str:
        candidate, nearest = min(points, key=lambda pair: self._ratio(pair[1]))
        return (
            f"--slo: no configuration of {candidate.gpus} GPUs meets it; ask for no less than the nearest, "
            f"ttft={nearest.ttft_s:.3g}s,itl={max(nearest.itl_s, nearest.tpot_s) * 1e3:.3g}ms ({candidate.text}, "
            f"{candidate.concurrency} requests), or use other GPUs"
        )


def pareto(points: Sequence[Point]) -> list[Point]:
    """The Pareto front by tokens a second of a GPU and of a user, in falling order of the latter."""
    front: list[Point] = []
    for setup, prediction in sorted(points, key=lambda point: (point[1].tpot_s, -point[1].output_per_gpu)):
        if not front or prediction.output_per_gpu > front[-1][1].output_per_gpu:
            front.append((setup, prediction))
    return front


def _name(candidate: Candidate) -> str:
    return replace(candidate, form=replace(candidate.form, overlap=False, redundant=0), drafts=0).text


def _no_form(space: Space, gpus: int) -> str:
    names = ", ".join(space.fixed_by) or "--hardware"
    return f"{names}: no form of parallelism on {gpus} GPUs has these sizes; change or drop one of them"


def _nothing_fits(refused: dict[str, str], gpus: int, gpu: str) -> str:
    if not refused:
        return f"--workload: no number of requests fits {gpus}x{gpu}; use more GPUs, or shorter requests"
    name, why = list(refused.items())[-1]
    power = 1 << (gpus.bit_length() - 1)
    other = "" if power == gpus else f"; an engine has a power of two of GPUs: try {power}x{gpu} or {2 * power}x{gpu}"
    return f"nothing fits {gpus}x{gpu}; the last of {len(refused)} forms, {name}: {why}{other}"
