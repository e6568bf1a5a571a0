"""The search: every form of parallelism that divides the GPUs, with the sizes and options that may pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_engine.config.slo import Slo
from moe_engine.errors import ConfigError
from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.memory import Room, RoomOf
from moe_engine.tuning.planner.predict import Prediction, Predictor
from moe_engine.tuning.planner.workload import Workload

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (2048, 8192)
BALANCED_FROM = 16
"""Ranks from which redundant experts are tried: fewer ranks hold enough experts to balance."""

MOST_DRAFTS = 3
"""TensorRT-LLM's optimum for DeepSeek-R1 at batch 1 (tech blog 1)."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """A candidate that fits, with its prediction."""

    candidate: Candidate
    prediction: Prediction
    room: Room


@dataclass(frozen=True)
class Found:
    """Best plans, one a form; the Pareto front; refused forms by name with the sum of their memory."""

    plans: tuple[Plan, ...]
    front: tuple[tuple[Candidate, Prediction], ...]
    refused: dict[str, str]
    tried: int


def forms(facts: ModelFacts, gpus: int, kept: Callable[[Form], bool]) -> Iterator[tuple[Form, int]]:
    """Forms of a replica, with the number of replicas; all GPUs are used."""
    for ranks in (size for size in range(1, gpus + 1) if gpus % size == 0 and not size & (size - 1)):
        for dp in (size for size in range(1, ranks + 1) if ranks % size == 0 and not size & (size - 1)):
            if facts.num_heads % (ranks // dp) or (1 < dp < ranks and ranks // dp > 8):
                continue
            for form in _experts(facts, ranks, dp):
                if kept(form):
                    yield form, gpus // ranks


def _experts(facts: ModelFacts, ranks: int, dp: int) -> Iterator[Form]:
    if not facts.num_experts:
        yield Form(ranks, dp)
        return
    if dp == 1:
        yield Form(ranks)
        if ranks > 1 and facts.num_experts % ranks == 0:
            yield Form(ranks, ep=ranks)
        return
    if facts.num_experts % ranks == 0:
        yield Form(ranks, dp, ranks, travels=True, dense_whole=True)
        yield Form(ranks, dp, ranks)


def options(facts: ModelFacts, form: Form, kv: Sequence[str], model_path: str, replicas: int) -> Iterator[Candidate]:
    """Everything but the number of requests."""
    variants = [form]
    if form.travels:
        variants.append(replace(form, overlap=True))
    if form.travels and form.ranks >= BALANCED_FROM:
        variants += [replace(variant, redundant=form.ranks) for variant in list(variants)]
    for variant in variants:
        for dtype in kv:
            for chunk in CHUNKS:
                for drafts in range(min(1, facts.mtp_layers) * MOST_DRAFTS + 1):
                    yield Candidate(variant, replicas, dtype, chunk, 1, drafts, model_path)


class Search:
    """Tries candidates, then asks the memory ledger about the best.

    Args:
        concurrency: requests in all; None: any number.
        kept: forms that the user's flags allow.
        progress: is called with a line for each stage.
    """

    def __init__(
        self,
        predictor: Predictor,
        memory: RoomOf,
        workload: Workload,
        slo: Slo,
        kv: Sequence[str] = ("bf16", "fp8"),
        concurrency: int | None = None,
        kept: Callable[[Form], bool] = lambda form: True,
        progress: Progress = lambda text: None,
    ) -> None:
        self.predictor, self.memory, self.workload, self.slo = predictor, memory, workload, slo
        self.kv, self.concurrency, self.kept, self.progress = kv, concurrency, kept, progress
        self.load = workload.load

    def run(self, gpus: int, model_path: str, top: int) -> Found:
        """Raises ConfigError: nothing fits, or nothing meets the objective."""
        facts, refused, tried = self.predictor.facts, dict[str, str](), 0
        points: list[tuple[Candidate, Prediction]] = []
        all_forms = list(forms(facts, gpus, self.kept))
        for done, (form, replicas) in enumerate(all_forms):
            self.progress(f"{done}/{len(all_forms)} forms, {tried} configurations")
            for candidate in options(facts, form, self.kv, model_path, replicas):
                room = self._base(candidate)
                if room.refusal:
                    refused.setdefault(_name(candidate), room.refusal)
                    break
                for rows in self._rows(candidate, room):
                    tried += 1
                    chosen = candidate.with_rows(rows)
                    points.append((chosen, self.predictor.predict(chosen, self.load)))
        if not points:
            raise ConfigError(_nothing_fits(refused, gpus, self.predictor.cluster.gpu_key))
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
        if self.concurrency is not None:
            rows = -(-self.concurrency // (candidate.form.attn_dp * candidate.replicas))
            if rows <= fit and (rows - 1) * candidate.form.attn_dp * candidate.replicas < self.concurrency:
                yield rows
            return
        yield from (rows for rows in ROWS if rows <= fit)

    def _best(self, met: list[tuple[Candidate, Prediction]], top: int, refused: dict[str, str]) -> tuple[Plan, ...]:
        """The best of each form whose exact launch fits."""
        plans: list[Plan] = []
        taken: set[tuple[int, int, int]] = set()
        fits: dict[Candidate, float] = {}  # rows of a candidate's options that fit, as far as known
        for candidate, prediction in sorted(met, key=lambda pair: -pair[1].output_per_gpu):
            key, variant = (candidate.form.ranks, candidate.form.attn_dp, candidate.form.ep), candidate.with_rows(0)
            if key in taken or candidate.rows > fits.get(variant, candidate.rows):
                continue
            room = self.memory.of(candidate)
            if room.refusal:
                refused.setdefault(candidate.text, room.refusal)
                fits[variant] = candidate.rows / 2
                continue
            rows = min(room.tokens / self.load.held, room.running)
            if rows < candidate.rows:
                fits[variant] = rows
                continue
            plans.append(Plan(candidate, prediction, room))
            taken.add(key)
            if len(plans) == top:
                break
        if not plans:
            raise ConfigError(_nothing_fits(refused, met[0][0].gpus, self.predictor.cluster.gpu_key))
        return tuple(plans)

    def _ratio(self, prediction: Prediction) -> float:
        return self.slo.missed(prediction.ttft_s, prediction.itl_s, prediction.tpot_s)

    def _missed(self, points: list[tuple[Candidate, Prediction]]) -> str:
        candidate, nearest = min(points, key=lambda pair: self._ratio(pair[1]))
        return (
            f"--slo: no configuration of {candidate.gpus} GPUs meets it; ask for no less than the nearest, "
            f"ttft={nearest.ttft_s:.3g}s,itl={max(nearest.itl_s, nearest.tpot_s) * 1e3:.3g}ms ({candidate.text}, "
            f"{candidate.concurrency} requests), or use other GPUs"
        )


def pareto(points: Sequence[tuple[Candidate, Prediction]]) -> list[tuple[Candidate, Prediction]]:
    """Points that no other exceeds in tokens a second of a GPU and of a user, by falling tokens of a user."""
    front: list[tuple[Candidate, Prediction]] = []
    for candidate, prediction in sorted(points, key=lambda pair: (pair[1].tpot_s, -pair[1].output_per_gpu)):
        if not front or prediction.output_per_gpu > front[-1][1].output_per_gpu:
            front.append((candidate, prediction))
    return front


def _name(candidate: Candidate) -> str:
    return replace(candidate, form=replace(candidate.form, overlap=False, redundant=0), drafts=0).text


def _nothing_fits(refused: dict[str, str], gpus: int, gpu: str) -> str:
    if not refused:
        return f"--workload: no number of requests fits {gpus}x{gpu}; use more GPUs, or shorter requests"
    name, why = list(refused.items())[-1]
    return f"nothing fits {gpus}x{gpu}; the last of {len(refused)} forms, {name}: {why}"
