"""The model runner: one step from plan to tokens (update rows, build the batch, forward, sample). Runs on the thread
that owns the device."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_engine.errors import StepError, StepNotRun
from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.kernels.decoder.drafting import VerifiedChains
from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.kernels.speculation.choice import decode_kernels
from moe_engine.models.batch import Model
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import Speculation, StepPlan, StepResult
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.batch.mla_form import MLAFormPolicy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.captured_groups import AttentionWindows
from moe_engine.worker.device_stream import DeviceStream, HostCopy, StepClock
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.forward_pass import RUNNING, ForwardPass
from moe_engine.worker.fused_decode import FusedDecode
from moe_engine.worker.hidden_states import PendingHidden, pending_hidden
from moe_engine.worker.kv_cache.kv_copies import KVCopies
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.lora_adapters import LoraAdapters
from moe_engine.worker.pending_step import PendingResult, PendingStep
from moe_engine.worker.routed_experts import PendingExperts, RoutedExperts
from moe_engine.worker.sampling.logits_passes import UNBOUNDED, LogitsPasses
from moe_engine.worker.sampling.logprobs import PendingPrompt, prompt_logprobs
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.drafted_step import DraftedStep
from moe_engine.worker.speculation.pending import PendingSpeculation, StepSeconds
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.step_sampling import Passes, StepSampling
from moe_engine.worker.step_shape import StepShape


class ModelRunner:
    """Executes plans with one model and one KV pool. May change the model's logits in place.

    `speculation` is set after construction, as it shares parts with the runner; without it no plan may speculate.
    `graphs` is set after CUDA graphs are captured; without it every step runs kernel by kernel. So is `drafted`, if
    whole steps with drafts are captured. `fused`: decodes in one kernel call, if available. `taps`: the model's hidden
    states that an EAGLE-3 head reads. `routed`: the experts of every token, if requests may return them.

    Args:
        windows: sliding windows of the model's cache groups, the first group first.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KVPool,
        rows: RequestRows,
        attention: MLABackend | GQABackend,
        stream: DeviceStream,
        *,
        form: MLAFormPolicy | None = None,
        sampling: SamplingKernel | None = None,
        parallel: ParallelContext = SINGLE,
        passes: LogitsPasses = UNBOUNDED,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.kv_pool = kv_pool
        self.rows = rows
        self.stream = stream
        self.windows = AttentionWindows(windows, None if rows.windows is None else rows.windows.table)
        self.sampler = Sampler(rows.sampling, stream, sampling, passes)
        builder = BatchBuilder(
            rows, kv_pool.page_size, form or MLAFormPolicy(), stream, windows[0], rows.windows,
            decode_kernels(self.sampler.kernel),
        )  # fmt: skip
        self.sampling = StepSampling(rows, self.sampler, stream)
        self.shared = DPSteps(parallel, stream.device, kv_pool.layers)
        self.forward = ForwardPass(model, kv_pool, rows, attention, builder, self.shared)
        self.speculation: SpeculativeStep | None = None
        self.kv_copies: KVCopies | None = None
        self.lora: LoraAdapters | None = None
        self.drafted: DraftedStep | None = None
        self.fused: FusedDecode | None = None
        self.taps: HiddenTaps | None = None
        self.routed: RoutedExperts | None = None
        rows.keep_tokens(kv_pool.num_slots + kv_pool.page_size)
        rows.edits.custom.group = parallel.attn_tp
        self._inference_mode = torch.inference_mode()  # made once: short steps notice it
        self._logits_ended = 0.0
        self._failed: int | None = None  # number of the previous step, if it raised or was not run
        self._empty = torch.zeros(0, dtype=torch.int64)

    @property
    def model(self) -> Model:
        """The model of the forward, observed while passes are recorded."""
        return self.forward.model

    @property
    def phase(self) -> str:
        """Phase of the current or last step; may be read from any thread."""
        return self.forward.phase

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step and returns its result.

        Raises:
            StepError: with step, phase and sizes; the rows of the plan are then in an undefined state until the next
                `NewRow`.
        """
        result = self.launch(plan).take()
        if plan.kv_ops is None or self.kv_copies is None:
            return result
        return replace(result, kv_done=self.kv_copies.take_done())

    def launch(self, plan: StepPlan) -> PendingResult:
        """Runs a step until the download of its results has started; on the CPU the step is then complete.

        The step planned after a failed one, which has the next number, is not run: it relies on slots and lengths that
        the failed step should have written to the tables.
        """
        failed, self._failed = self._failed, None
        if failed is not None and plan.number == failed + 1:
            self._failed = plan.number
            raise StepNotRun(f"step {plan.number} was planned behind step {failed}, which failed: it was not run")
        try:
            with self._inference_mode:
                return self._launch(plan)
        except Exception as error:
            self._failed = plan.number
            if self.kv_copies is not None:
                self.kv_copies.end_all()
            raise StepError(
                f"step {plan.number}, {self.forward.doing}: {len(plan.rows)} requests ({plan.num_decodes} decodes), "
                f"{plan.num_tokens} tokens: {type(error).__name__}: {error}"
            ) from error

    def _launch(self, plan: StepPlan) -> PendingResult:
        self._apply_edits(plan)
        if not plan.rows:
            self._run_idle(plan)
            return PendingStep(plan.number, [], HostCopy([self._empty]))
        if plan.speculation is not None:
            return self._launch_speculative(plan, plan.speculation)
        pending = self._launch_plain(plan)
        self._join_extend(plan)
        return pending

    def _launch_plain(self, plan: StepPlan) -> PendingResult:
        """`_launch` of a plan with requests and without speculation."""
        began = time.perf_counter()
        fused = self._run_fused_decode(plan)
        if fused is not None:
            return PendingStep(plan.number, plan.rows, fused, seconds=time.perf_counter() - began)
        self._draft_idle(plan)
        shape = self.forward.graph_shape(plan)
        if shape is not None:
            return self._launch_replayed(plan, shape, began)
        sizes = self.shared.sizes(plan)
        batch, hidden = self.forward.run(plan, sizes, None if self.fused is None else self.fused.prefixes)  # [T, D]
        if self.rows.states is not None:
            self.rows.states.save_ends(plan)
        return self._finish_step(plan, batch, hidden, sizes, began)

    def _apply_edits(self, plan: StepPlan) -> None:
        """What a plan changes before its forward: copies of KV, adapters in slots, pages, states, rows."""
        if plan.kv_ops is not None:
            assert self.kv_copies is not None
            self.forward.doing = "copying KV"
            self.kv_copies.start(plan.kv_ops)
        if plan.lora_loads:
            assert self.lora is not None
            self.forward.doing = "loading adapters into slots"
            self.lora.fill_slots(plan.lora_loads)
        self.forward.doing = "updating rows"
        if plan.window_pages:
            assert self.rows.windows is not None
            self.rows.windows.map_pages(plan.window_pages)
        if plan.state_ops is not None and plan.state_ops.saves:
            assert self.rows.states is not None
            self.rows.states.save(plan.state_ops.saves)
        if plan.finished_rows or plan.new_rows or plan.row_writes:
            self.rows.apply(plan.finished_rows, plan.new_rows, plan.row_writes)
            if self.speculation is not None:
                self.speculation.enter(plan)

    def _launch_replayed(self, plan: StepPlan, shape: StepShape, began: float) -> PendingResult:
        clock = self._clock()
        batch, hidden, logits = self.forward.replay(shape, partial(self.forward.builder.build, plan))
        positions = self._positions(plan, batch, hidden)
        pending = self._sample(plan, self._passes(plan, hidden, logits), batch.sampled, [])
        pending.positions, pending.clock = positions, clock
        pending.seconds, pending.cuda_graph = time.perf_counter() - began, True
        if clock is not None:
            clock.mark()
        return pending

    def _finish_step(
        self, plan: StepPlan, batch: StepBatch, hidden: Tensor, sizes: StepSizes | None, began: float
    ) -> PendingResult:
        """Samples from hidden [T, D]."""
        prompts, positions = self._prompt_logprobs(plan, batch, hidden), self._positions(plan, batch, hidden)
        if not len(batch.sampled.rows):
            if self.speculation is not None:
                self.speculation.advance_plain(plan, batch.sampled, batch.input_ids[:0])
            if sizes is not None:
                self.sampler.passes.join(self._logits, hidden[:0], sizes)
            return PendingStep(plan.number, [], HostCopy([self._empty]), prompts=prompts, positions=positions)
        sampled_hidden = hidden if batch.all_sampled else hidden.index_select(0, batch.logits_rows)
        pending = self._sample(plan, self._passes(plan, sampled_hidden), batch.sampled, prompts)
        pending.seconds, pending.positions = time.perf_counter() - began, positions
        return pending

    def _positions(self, plan: StepPlan, batch: StepBatch, hidden: Tensor) -> PendingHidden | PendingExperts | None:
        wanted = self.rows.returns_positions
        if self.routed is not None:
            return self.routed.pending(plan, batch.offsets, wanted)
        return pending_hidden(plan, batch.offsets, wanted, hidden, self.stream) if wanted else None

    def _passes(self, plan: StepPlan, hidden: Tensor, logits: Tensor | None = None) -> Passes:
        """The passes over the logits of hidden [S, D]. A CUDA graph may have computed them already: logits [S, V]."""
        if logits is not None:
            computed, self.forward.doing, self._logits_ended = logits, "sampling", time.perf_counter()
            return lambda work: [work(slice(0, len(computed)), computed)]
        return partial(self.sampler.passes.over, self._logits, hidden, self.shared.sizes(plan))

    def _logits(self, hidden: Tensor, sizes: StepSizes | None = None) -> Tensor:
        """The LM head, hidden [S, D] -> [S, V] float32."""
        self.forward.doing = "computing logits"
        logits = self.model.logits(hidden, sizes)
        self.forward.doing, self._logits_ended = "sampling", time.perf_counter()
        return logits

    def _drafted_shape(self, plan: StepPlan) -> StepShape | None:
        """Shape of the graphs that run the step with its drafts; None: the step is not captured with them."""
        drafted = self.drafted
        if drafted is None or not (drafted.takes(plan) and self.forward.replays(plan) and self._all_follow(plan)):
            return None
        return drafted.graphs.shape_of(plan)

    def _all_follow(self, plan: StepPlan) -> bool:
        """Whether the drafter of every group with tokens covers the step, if it has to."""
        return self.speculation is None or not self.speculation.config.follows or self.shared.all_follow(plan)

    def _run_idle(self, plan: StepPlan) -> None:
        """A step with an idle batch: this rank's group has no requests, other groups may have requests."""
        if not self.shared.is_shared:
            return
        self.forward.doing = "drafting with an idle batch"
        sizes = self.shared.sizes(plan)
        assert sizes is not None
        drafted = self._drafted_shape(plan)
        if drafted is not None and (drafted.count > 1 or self.shared.follows(plan)) and self.drafted is not None:
            empty, logits = self.drafted.graphs.run_idle(drafted)
            if logits is None:
                self.sampler.passes.join(self._logits, empty, sizes)
            if self.shared.follows(plan):
                self.drafted.graphs.follow(drafted, self._empty)
            return
        self._draft_idle(plan)
        if sizes.is_idle:
            return
        shape = self.forward.graph_shape(plan)
        if shape is not None and self.forward.graphs is not None:
            empty, logits = self.forward.graphs.run(shape, None)
            if logits is None:
                self.sampler.passes.join(self._logits, empty, sizes)
            self._join_extend(plan)
            return
        hidden = self.forward.run_idle(plan, sizes)
        head = self.shared.prompt_head(self.model, plan)
        if head is not None:
            head.finish(hidden)
        self.sampler.passes.join(self._logits, hidden[:0], sizes)
        self._join_extend(plan)

    def _join_extend(self, plan: StepPlan) -> None:
        """Runs idle batches in the draft extends of other groups."""
        if self.speculation is not None and self.shared.follows(plan):
            self.speculation.drafter.join_extend()

    def _draft_idle(self, plan: StepPlan) -> None:
        """Runs idle batches in the draft forwards of other groups."""
        if self.speculation is not None:
            self.speculation.draft_idle(self.shared.draft_sizes(plan, self.speculation.drafter.forwards))

    def _launch_speculative(self, plan: StepPlan, speculation: Speculation) -> PendingSpeculation:
        """`_launch` of a plan with speculation: in one call, replayed with its drafts, or by `_verify`."""
        step = self.speculation
        if step is None:
            raise ValueError(f"plan {plan.number} speculates, but this worker has no drafter")
        began = time.perf_counter()
        self.forward.doing = "drafting"
        sizes = self.shared.sizes(plan)
        left_out: list[tuple[int, int]] = []
        if sizes is None:  # else the other ranks expect all tokens of the plan
            plan, left_out = step.without_ended(plan)
        step.reserve(speculation)
        if not plan.rows:
            return PendingSpeculation.empty(plan.number, left_out)
        verified = self._run_fused(step, plan, speculation) if sizes is None else None
        if verified is not None:
            draft_seconds, model_seconds, follow_seconds = verified.seconds.tolist()
            took = StepSeconds(time.perf_counter() - began, draft_seconds, follow_seconds, model_seconds)
            return PendingSpeculation.verified(plan, verified, took, left_out)
        drafted_shape = self._drafted_shape(plan)
        if drafted_shape is not None and self.drafted is not None:
            return self._launch_drafted(self.drafted, plan, drafted_shape, left_out)
        pending = self._verify(step, plan, speculation, sizes, began)
        pending.left_out = left_out
        if left_out or plan.masked:  # not the planned step, or waited for masks: would mislead the cost model
            pending.seconds = StepSeconds()
        return pending

    def _verify(
        self, step: SpeculativeStep, plan: StepPlan, speculation: Speculation, sizes: StepSizes | None, began: float
    ) -> PendingSpeculation:
        """A step with the parts of `SpeculativeStep`, its forward replayed or not."""
        verification = step.draft(plan, speculation, self.shared.draft_sizes(plan, step.drafter.forwards))
        taps = self.taps if speculation.follow else None
        drafted = time.perf_counter()
        if plan.masked:
            step.report_drafts(plan, verification)
        shape, prompts = self.forward.graph_shape(plan), []
        model_began, logits = drafted, None
        if shape is not None:
            batch, hidden, logits = self.forward.replay(shape, lambda _: step.verifications.build(plan, verification))
            forward = batch.forward_batch(None, self.kv_pool.layers, sizes)
        else:
            self.forward.doing = "building the batch"
            batch = step.verifications.build(plan, verification)
            forward = self.forward.prepare(batch, sizes, keep_images=speculation.follow)
            self.forward.doing, model_began = RUNNING, time.perf_counter()
            hidden = self.model.forward(forward) if taps is None else taps.during(self.model.forward, forward)
            if self.rows.states is not None:
                self.rows.states.save_ends(plan)
            prompts = self._prompt_logprobs(plan, batch, hidden)
        sampled_hidden = hidden if batch.all_sampled else hidden.index_select(0, batch.logits_rows)
        drawn = self.sampling.run(
            self._passes(plan, sampled_hidden, logits),
            batch.sampled,
            step.tree_text(batch, verification),
            step.drafts_below(batch.sampled, verification),
        )
        accepted, new = step.accept(drawn, batch.sampled, verification)
        step.advance(plan, verification, accepted, new)
        paths = [accepted.path] if drawn.logprobs else []  # nodes whose log-probabilities are reported
        copy = self.stream.download([accepted.tokens, accepted.counts, new, *paths])
        follow_began = time.perf_counter()
        if speculation.follow:
            self.forward.doing = "draft extend"
            seen = hidden if taps is None else taps.take()
            step.update_cache(plan, batch, forward, seen, verification, accepted)
        else:
            self._join_extend(plan)
        ended = time.perf_counter()
        plan_rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        model_seconds = self._logits_ended - model_began
        return PendingSpeculation(
            plan.number, plan_rows, copy,
            StepSeconds(ended - began, drafted - began, ended - follow_began, model_seconds),
            drawn.logprobs, verification.decodes.host_nodes, prompts,
            cuda_graph=shape is not None, errors=drawn.errors,
        )  # fmt: skip

    def _launch_drafted(
        self, drafted: DraftedStep, plan: StepPlan, shape: StepShape, left_out: list[tuple[int, int]]
    ) -> PendingSpeculation:
        """A step whose drafts are captured."""
        clock = self._clock()
        self.forward.doing = f"{RUNNING} (replayed with drafts for {shape.size} requests)"
        sampled, hidden, logits = drafted.verify(plan, shape, clock)
        self.forward.doing = "sampling"
        drawn = self.sampling.run(self._passes(plan, hidden, logits), sampled, below=drafted.drafts_below(shape))
        self.forward.doing = "draft extend"
        if clock is not None:
            clock.mark()
        copy, nodes = drafted.follow(shape, drawn)
        if clock is not None:
            clock.mark()
        return PendingSpeculation(
            plan.number, plan.rows, copy, StepSeconds(), drawn.logprobs, nodes, left_out=left_out, cuda_graph=True,
            errors=drawn.errors, clock=None if plan.masked else clock,
        )  # fmt: skip

    def _clock(self) -> StepClock | None:
        """Measures a captured step on the device, if the draft depth depends on the measured cost of steps."""
        step = self.speculation
        if step is None or not step.config.auto_depth or not self.stream.asynchronous:
            return None
        return StepClock(self.stream)

    def _run_fused_decode(self, plan: StepPlan) -> HostCopy | None:
        """The tokens of a step that runs in one call; None, without a step, if it cannot."""
        fused, model = self.fused, self.model
        if fused is None or not isinstance(model, Decoder | ExpertRecordingModel) or not fused.takes(plan):
            return None
        self.forward.doing = RUNNING
        tokens = model.fused_pass(partial(fused.run, plan))
        return None if tokens is None else HostCopy([tokens])

    def _run_fused(self, step: SpeculativeStep, plan: StepPlan, speculation: Speculation) -> VerifiedChains | None:
        run = partial(step.run_fused, plan, speculation)
        return self.model.fused_pass(run) if isinstance(self.model, ExpertRecordingModel) else run()

    def _sample(
        self, plan: StepPlan, passes: Passes, sampled: SampledRows, prompts: list[PendingPrompt]
    ) -> PendingStep:
        plan_rows = plan.rows if all(plan.samples) else [r for r, samples in zip(plan.rows, plan.samples) if samples]
        drawn = self.sampling.run(passes, sampled)
        self.forward.builder.kernels.keep(drawn.tokens, sampled.rows_device, self.rows.last_token)
        if self.speculation is not None:
            self.speculation.advance_plain(plan, sampled, drawn.tokens.clamp_min(0))
        copy = self.stream.download([drawn.tokens])
        return PendingStep(plan.number, plan_rows, copy, drawn.logprobs, prompts, errors=drawn.errors)

    def _prompt_logprobs(self, plan: StepPlan, batch: StepBatch, hidden: Tensor) -> list[PendingPrompt]:
        head = self.shared.prompt_head(self.model, plan)
        if not self.rows.prompt_logprobs and head is None:
            return []
        self.forward.doing = "computing prompt log-probabilities"
        logits_of = self.model.logits if head is None else head
        pending = []
        for i in range(plan.num_decodes, len(plan.rows)):
            wanted = self.rows.prompt_logprobs.get(plan.rows[i])
            if wanted is None:
                continue
            begin = int(batch.offsets[i])
            states = hidden[begin : begin + plan.counts[i]]
            found = prompt_logprobs(
                plan.rows[i],
                wanted,
                plan.starts[i],
                states,
                logits_of,
                self.sampler.passes.rows_at_once,
                self.rows.vocab_size,
                self.stream,
            )
            if found is not None:
                pending.append(found)
        if head is not None:
            head.finish(hidden)
        return pending
