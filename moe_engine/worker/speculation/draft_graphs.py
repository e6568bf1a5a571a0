"""CUDA graphs of whole steps with chains of drafts: the host launches a step without knowing the tokens that the last
one accepted.

A step is three graphs over fixed buffers: draft (the inputs of the step by the lengths on the device, then the draft
forwards), verify (the target's forward and logits), and, behind sampling, follow (acceptance, the rows' new tokens and
lengths, the draft extend). Sampling stays between graphs: it depends on the requests. Padding, sharing of memory and
the choice of sizes are those of `step_graphs`.

Legend: R requests, S drafts of each, K = S + 1, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner, RenewablePlan
from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.speculation.protocol import ChainBuffers, ChainKernels, SimulatedAcceptance
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.step_settings import GraphSettings
from moe_engine.types import StepPlan
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.speculation.chain_memory import ChainMemory
from moe_engine.worker.speculation.mtp import MTPDrafter
from moe_engine.worker.step_graphs import (
    CapturedGraph,
    CaptureError,
    GraphBackend,
    StepOutputs,
    StepShape,
    common_shape,
)


@dataclass(frozen=True)
class DraftParts:
    """The parts from which the graphs of a rank are made.

    `tables`: of all rows, on the device. `plan_drafts` plans the draft forwards, `plan_in_place` verification: an EAGLE
    head has an attention backend of its own. `taps`: the model's, if the head reads them.
    """

    model: Model
    drafter: MTPDrafter
    kernels: ChainKernels
    tables: RowTables
    memory: ChainMemory
    plan_in_place: InPlacePlanner
    plan_drafts: InPlacePlanner
    page_size: int
    shared: DPSteps
    passes: LogitsPasses
    outputs: StepOutputs
    stream: DeviceStream
    simulated: SimulatedAcceptance | None = None
    taps: HiddenTaps | None = None


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a shape, with the plan of verification. `run` keeps the memory that the graphs read."""

    draft: CapturedGraph
    verify: CapturedGraph
    follow: CapturedGraph
    run: _ShapeRun
    plan: RenewablePlan


class _ShapeRun:
    """The captured functions of a shape."""

    def __init__(self, parts: DraftParts, shape: StepShape) -> None:
        self._parts = parts
        self.chain = chain = parts.memory.of(shape.size, shape.count - 1)
        self._parameters = parts.memory.parameters(shape.size)
        starts = torch.arange(0, shape.num_tokens + 1, shape.count, dtype=torch.int32)
        ones = torch.arange(shape.size + 1, dtype=torch.int32)
        self._one_each, self._all_starts = parts.stream.upload(ones), parts.stream.upload(starts)
        self._drafts = [
            self._batch(1, chain.draft_positions[s], chain.draft_slots[s], chain.draft_lens[s], chain.draft_real)
            for s in range(chain.num_drafts)
        ]
        self._own_plan: RenewablePlan | None = None
        flat = chain.positions.flatten(), chain.slots.flatten(), chain.lens, chain.real.flatten()
        self._verified = replace(self._batch(shape.count, *flat), input_ids=chain.ids.flatten())

    def _batch(self, count: int, positions: Tensor, slots: Tensor, lens: Tensor, real: Tensor) -> ForwardBatch:
        parts, size = self._parts, len(lens)
        queries = PagedQueries(
            query_lens=[count] * size,
            context_lens=[count] * size,
            rows=self.chain.query_rows,
            query_starts=self._one_each if count == 1 else self._all_starts,
            context_lens_device=lens,
            slot_table=parts.tables.slots,
            page_size=parts.page_size,
        )
        return ForwardBatch(
            input_ids=positions[:0], positions=positions, slots=slots, logits_rows=positions[:0],
            attention=AttentionBatch(queries, None), attention_plan=None, kv=parts.drafter.kv,
            sizes=parts.shared.even_sizes(len(positions)), real=real,
        )  # fmt: skip

    def plan(self) -> RenewablePlan | None:
        """Plans all forwards anew, for one capture: the plan of verification; None if the attention backend plans on
        the host by exact lengths."""
        drafts = [self._parts.plan_drafts(batch.attention) for batch in self._drafts]
        plan = self._parts.plan_in_place(self._verified.attention)
        if plan is None or not all(some is not None and some.on_device for some in (*drafts, plan)):
            return None
        self._drafts = [replace(batch, attention_plan=some) for batch, some in zip(self._drafts, drafts)]
        self._verified = replace(self._verified, attention_plan=plan)
        own = self._parts.plan_drafts is not self._parts.plan_in_place and bool(drafts)
        self._own_plan = drafts[0] if own else None
        return plan

    def renew(self, plan: RenewablePlan, lens: list[int]) -> None:
        """Renews the plans with upper bounds of the context tokens [R]. The values written by a plan serve all plans of
        its backend: one plan of a head's own backend is enough for all drafts."""
        self.queries.context_lens[:] = lens
        plan.renew()
        if self._own_plan is not None:
            queries = self._drafts[0].attention.decode
            assert queries is not None
            queries.context_lens[:] = lens
            self._own_plan.renew()

    @property
    def queries(self) -> PagedQueries:
        queries = self._verified.attention.decode
        assert queries is not None
        return queries

    def draft(self) -> None:
        parts, chain = self._parts, self.chain
        parts.kernels.inputs(parts.tables, chain)
        state = parts.tables.states.index_select(0, chain.query_rows) if self._drafts else None
        for step, batch in enumerate(self._drafts):
            assert state is not None
            state = parts.drafter.layers.forward(0, chain.draft_ids[step], state, batch)
            drafts, ids = chain.draft_ids[step + 1], parts.drafter.layers.ids
            torch.clamp_min(self._drawn(state, step, batch), 0, out=drafts)
            if ids is not None:
                drafts.copy_(ids.index_select(0, drafts))
        if self._drafts:
            chain.ids[:, 1:].copy_(chain.draft_ids[1:].t())

    def _drawn(self, state: Tensor, step: int, batch: ForwardBatch) -> Tensor:
        """Drafts [R] of states [R, D]."""
        parts, uniform = self._parts, self.chain.draft_uniform[step]

        def work(rows: slice, logits: Tensor) -> Tensor:
            return parts.kernels.draw(logits, self._parameters.part(rows), uniform[rows])

        drawn = parts.passes.over(parts.drafter.layers.logits, state, batch.sizes, work)
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def verify(self) -> None:
        self._parts.outputs.run(self._verified)

    def follow(self) -> None:
        parts, chain = self._parts, self.chain
        parts.kernels.accept(parts.tables, chain, parts.simulated)
        hidden, _ = parts.outputs.of(chain.ids.numel(), chain.ids.numel())
        hidden = parts.drafter.layers.prepare(hidden if parts.taps is None else parts.taps.take())
        parts.kernels.keep_states(parts.tables.states, hidden, chain)
        parts.drafter.layers.remember(0, chain.next_ids.flatten(), hidden, self._verified)


class DraftGraphs:
    """The graphs of one rank."""

    def __init__(self, settings: GraphSettings, parts: DraftParts, backend: GraphBackend) -> None:
        self._settings = settings
        self._parts = parts
        self._backend = backend
        self._graphs: dict[StepShape, _Graphs] = {}

    def capture(self, shape: StepShape) -> bool:
        """Captures a size; False, without a capture, if the attention backend plans on the host by exact lengths.

        Raises:
            CaptureError: the device cannot capture the step.
        """
        run = _ShapeRun(self._parts, shape)
        if run.plan() is None:
            return False
        for part in (run.draft, run.verify, run.follow):  # eager first: allocations, initialization of a first call
            part()
        plan = run.plan()
        assert plan is not None
        try:
            draft, verify, follow = (self._backend.capture(part) for part in (run.draft, run.verify, run.follow))
        except RuntimeError as error:
            raise CaptureError(
                f"a step with chains of {shape.count - 1} drafts of {shape.size} requests cannot be captured as a CUDA "
                f"graph: {error}; use --disable-cuda-graph to serve without CUDA graphs"
            ) from error
        self._graphs[shape] = _Graphs(draft, verify, follow, run, plan)
        return True

    @property
    def shapes(self) -> set[StepShape]:
        """Captured shapes."""
        return set(self._graphs)

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """As `StepGraphs.shape_of`, for a step whose decodes have drafts in this or another attention group."""
        shape = common_shape(plan, self._settings)
        return shape if shape in self._graphs else None

    # -- a step: draft, verify, then follow with the sampled tokens

    def draft(self, shape: StepShape, rows: np.ndarray | None, most: list[int]) -> ChainBuffers:
        """Launches the drafts of rows [D] (an array that is never modified; None: padding only).

        Args:
            most: upper bounds of the context tokens of each row, this step's included.
        """
        graphs = self._graphs[shape]
        self._parts.memory.fill(rows)
        graphs.run.renew(graphs.plan, most + [shape.count] * (shape.size - len(most)))
        graphs.draft.replay()
        return graphs.run.chain

    def verify(self, shape: StepShape, num_requests: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states [t, D] and logits [t, V] of the requests' tokens, as `StepGraphs.run`."""
        self._graphs[shape].verify.replay()
        return self._parts.outputs.of(shape.num_tokens, num_requests * shape.count)

    def follow(self, shape: StepShape, sampled: Tensor) -> Tensor:
        """Accepts by the tokens sampled [D * K]: results [D, K + 1], see `ChainBuffers.result`, valid until the next
        step."""
        graphs = self._graphs[shape]
        graphs.run.chain.sampled.view(-1)[: len(sampled)].copy_(sampled)
        graphs.follow.replay()
        return graphs.run.chain.result[: len(sampled) // shape.count]

    def run_idle(self, shape: StepShape) -> tuple[Tensor, Tensor | None]:
        """Takes part in a step of other attention groups: as `StepGraphs.run` without a batch."""
        self.draft(shape, None, [])
        return self.verify(shape, 0)
