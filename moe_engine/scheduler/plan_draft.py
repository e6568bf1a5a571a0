"""Builds a `StepPlan`, and the `StepRecord` that maps its result to requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moe_engine.scheduler.admission import PrefillJob
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.types import KVOps, NewRow, Request, RowWrite, Speculation, StateOps, StepPlan
from moe_engine.types.image_tokens import needed_behind


@dataclass(slots=True)
class StepRecord:
    """A planned step without a result yet. `sampled` has the order of the result."""

    number: int
    sampled: list[Request]
    sampled_rows: list[int]
    prefilled: dict[int, Request] = field(default_factory=dict)
    """By row: requests with a prefill (chunk) in this step."""
    ended: list[Request] = field(default_factory=list)
    """Requests with max_new_tokens 0: they end with this step."""
    depths: list[int] = field(default_factory=list)
    """Draft depth of each decode (the first entries of `sampled`); empty in a plan without speculation."""
    num_decodes: int = 0
    prompt_spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By row of `prefilled`: the computed tokens [start, end)."""
    finished_rows: list[int] = field(default_factory=list)
    row_writes: list[RowWrite] = field(default_factory=list)
    """As in the plan, to repeat them if the worker may not have applied them."""
    kv_ops: KVOps | None = None
    window_pages: list[int] = field(default_factory=list)
    """As in the plan, to repeat them too."""
    lora_loads: list[tuple[int, int]] = field(default_factory=list)
    """As in the plan, to repeat them too."""
    jumped: dict[int, list[int]] = field(default_factory=dict)
    """By index in `sampled`, of decodes: forced tokens before the sampled one (`jump_forward`)."""
    alone: Request | None = None
    """The suspect that runs alone in this step."""
    launched: float = 0.0
    """Time of planning, by the scheduler's clock."""

    @property
    def decoded(self) -> list[Request]:
        """Requests that decode in this step."""
        return self.sampled[: self.num_decodes]


class PlanDraft:
    """Collects decodes, then prefills, and builds the plan. Updates the requests' counts."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.slots: list[int] = []
        self.input_ids: list[int] = []
        self.new_rows: list[NewRow] = []
        self.num_decodes = 0
        self.sampled: list[Request] = []
        self.prefilled: dict[int, Request] = {}
        self.prompt_spans: dict[int, tuple[int, int]] = {}
        self.ended: list[Request] = []
        self.depths: list[int] = []
        self.reserved: list[RowWrite] = []
        self.jumped: dict[int, list[int]] = {}
        self.speculative = False

    @property
    def num_decode_tokens(self) -> int:
        return sum(self.counts[: self.num_decodes])

    def add_speculative(
        self, requests: list[Request], depths: list[int], counts: list[int], reserved: list[RowWrite]
    ) -> bool:
        """Decodes with counts[i] tokens each, including drafts of depths[i] levels. Returns as `add_decodes`."""
        self.speculative = True
        self.num_decodes = len(requests)
        self.counts = counts
        self.depths = depths
        self.reserved = reserved
        self.samples = [True] * len(requests)
        self.sampled = requests.copy()
        some_end = False
        for request, depth in zip(requests, depths):
            self.rows.append(request.row)
            self.starts.append(request.num_computed)
            request.num_computed += 1
            request.num_maybe += depth
            request.num_in_flight += 1
            some_end |= len(request.output_ids) + request.num_in_flight >= request.max_new_tokens
        return some_end

    def add_decodes(self, requests: list[Request], kv_cache: KVCacheManager) -> bool:
        """Decodes of one token each, whose input ids are on the device. True if some requests need no further step."""
        self.slots = kv_cache.take_decode_slots(requests)
        self.num_decodes = len(requests)
        self.counts = [1] * len(requests)
        self.samples = [True] * len(requests)
        self.sampled = requests.copy()
        self.rows = [request.row for request in requests]
        starts = self.starts
        some_end = False
        for request in requests:
            start = request.num_computed
            starts.append(start)
            request.num_computed = start + 1
            in_flight = request.num_in_flight + 1
            request.num_in_flight = in_flight
            if len(request.output_ids) + in_flight >= request.max_new_tokens:
                some_end = True
        return some_end

    def add_jump(self, request: Request, tokens: list[int], slots: list[int]) -> bool:
        """A decode preceded by forced tokens; the step in flight samples the first of them. Returns as `add_decodes`.

        Jumps follow the decodes, and prefills follow the jumps.
        """
        count = len(tokens)
        self.jumped[len(self.sampled)] = tokens[1:]
        self.num_decodes += 1
        self.rows.append(request.row)
        self.starts.append(request.num_computed)
        self.counts.append(count)
        self.samples.append(True)
        self.slots += slots
        self.input_ids += tokens
        self.sampled.append(request)
        request.num_computed += count
        request.num_in_flight += count
        return len(request.output_ids) + request.num_in_flight >= request.max_new_tokens

    def add_prefill(self, job: PrefillJob) -> bool:
        """A prefill of known tokens. True if the request decodes from the next step on."""
        request, count = job.entry.request, len(job.slots)
        if job.is_new:
            self.new_rows.append(_new_row(request, job))
        wants_more = request.max_new_tokens - len(request.output_ids)
        samples = job.is_last and wants_more > 0
        self.rows.append(request.row)
        self.starts.append(job.start)
        self.counts.append(count)
        self.samples.append(samples)
        self.slots += job.slots
        self.input_ids += job.entry.tokens[job.start : job.start + count]
        self.prefilled[request.row] = request
        self.prompt_spans[request.row] = (job.start, job.start + count)
        request.num_computed += count
        if samples:
            self.sampled.append(request)
            request.num_in_flight += 1
        elif job.is_last:
            self.ended.append(request)
        return samples and wants_more > 1

    def finish(
        self,
        number: int,
        row_writes: list[RowWrite],
        finished_rows: list[int],
        follow: bool = False,
        kv_ops: KVOps | None = None,
        window_pages: list[int] | None = None,
        lora_loads: list[tuple[int, int]] | None = None,
        state_ops: StateOps | None = None,
    ) -> tuple[StepPlan, StepRecord]:
        """The plan and its record. `follow`: the drafter runs a draft extend. Takes over the lists."""
        speculation = None
        if self.speculative or (follow and self.rows):
            speculation = Speculation(max(self.depths, default=0), follow, self.reserved)
        plan = StepPlan(
            number=number,
            rows=self.rows,
            starts=self.starts,
            counts=self.counts,
            samples=self.samples,
            slots=self.slots,
            num_decodes=self.num_decodes - len(self.jumped),
            input_ids=self.input_ids,
            new_rows=self.new_rows,
            row_writes=row_writes,
            finished_rows=finished_rows,
            speculation=speculation,
            kv_ops=kv_ops,
            window_pages=window_pages or [],
            lora_loads=lora_loads or [],
            state_ops=state_ops,
        )
        rows = self.rows
        if self.prefilled:
            rows = [row for row, samples in zip(self.rows, self.samples) if samples]
        record = StepRecord(
            number, self.sampled, rows, self.prefilled, self.ended, self.depths, self.num_decodes, self.prompt_spans,
            finished_rows, row_writes, kv_ops, plan.window_pages, plan.lora_loads, self.jumped,
        )  # fmt: skip
        return plan, record


def _new_row(request: Request, job: PrefillJob) -> NewRow:
    spec = request.logprobs
    if spec is not None and spec.start is not None and request.output_ids:
        spec = replace(spec, start=None)  # prompt logprobs were delivered before the retraction
    return NewRow(
        row=request.row,
        rid=request.rid,
        token_ids=job.entry.tokens,
        num_prompt=len(request.prompt_ids),
        slots=request.slots[: job.start],
        sampling=request.sampling,
        seed=request.seed,
        eos_token_ids=request.eos_token_ids,
        logprobs=spec,
        max_length=len(request.prompt_ids) + request.max_new_tokens,
        lora_slot=request.lora_slot,
        snapshot=request.state_from,
        returns_positions=request.positions is not None,
        images=needed_behind(request.images, job.start) if request.images else (),
    )
