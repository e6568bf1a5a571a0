"""CUDA graphs of whole steps with chains of drafts: the host launches a step without knowing the tokens that the last
one accepted.

A step is three graphs over fixed buffers: draft (the inputs of the step by the lengths on the device, then the drafts,
see `chain_drafters`), verify (the target's forward and logits), and, after sampling, follow (acceptance, the rows' new
tokens and lengths, the draft extend). Sampling stays between graphs: it depends on the requests. Padding, sharing of
memory and the choice of sizes are those of `step_graphs`.

Legend: R requests, S drafts of each, K = S + 1, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.speculation.protocol import ChainBuffers, SimulatedAcceptance, Thresholds
from moe_engine.kernels.speculation.trees import TreeBuffers
from moe_engine.models.batch import ForwardBatch, Model, PoolStarts
from moe_engine.types import StepPlan
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.row_adapters import RowAdapters
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.static_states import ChainStates
from moe_engine.worker.speculation.chain_drafters import ChainDrafter, ChainParts, StaticBatch, StaticTokens
from moe_engine.worker.speculation.tree_graphs import TreeDrafts, TreeParts, TreeRun
from moe_engine.worker.step_graphs import CapturedGraph, CaptureError, GraphBackend, StepOutputs
from moe_engine.worker.step_shape import StepShape, common_shape


@dataclass(frozen=True)
class DraftParts:
    """The parts from which the graphs of a rank are made.

    `plan_in_place` plans verification. `kv`, `states`: of the model. `drafts_of` makes the drafts of a size.
    `catch_up`: computes what captured drafts expect of rows, with the lower bounds of their lengths, or None. `trees`:
    drafts are trees, whose drafter `trees_of` makes. `adapters`: LoRA adapters of the rows, which verification reads.
    """

    model: Model
    chains: ChainParts
    drafts_of: Callable[[ChainBuffers], ChainDrafter]
    plan_in_place: InPlacePlanner
    kv: Sequence[Any]
    outputs: StepOutputs
    rule: SimulatedAcceptance | Thresholds | None = None
    catch_up: Callable[[np.ndarray, Sequence[int], int], None] | None = None
    states: StatePool | None = None
    trees: TreeParts | None = None
    trees_of: Callable[[ChainBuffers, TreeBuffers], TreeDrafts] | None = None
    adapters: RowAdapters | None = None

    def adapted(self, batch: ForwardBatch) -> ForwardBatch:
        """A captured verification that reads the adapters of its tokens."""
        captured = None if self.adapters is None else self.adapters.captured
        return batch if captured is None else replace(batch, adapters=captured.of(len(batch.input_ids)))


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a shape. `run` keeps the memory that the graphs read, and their plans."""

    draft: CapturedGraph
    verify: CapturedGraph
    follow: CapturedGraph
    run: ChainRun | TreeRun


class ChainRun:
    """The captured functions of a shape."""

    def __init__(self, parts: DraftParts, shape: StepShape) -> None:
        self._parts = parts
        self.verified = chain = parts.chains.memory.of(shape.size, shape.count - 1)
        self._drafts = parts.drafts_of(chain)
        tokens = StaticTokens.of(chain, chain.ids.flatten())
        self._batch = StaticBatch(parts.chains, chain, tokens, parts.kv, windows=parts.chains.windows)
        if chain.pool > 1:
            starts = PoolStarts(chain.places.flatten(), chain.pool_axes.flatten(0, 1))
            self._batch.forward = replace(self._batch.forward, pool_starts=starts)
        self._states = None if parts.states is None else ChainStates(parts.states, chain.rows, shape.count)
        if self._states is not None:
            self._batch.forward = replace(self._batch.forward, stored_states=self._states.runs)
        self._batch.forward = parts.adapted(self._batch.forward)

    @property
    def results(self) -> list[Tensor]:
        """Per request: new tokens and their number."""
        return [self.verified.result]

    def prepare(self) -> bool:
        """Plans all forwards again, for one capture; False if an attention backend plans on the host by exact
        lengths."""
        return self._batch.prepare(self._parts.plan_in_place) and self._drafts.prepare()

    def renew(self, lens: list[int]) -> None:
        """Renews the plans with upper bounds of the context tokens [R]. What a plan writes may serve all plans of its
        backend."""
        self._batch.renew(lens)
        self._drafts.renew(lens)

    def draft(self) -> None:
        self._parts.chains.kernels.inputs(self._parts.chains.tables, self.verified)
        self._drafts.draft()

    def verify(self) -> None:
        if self._states is not None:
            self._states.find()
        self._parts.outputs.run(self._batch.forward)

    def follow(self) -> None:
        parts, chain = self._parts, self.verified
        parts.chains.kernels.accept(parts.chains.tables, chain, parts.rule)
        if self._states is not None:
            self._states.keep(chain.result[:, -1])
        hidden, _ = parts.outputs.of(chain.ids.numel(), chain.ids.numel())
        self._drafts.follow(hidden, self._batch.forward)


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
        is_tree = self._parts.trees is not None and shape.count > 1
        run = TreeRun(self._parts, shape.size) if is_tree else ChainRun(self._parts, shape)
        if not run.prepare():
            return False
        for part in (run.draft, run.verify, run.follow):  # eager first: allocations, initialization of a first call
            part()
        run.prepare()
        try:
            draft, verify, follow = (self._backend.capture(part) for part in (run.draft, run.verify, run.follow))
        except RuntimeError as error:
            raise CaptureError(
                f"a step with {shape.count - 1} drafts of each of {shape.size} requests cannot be captured as a CUDA "
                f"graph: {error}; use --disable-cuda-graph to serve without CUDA graphs"
            ) from error
        self._graphs[shape] = _Graphs(draft, verify, follow, run)
        return True

    @property
    def shapes(self) -> set[StepShape]:
        """Captured shapes."""
        return set(self._graphs)

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """As `StepGraphs.shape_of`, for a step whose decodes have drafts in this or another attention group."""
        trees = self._parts.trees
        if trees is not None and plan.speculation is not None and plan.speculation.depth:
            return self._tree_shape(plan, trees.size.num_nodes)
        shape = common_shape(plan, self._settings)
        return shape if shape in self._graphs else None

    def _tree_shape(self, plan: StepPlan, nodes: int) -> StepShape | None:
        """Trees of full size in all rows; with a single attention group."""
        size = self._settings.size_for(len(plan.rows))
        even = plan.num_decodes == len(plan.rows) and all(count == nodes for count in plan.counts)
        shape = StepShape(size or 0, nodes)
        return shape if even and shape in self._graphs else None

    # -- a step: catch up, draft, verify, then follow with what was sampled

    def catch_up(self, shape: StepShape, rows: np.ndarray, starts: Sequence[int]) -> None:
        """Before `draft`, with lower bounds of the rows' lengths; no host wait."""
        if self._parts.catch_up is not None:
            self._parts.catch_up(rows, starts, shape.count - 1)

    def draft(self, shape: StepShape, rows: np.ndarray | None, most: list[int]) -> ChainBuffers | TreeBuffers:
        """Launches the drafts of rows [D] (an array that is never modified; None: padding only).

        Args:
            most: upper bounds of the context tokens of each row, this step's included.
        """
        graphs, adapters = self._graphs[shape], self._parts.adapters
        self._parts.chains.memory.fill(rows)
        if adapters is not None and adapters.captured is not None:
            adapters.captured.fill(None if rows is None else adapters.of(rows.repeat(shape.count)))
        graphs.run.renew(most + [shape.count] * (shape.size - len(most)))
        graphs.draft.replay()
        return graphs.run.verified

    def verify(self, shape: StepShape, num_requests: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states [t, D] and logits [t, V] of the requests' tokens, as `StepGraphs.run`."""
        self._graphs[shape].verify.replay()
        return self._parts.outputs.of(shape.num_tokens, num_requests * shape.count)

    def ids_of(self, shape: StepShape) -> Tensor:
        """Last tokens and drafts [R, K] of the last step."""
        return self._graphs[shape].run.verified.ids

    def follow(self, shape: StepShape, sampled: Tensor, chances: Tensor | None = None) -> list[Tensor]:
        """Accepts by the tokens sampled [D * K], with thresholds also by the chances of the drafts after them
        [D * K, 1]: results [D, K + 1], see `ChainBuffers.result`, of trees also their `path`; valid until the next
        step."""
        graphs = self._graphs[shape]
        verified = graphs.run.verified
        if chances is not None:
            assert isinstance(verified, ChainBuffers)
            verified.chances.view(-1)[: len(chances)].copy_(chances[:, 0])
        verified.sampled.view(-1)[: len(sampled)].copy_(sampled)
        graphs.follow.replay()
        return [result[: len(sampled) // shape.count] for result in graphs.run.results]

    def run_idle(self, shape: StepShape) -> tuple[Tensor, Tensor | None]:
        """Takes part in a step of other attention groups: as `StepGraphs.run` without a batch."""
        self.draft(shape, None, [])
        return self.verify(shape, 0)
