"""CUDA graphs of whole steps with chains of drafts: the host launches a step without knowing the tokens that the last
one accepted.

A step is three graphs over fixed buffers: draft (the inputs of the step by the lengths on the device, then the drafts,
see `chain_drafters`), verify (the target's forward and logits), and, behind sampling, follow (acceptance, the rows' new
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
from moe_engine.models.batch import Model
from moe_engine.step_settings import GraphSettings
from moe_engine.types import StepPlan
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.static_states import ChainStates
from moe_engine.worker.speculation.chain_drafters import ChainDrafter, ChainParts, StaticBatch
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

    `plan_in_place` plans verification. `kv`, `states`: of the model. `drafts_of` makes the drafts of a size.
    `catch_up`: computes what captured drafts expect of rows, with the lower bounds of their lengths, or None.
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


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a shape. `run` keeps the memory that the graphs read, and their plans."""

    draft: CapturedGraph
    verify: CapturedGraph
    follow: CapturedGraph
    run: _ShapeRun


class _ShapeRun:
    """The captured functions of a shape."""

    def __init__(self, parts: DraftParts, shape: StepShape) -> None:
        self._parts = parts
        self.chain = chain = parts.chains.memory.of(shape.size, shape.count - 1)
        self._drafts = parts.drafts_of(chain)
        flat = chain.positions.flatten(), chain.slots.flatten(), chain.lens, chain.real.flatten()
        self._verified = StaticBatch(parts.chains, chain, shape.count, *flat, parts.kv, chain.ids.flatten())
        self._states = None if parts.states is None else ChainStates(parts.states, chain.rows, shape.count)
        if self._states is not None:
            self._verified.forward = replace(self._verified.forward, stored_states=self._states.runs)

    def prepare(self) -> bool:
        """Plans all forwards anew, for one capture; False if an attention backend plans on the host by exact
        lengths."""
        return self._verified.prepare(self._parts.plan_in_place) and self._drafts.prepare()

    def renew(self, lens: list[int]) -> None:
        """Renews the plans with upper bounds of the context tokens [R]. What a plan writes may serve all plans of its
        backend."""
        self._verified.renew(lens)
        self._drafts.renew(lens)

    def draft(self) -> None:
        self._parts.chains.kernels.inputs(self._parts.chains.tables, self.chain)
        self._drafts.draft()

    def verify(self) -> None:
        if self._states is not None:
            self._states.find()
        self._parts.outputs.run(self._verified.forward)

    def follow(self) -> None:
        parts, chain = self._parts, self.chain
        parts.chains.kernels.accept(parts.chains.tables, chain, parts.rule)
        if self._states is not None:
            self._states.keep(chain.result[:, -1])
        hidden, _ = parts.outputs.of(chain.ids.numel(), chain.ids.numel())
        self._drafts.follow(hidden, self._verified.forward)


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
        if not run.prepare():
            return False
        for part in (run.draft, run.verify, run.follow):  # eager first: allocations, initialization of a first call
            part()
        run.prepare()
        try:
            draft, verify, follow = (self._backend.capture(part) for part in (run.draft, run.verify, run.follow))
        except RuntimeError as error:
            raise CaptureError(
                f"a step with chains of {shape.count - 1} drafts of {shape.size} requests cannot be captured as a CUDA "
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
        shape = common_shape(plan, self._settings)
        return shape if shape in self._graphs else None

    # -- a step: catch up, draft, verify, then follow with what was sampled

    def catch_up(self, shape: StepShape, rows: np.ndarray, starts: Sequence[int]) -> None:
        """Before `draft`, with lower bounds of the rows' lengths; no host wait."""
        if self._parts.catch_up is not None:
            self._parts.catch_up(rows, starts, shape.count - 1)

    def draft(self, shape: StepShape, rows: np.ndarray | None, most: list[int]) -> ChainBuffers:
        """Launches the drafts of rows [D] (an array that is never modified; None: padding only).

        Args:
            most: upper bounds of the context tokens of each row, this step's included.
        """
        graphs = self._graphs[shape]
        self._parts.chains.memory.fill(rows)
        graphs.run.renew(most + [shape.count] * (shape.size - len(most)))
        graphs.draft.replay()
        return graphs.run.chain

    def verify(self, shape: StepShape, num_requests: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states [t, D] and logits [t, V] of the requests' tokens, as `StepGraphs.run`."""
        self._graphs[shape].verify.replay()
        return self._parts.outputs.of(shape.num_tokens, num_requests * shape.count)

    def ids_of(self, shape: StepShape) -> Tensor:
        """Last tokens and drafts [R, K] of the last step."""
        return self._graphs[shape].run.chain.ids

    def follow(self, shape: StepShape, sampled: Tensor, chances: Tensor | None = None) -> Tensor:
        """Accepts by the tokens sampled [D * K], with thresholds also by the chances of the drafts behind them
        [D * K, 1]: results [D, K + 1], see `ChainBuffers.result`, valid until the next step."""
        graphs = self._graphs[shape]
        if chances is not None:
            graphs.run.chain.chances.view(-1)[: len(chances)].copy_(chances[:, 0])
        graphs.run.chain.sampled.view(-1)[: len(sampled)].copy_(sampled)
        graphs.follow.replay()
        return graphs.run.chain.result[: len(sampled) // shape.count]

    def run_idle(self, shape: StepShape) -> tuple[Tensor, Tensor | None]:
        """Takes part in a step of other attention groups: as `StepGraphs.run` without a batch."""
        self.draft(shape, None, [])
        return self.verify(shape, 0)
