"""One step from plan to tokens: rows, batch, forward, sample. Runs on the thread that owns the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moe_engine.errors import MoeEngineError
from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.models.batch import Model
from moe_engine.types import LogprobSpec, StepPlan, StepResult, TokenLogprob
from moe_engine.worker.batch_builder import BatchBuilder
from moe_engine.worker.device_stream import DeviceStream, HostCopy
from moe_engine.worker.kv_pool import KVPool
from moe_engine.worker.logprobs import PendingLogprobs, PendingPrompt, prompt_logprobs, token_logprobs
from moe_engine.worker.mla_form import MLAFormPolicy
from moe_engine.worker.rows import Rows
from moe_engine.worker.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.pending import PendingSpeculation, add_logprobs
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.step_batch import StepBatch


class StepError(MoeEngineError):
    """A step failed; says which, where in it, and how much it was to compute. The cause is chained."""


class PendingResult(Protocol):
    """A step that was launched. `take` waits for its results; `ready` says whether it would have to."""

    @property
    def ready(self) -> bool: ...

    def take(self) -> StepResult: ...


@dataclass
class PendingStep:
    """A step without drafts, implements `PendingResult`."""

    number: int
    rows: list[int]
    tokens: HostCopy
    logprobs: PendingLogprobs | None = None
    logprob_indices: list[int] = field(default_factory=list)
    prompts: list[PendingPrompt] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.tokens.ready

    def take(self) -> StepResult:
        tokens = [[token] for token in self.tokens.wait()[0].tolist()]
        logprobs: list[list[TokenLogprob]] | None = None
        if self.logprobs is not None:
            logprobs = [[] for _ in tokens]
            for index, entry in zip(self.logprob_indices, self.logprobs.take()):
                logprobs[index] = [entry]
        prompts = {pending.row: pending.take() for pending in self.prompts} or None
        return StepResult(self.number, self.rows, tokens, logprobs, prompts, self.seconds)


class ModelRunner:
    """Executes plans against one model and one KV pool. Logits a model returns may be changed in place.

    `speculation` is set once the parts that it shares with the runner exist; without it no plan may ask for it.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KVPool,
        rows: Rows,
        attention: MLABackend | GQABackend,
        stream: DeviceStream,
        *,
        form: MLAFormPolicy | None = None,
        sampling: SamplingKernel | None = None,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.rows = rows
        self.attention = attention
        self.stream = stream
        self.builder = BatchBuilder(rows, kv_pool.page_size, form or MLAFormPolicy(), stream)
        self.sampler = Sampler(rows.sampling, stream, sampling)
        self.speculation: SpeculativeStep | None = None
        self._phase = "idle"
        self._nothing = torch.zeros(0, dtype=torch.int64)

    @property
    def phase(self) -> str:
        """What the step in work is doing, or the last one did; may be read from any thread."""
        return self._phase

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step to its end.

        Raises:
            StepError: with step, phase and sizes; the rows of the plan are then in an undefined state until entered
                anew by `NewRow`.
        """
        return self.launch(plan).take()

    def launch(self, plan: StepPlan) -> PendingResult:
        """Runs a step up to where its results are on their way to the host; on the CPU that is its end."""
        try:
            with torch.inference_mode():
                return self._launch(plan)
        except Exception as error:
            raise StepError(
                f"step {plan.number}, {self._phase}: {len(plan.rows)} requests ({plan.num_decodes} decodes), "
                f"{plan.num_tokens} tokens: {type(error).__name__}: {error}"
            ) from error

    def _launch(self, plan: StepPlan) -> PendingResult:
        self._phase = "updating rows"
        if plan.finished_rows or plan.new_rows or plan.row_writes:
            self.rows.apply(plan.finished_rows, plan.new_rows, plan.row_writes)
            if self.speculation is not None:
                self.speculation.enter(plan)
        if plan.speculation is not None and plan.rows:
            return self._launch_speculative(plan)
        began = time.perf_counter()
        if not plan.rows:
            return PendingStep(plan.number, [], HostCopy([self._nothing]))
        self._phase = "building the batch"
        batch = self.builder.build(plan)
        self._phase = "planning attention"
        forward = batch.forward_batch(self.attention.plan(batch.attention), self.kv_pool.layers)
        self._phase = "running the model"
        hidden = self.model.forward(forward)  # [T, D]
        prompts = self._prompt_logprobs(plan, batch, hidden) if self.rows.prompt_logprobs else []
        if not len(batch.sampled.rows):
            if self.speculation is not None:
                self.speculation.advance_ordinary(plan, batch.sampled, self._nothing)
            return PendingStep(plan.number, [], HostCopy([self._nothing]), prompts=prompts)
        self._phase = "computing logits"
        sampled_hidden = hidden if batch.all_sampled else hidden.index_select(0, batch.logits_rows)
        logits = self.model.logits(sampled_hidden)  # [S, V] float32
        self._phase = "sampling"
        pending = self._sample(plan, logits, batch.sampled, prompts)
        pending.seconds = time.perf_counter() - began
        return pending

    def _launch_speculative(self, plan: StepPlan) -> PendingSpeculation:
        """As `_launch`, around the parts of `SpeculativeStep`."""
        step, speculation = self.speculation, plan.speculation
        if step is None or speculation is None:
            raise ValueError(f"plan {plan.number} speculates, but this worker was made without a drafter")
        began = time.perf_counter()
        self._phase = "drafting"
        whole = plan
        plan, left_out = step.without_ended(plan)
        step.reserve(speculation)
        if not plan.rows:
            return PendingSpeculation.empty(plan.number, [(i, whole.rows[i]) for i in left_out])
        verification = step.draft(plan, speculation)
        drafted = time.perf_counter()
        self._phase = "building the batch"
        batch = step.build(plan, verification)
        self._phase = "planning attention"
        forward = batch.forward_batch(self.attention.plan(batch.attention), self.kv_pool.layers)
        self._phase = "running the model"
        hidden = self.model.forward(forward)  # [T, D]
        prompts = self._prompt_logprobs(plan, batch, hidden) if self.rows.prompt_logprobs else []
        self._phase = "computing logits"
        logits = self.model.logits(hidden if batch.all_sampled else hidden.index_select(0, batch.logits_rows))
        self._phase = "sampling"
        wanting = [i for i, row in enumerate(batch.sampled.rows.tolist()) if row in self.rows.logprobs]
        raw = logits[wanting] if wanting else None  # a copy
        accepted, new = step.accept(logits, batch, verification)
        step.advance(plan, verification, accepted, new)
        copy = self.stream.download([accepted.tokens, accepted.counts, new])
        follow_began = time.perf_counter()
        if speculation.follow:
            self._phase = "letting the drafter follow"
            step.follow(plan, batch, forward, hidden, verification, accepted)
        ended = time.perf_counter()
        plan_rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        seconds = (ended - began, drafted - began, ended - follow_began)
        if left_out:  # not the step that was planned: its time would mislead
            seconds = (0.0, 0.0, 0.0)
        pending = PendingSpeculation(plan.number, plan_rows, copy, seconds, prompts=prompts)
        pending.left_out = [(i, whole.rows[i]) for i in left_out]
        if raw is not None:
            add_logprobs(pending, self.rows.logprobs, self.stream, raw, wanting, verification, accepted, new)
        return pending

    def _sample(
        self, plan: StepPlan, logits: Tensor, sampled: SampledRows, prompts: list[PendingPrompt]
    ) -> PendingStep:
        plan_rows = plan.rows if all(plan.samples) else [r for r, samples in zip(plan.rows, plan.samples) if samples]
        wanting = [i for i, row in enumerate(plan_rows) if row in self.rows.logprobs] if self.rows.logprobs else []
        raw = logits[wanting] if wanting else None  # a copy
        edits = self.rows.edits
        edited = edits.active and bool(edits.wanted[sampled.rows].any())
        if edited:
            edits.apply(logits, sampled.rows, sampled.lengths)
        tokens = self.sampler.sample(logits, sampled)  # [S]
        valid = tokens.clamp_min(0)
        self.rows.last_token.index_copy_(0, sampled.rows_device, valid)
        if edited:
            edits.sampled(valid, sampled.rows)
        if self.speculation is not None:
            self.speculation.advance_ordinary(plan, sampled, valid)
        pending = PendingStep(plan.number, plan_rows, self.stream.download([tokens]), prompts=prompts)
        if raw is not None:
            specs: Sequence[LogprobSpec] = [self.rows.logprobs[plan_rows[i]] for i in wanting]
            chosen = token_logprobs(raw, tokens[wanting], specs, self.stream)
            pending.logprobs = PendingLogprobs.start(chosen, specs, self.stream)
            pending.logprob_indices = wanting
        return pending

    def _prompt_logprobs(self, plan: StepPlan, batch: StepBatch, hidden: Tensor) -> list[PendingPrompt]:
        self._phase = "computing prompt log-probabilities"
        pending = []
        for i in range(plan.num_decodes, len(plan.rows)):
            wanted = self.rows.prompt_logprobs.get(plan.rows[i])
            if wanted is None:
                continue
            begin = int(batch.offsets[i])
            states = hidden[begin : begin + plan.counts[i]]
            found = prompt_logprobs(
                plan.rows[i], wanted, plan.starts[i], states, self.model.logits, self.rows.vocab_size, self.stream
            )
            if found is not None:
                pending.append(found)
        return pending
