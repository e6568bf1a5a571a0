"""Prefill and decode on separate engines: the rate of each side, and the numbers of engines that balance them.

Prefill engines compute prompts and nothing else; the KV of a chunk moves while the next chunk is computed, so that a
request waits for the transfer of its last chunk only. Decode engines see no prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moe_engine.tuning.costs.form import Form
from moe_engine.tuning.costs.step_cost import StepCostModel, StepShape
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.memory import RoomOf
from moe_engine.tuning.planner.predict import TAIL, Prediction, Predictor, shares
from moe_engine.tuning.planner.space import CHUNKS, Space
from moe_engine.tuning.planner.steady import Load, Steady, steady_state

BUSY = 0.85
"""Share of the time in which prefill engines compute: above it, prompts wait longer than they take."""
PREFILL_CHUNKS = (*CHUNKS, 16384)
PREFILL_ROWS = 32
"""Requests of an attention group of a prefill engine: those being computed, and those whose KV is in transfer."""


@dataclass(frozen=True)
class Disaggregated:
    """Prefill engines and decode engines. `replicas` of each side is its number of engines."""

    prefill: Candidate
    decode: Candidate

    @property
    def sides(self) -> tuple[Candidate, Candidate]:
        return self.prefill, self.decode

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus

    @property
    def concurrency(self) -> int:
        """Requests that decode concurrently."""
        return self.decode.concurrency

    @property
    def form_key(self) -> tuple[int, ...]:
        """Setups with one key are variants of one form."""
        return *self.prefill.form_key, *self.decode.form_key

    @property
    def text(self) -> str:
        return f"prefill {self.prefill.text} | decode {self.decode.text}"


@dataclass(frozen=True, eq=False)
class PrefillSide:
    """A prefill engine.

    Attributes:
        seconds: time of a prompt in an idle engine. per_s: prompts a second of a busy engine. transfer_s: transfer time
        of the KV of the last chunk. binds: share of a prompt by resource.
    """

    candidate: Candidate
    seconds: float
    per_s: float
    transfer_s: float
    binds: Mapping[str, float]
    _counted: dict[tuple[int, int], Candidate] = field(default_factory=dict)

    @property
    def per_gpu(self) -> float:
        return self.per_s / self.candidate.form.ranks

    def engines(self, number: int, drafts: int) -> Candidate:
        """This number of engines, whose decode engines verify drafts."""
        key = number, drafts
        if key not in self._counted:
            self._counted[key] = replace(self.candidate, replicas=number, drafts=drafts)
        return self._counted[key]


class DisaggregatedSearch:
    """Setups of separate engines, with their predictions.

    Args:
        space: the values to try.
        progress: called with a line for each kind of decode engine.
    """

    def __init__(
        self, predictor: Predictor, memory: RoomOf, load: Load, space: Space,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self._predictor, self._memory, self._load, self._space = predictor, memory, load, space
        self._decode_load = replace(load, computed=0.0)
        self._progress = progress

    def run(self, gpus: int, model_path: str, refused: dict[str, str]) -> Iterator[tuple[Disaggregated, Prediction]]:
        """All setups of at most `gpus` GPUs whose sides fit. The first refusal is added to `refused`."""
        for dtype in self._space.kv:
            prefills = self._prefills(gpus, dtype, model_path, refused)
            for decode, room_tokens in self._decodes(gpus, dtype, model_path) if prefills else ():
                self._progress(f"separate engines, decode {decode.text.partition(' x ')[2]}")
                for rows in self._space.rows(decode.form):
                    if rows * self._load.held > room_tokens:
                        break
                    yield from self._balanced(prefills, decode.with_rows(rows), gpus)

    def _prefills(self, gpus: int, kv: str, model_path: str, refused: dict[str, str]) -> list[PrefillSide]:
        """The Pareto front of engines by prompts a second of a GPU and seconds of a prompt."""
        auto = self._space.auto_depth
        sides = [
            self._prefill(Candidate(variant, 1, kv, chunk, PREFILL_ROWS, 0, model_path, "prefill", auto_depth=auto))
            for size in self._sizes(gpus)
            for form in self._forms(size)
            if self._fits(form, kv, model_path, refused)
            for variant in self._space.variants(form)
            for chunk in self._space.chunks(form, PREFILL_CHUNKS)
        ]
        found: list[PrefillSide] = []
        for side in sorted(sides, key=lambda side: (side.seconds, -side.per_gpu)):
            is_best = not found or side.per_gpu > found[-1].per_gpu
            if is_best and not self._memory.of(side.candidate).refusal:
                found.append(side)
        return found

    def _fits(self, form: Form, kv: str, model_path: str, refused: dict[str, str]) -> bool:
        room = self._memory.of(Candidate(form, 1, kv, CHUNKS[0], 8, 0, model_path, "prefill"))
        if room.refusal:
            refused.setdefault("prefill and decode on separate engines", room.refusal)
        return not room.refusal and room.tokens >= self._load.prompt

    def _prefill(self, candidate: Candidate) -> PrefillSide:
        """The rate of one engine whose groups all compute full chunks."""
        cost, late = self._predictor.cost(candidate.form, candidate.kv)
        load, groups = self._load, candidate.form.attn_dp
        computed = max(1, round(load.computed))
        before = round(load.prompt) - computed
        prompts = max(1, min(candidate.chunk, self._space.prompts) // computed)
        alone, _ = _chunks(cost, computed, before, candidate.chunk, 1, groups)
        full, parts = _chunks(cost, computed, before, candidate.chunk, prompts, groups)
        last = (computed - 1) % candidate.chunk + 1
        token = self._predictor.facts.kv_token_bytes(candidate.form.attn_tp, candidate.kv, windows=True)
        moved = last * token / self._predictor.cluster.link.bytes_per_s
        return PrefillSide(candidate, late * alone, prompts * groups / (late * full), moved, shares(parts))

    def _decodes(self, gpus: int, kv: str, model_path: str) -> Iterator[tuple[Candidate, float]]:
        """Decode engines with the KV slots of an attention group."""
        for form in (form for size in self._sizes(gpus) for form in self._forms(size)):
            plain = Candidate(form, 1, kv, CHUNKS[0], 8, 0, model_path, "decode", auto_depth=self._space.auto_depth)
            for drafts in self._space.depths(self._predictor.facts):
                room = self._memory.of(replace(plain, drafts=min(1, drafts)))
                if room.refusal:
                    break
                for variant in self._space.variants(form):
                    yield replace(plain, form=variant, drafts=drafts), room.tokens

    def _sizes(self, gpus: int) -> Iterator[int]:
        """Sizes of an engine that leave a GPU to the other side."""
        asked = self._space.form.get("ranks")
        powers = (1 << power for power in range(gpus.bit_length()))
        return (size for size in (powers if asked is None else (asked,)) if size < gpus)

    def _forms(self, size: int) -> Iterator[Form]:
        return (form for form, _ in self._space.forms(self._predictor.facts, size) if form.ranks == size)

    def _decode(self, engine: Candidate) -> Steady:
        cost, _ = self._predictor.cost(engine.form, engine.kv)
        load, accepted = self._decode_load, self._predictor.accepted(engine.drafts)
        rows, share = engine.rows * engine.form.attn_dp, self._predictor.share
        return steady_state(cost, engine.form, load, rows, share, engine.chunk, engine.drafts, accepted)

    def _balanced(
        self, prefills: Sequence[PrefillSide], engine: Candidate, gpus: int
    ) -> Iterator[tuple[Disaggregated, Prediction]]:
        """With each kind of prefill engine, the numbers of engines with the most requests a second."""
        load, state, drafts = self._load, self._decode(engine), engine.drafts
        decodes_per_s = state.output_per_s / load.output
        binds, counted = shares(state.decode_parts), dict[int, Candidate]()
        before_s = self._predictor.share.request_ms * 1e-3
        for prefill in prefills:
            ranks = prefill.candidate.form.ranks
            found = engine_counts(ranks, engine.form.ranks, BUSY * prefill.per_s, decodes_per_s, gpus)
            if found is None:
                continue
            (engines, decodes), rate = found
            if decodes not in counted:
                counted[decodes] = replace(engine, replicas=decodes)
            busy = rate / (engines * prefill.per_s)
            waiting = busy / (2 * (1 - busy)) / prefill.per_s
            delays = prefill.seconds, waiting, prefill.transfer_s, 0.5 * state.step_s
            ttft = before_s + sum(delays)
            prediction = Prediction(
                ttft, ttft + (TAIL - 1) * waiting, state.tpot_s, state.tpot_s, state.step_s, rate * load.output,
                rate * load.computed, gpus, binds, prefill.binds,
            )  # fmt: skip
            yield Disaggregated(prefill.engines(engines, drafts), counted[decodes]), prediction


def engine_counts(
    prefill_ranks: int, decode_ranks: int, prefill_rate: float, decode_rate: float, gpus: int
) -> tuple[tuple[int, int], float] | None:
    """Numbers of prefill and decode engines on `gpus` GPUs with the highest common rate, and that rate.

    Rates are requests a second of an engine. Of equal rates the fewest decode engines win. None: one of each does not
    fit.
    """
    most = (gpus - prefill_ranks) // decode_ranks
    if most < 1:
        return None

    # One more decode engine adds to its side and takes from the other: the optimum is where the sides cross.
    share = prefill_rate / prefill_ranks
    first = min(most, max(1, int(gpus * share / (decode_rate + decode_ranks * share))))

    def waits(decodes: int) -> bool:
        return decodes * decode_rate > (gpus - decodes * decode_ranks) // prefill_ranks * prefill_rate

    while first > 1 and waits(first - 1):
        first -= 1
    while first <= most and not waits(first):
        first += 1
    best, found = 0, -1.0
    for decodes in (first - 1, first):  # the last that is busy, and the first that waits
        prefills = (gpus - decodes * decode_ranks) // prefill_ranks
        rate = min(prefills * prefill_rate, decodes * decode_rate)
        if 1 <= decodes <= most and rate > found:
            best, found = decodes, rate
    return ((gpus - best * decode_ranks) // prefill_ranks, best), found


def _chunks(
    cost: StepCostModel, computed: int, before: int, chunk: int, prompts: int, groups: int
) -> tuple[float, Mapping[str, float]]:
    """Seconds of `prompts` prompts of each group together, chunk by chunk, and their resources."""
    seconds, parts = 0.0, dict[str, float]()
    while computed > 0:
        tokens = min(computed, chunk)
        pairs = tokens * before + tokens * (tokens + 1) // 2
        step = cost.step(StepShape(0, 0, 0, prompts * tokens, prompts * pairs, prompts * tokens * groups))
        seconds += step.seconds
        for name, value in step.by_resource.items():
            parts[name] = parts.get(name, 0.0) + value
        computed, before = computed - tokens, before + tokens
    return seconds, parts
