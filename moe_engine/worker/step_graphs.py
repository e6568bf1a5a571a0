"""CUDA graphs of decode steps: captured before the first request and replayed, one launch instead of one per kernel.

A graph serves steps of `size` requests with `count` tokens each (several tokens to verify drafts). It reads static
input buffers, to which a step's tensors are copied, and writes hidden states and logits to static output buffers (only
hidden states if the logits would be too large at once). Smaller batches are padded: a padded token writes to slot 0,
whose page no request owns, a padded request attends to the first slots of row 0 and has the state of no request, and
their results are not read. All graphs share the buffers and one memory pool, so the largest is captured first.

Legend: T tokens, R requests, D hidden, V vocabulary; maxima over all graphs unless stated otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from moe_engine.errors import MoeEngineError
from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.bar_output import BarOutput
from moe_engine.models.batch import ForwardBatch, Model, WindowSlots
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import StepPlan
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.captured_groups import AttentionWindows, GroupPlans
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.static_inputs import StaticInputs
from moe_engine.worker.step_shape import StepShape, common_shape

logger = logging.getLogger("moe_engine")


class CaptureError(MoeEngineError):
    """A step could not be captured. The cause is chained."""


class CapturedGraph(Protocol):
    """Captured kernel launches; they read and write the memory of the capture."""

    def replay(self) -> None:
        """Launches the graph on the calling thread's stream."""


class GraphBackend(Protocol):
    """Captures kernel launches of a device."""

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """Captures the launches of `run` without executing them. Memory that `run` allocates belongs to the graphs."""


class DraftCapture(Protocol):
    """Implemented by `draft_graphs.DraftGraphs`."""

    def capture(self, shape: StepShape) -> bool:
        """False if the step cannot be captured."""


@dataclass(frozen=True)
class _GraphEntry:
    """A graph, its static queries, its attention plans, which must be renewed before each replay, and its runs of
    states, whose memory the graph reads."""

    launches: CapturedGraph
    queries: PagedQueries
    plan: GroupPlans
    states: StateRuns | None


class StepOutputs:
    """The static output buffers. The largest step stores first, before any capture.

    Args:
        max_logits: max rows of logits at once; steps with more tokens are captured without the LM head.
        half: logits are kept in the dtype of hidden states, to which the head rounds them.
        hidden: hidden states are kept beside logits.
        taps: the model's; every step stores their states too.
    """

    def __init__(
        self, model: Model, max_logits: int, taps: HiddenTaps | None = None, half: bool = False, hidden: bool = True
    ) -> None:
        self._model = model
        self._half = half
        self._beside_logits = hidden
        self._max_logits = max_logits
        self._taps = taps
        self._tapped: Tensor | None = None  # [T, K * D]
        self._hidden: Tensor | None = None  # [T, D]; [0, D] if no step keeps them
        self._logits: Tensor | None = None  # [T, V]

    def run(self, batch: ForwardBatch) -> None:
        """A forward of the model, with its results stored."""
        taps, forward = self._taps, self._model.forward
        self._store(forward(batch) if taps is None else taps.during(forward, batch), batch.sizes)
        if taps is not None:
            states = taps.take()
            if self._tapped is None:
                self._tapped = torch.empty_like(states)
            self._tapped[: len(states)].copy_(states)

    def _store(self, hidden: Tensor, sizes: StepSizes | None) -> None:
        """Copies hidden [T, D] out of the memory pool, which the next graph overwrites; logits are computed outside."""
        kept = self._kept(len(hidden))
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden[:kept])
        if kept:
            self._hidden[:kept].copy_(hidden)
        if len(hidden) > self._max_logits:
            return
        if self._logits is None:
            logits = self._model.logits(hidden, sizes)
            self._logits = torch.empty_like(logits, dtype=hidden.dtype if self._half else None).copy_(logits)
        else:
            self._model.logits(hidden, sizes, self._logits[: len(hidden)])

    def _kept(self, captured: int) -> int:
        """Hidden states that a step of `captured` tokens keeps."""
        return captured if self._beside_logits or captured > self._max_logits else 0

    @property
    def half_logits(self) -> Tensor | None:
        """Logits [T, V] in 16 bits; None: they are float32, or there are none."""
        return self._logits if self._half else None

    def of(self, captured: int, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states [t, D], [0, D] if they are not kept, and logits [t, V] of the first tokens of a step captured
        for `captured` tokens; logits are None if the graph has no LM head. The taps get the tokens' states."""
        assert self._hidden is not None
        if self._taps is not None and self._tapped is not None:
            self._taps.put(self._tapped[:num_tokens])
        hidden = self._hidden[: min(num_tokens, self._kept(captured))]
        if captured > self._max_logits:
            return hidden, None
        assert self._logits is not None
        return hidden, self._logits[:num_tokens]


class StepGraphs:
    """The CUDA graphs of one rank.

    Args:
        model: its `forward` and `logits` are captured; all ranks capture and replay the same shapes.
        outputs: shared by all graphs.
    """

    def __init__(
        self,
        settings: GraphSettings,
        model: Model,
        plan_in_place: InPlacePlanner,
        kv_pool: KVPool,
        rows: RequestRows,
        shared: DPSteps,
        stream: DeviceStream,
        backend: GraphBackend,
        outputs: StepOutputs,
        windows: AttentionWindows,
    ) -> None:
        self._settings = settings
        self._model = model
        self._plan_in_place = plan_in_place
        self._kv_pool = kv_pool
        self._rows = rows
        self._shared = shared
        self._stream = stream
        self._backend = backend
        self._outputs = outputs
        self._windows = windows
        pools = rows.images is not None and rows.images.pool > 1
        self.inputs = StaticInputs(settings, stream, windows.table is not None, rows.states, pools)
        self._adapters = None if rows.adapters is None else rows.adapters.capture(settings.max_tokens)
        self._graphs: dict[StepShape, _GraphEntry] = {}

    # -- before READY

    def capture(self, drafted: DraftCapture | None = None, *, progress: bool = False) -> bool:
        """Captures every size; False if the attention backend does not support it. Runs the model.

        Args:
            drafted: captures steps with drafts whole. Sizes that it captures need no graph of verification alone.
            progress: show a progress bar on stderr.

        Raises:
            CaptureError: the device cannot capture a step.
        """
        settings, began = self._settings, time.perf_counter()
        free = self._stream.free_bytes()
        shapes = [StepShape(size, count) for size in settings.sizes for count in settings.counts]
        shapes.sort(key=lambda shape: -shape.num_tokens)
        with (
            torch.inference_mode(),
            tqdm(shapes, "Capturing batches", unit="graph", disable=not progress, file=BarOutput()) as bar,
        ):
            for shape in bar:
                bar.set_postfix_str(f"bs={shape.size}, tokens={shape.num_tokens}")
                whole = drafted is not None and drafted.capture(shape)
                if (whole or settings.trees) and shape.count > 1:  # without a plan for a tree its steps stay eager
                    continue
                if not self._capture(shape):
                    return False
        self._stream.synchronize()
        elapsed, left = time.perf_counter() - began, self._stream.free_bytes()
        logger.info(
            "Capture cuda graph end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
            elapsed,
            max(0, free - left) / 2**30,
            left / 2**30,
        )
        return True

    def _capture(self, shape: StepShape) -> bool:
        batch = self._static_batch(shape)
        plan = self._plan(batch)
        if plan is None:
            return False
        self._run(plan.planned(batch))  # eager first: allocations and initialization of a first call
        plan = self._plan(batch)
        queries = batch.attention.decode
        assert plan is not None and queries is not None
        try:
            launches = self._backend.capture(partial(self._run, plan.planned(batch)))
        except RuntimeError as error:
            raise CaptureError(
                f"a decode step of {shape.size} requests cannot be captured as a CUDA graph: {error}; "
                "use --disable-cuda-graph to serve without CUDA graphs"
            ) from error
        self._graphs[shape] = _GraphEntry(launches, queries, plan, batch.stored_states)
        return True

    def _plan(self, batch: ForwardBatch) -> GroupPlans | None:
        return GroupPlans.of(batch.attention, self._plan_in_place, self._windows, self._rows.slot_table)

    def _static_batch(self, shape: StepShape) -> ForwardBatch:
        """A step over the static buffers."""
        windows, inputs, size, count, tokens = self._windows, self.inputs, shape.size, shape.count, shape.num_tokens
        starts = torch.arange(0, tokens + 1, count, dtype=torch.int32)
        queries = PagedQueries(
            query_lens=[count] * size,
            context_lens=[inputs.neutral_context] * size,
            rows=inputs.rows[:size],
            query_starts=self._stream.upload(starts),
            context_lens_device=inputs.context_lens[:size],
            slot_table=windows.table_of(windows.first, self._rows.slot_table),
            page_size=self._kv_pool.page_size,
            window=windows.first,
        )
        return ForwardBatch(
            input_ids=inputs.input_ids[:tokens],
            positions=inputs.positions[:tokens],
            slots=inputs.slots[:tokens],
            logits_rows=torch.arange(tokens, device=self._stream.device),
            attention=AttentionBatch(queries, None),
            attention_plan=None,
            kv=self._kv_pool.layers,
            sizes=self._shared.even_sizes(tokens),
            windows=None if windows.table is None else WindowSlots(inputs.window_slots[:tokens], windows.table),
            real=inputs.real[:tokens],
            stored_states=None if inputs.states is None else inputs.states.runs(size, count),
            pool_starts=inputs.pool_starts(tokens),
            adapters=None if self._adapters is None else self._adapters.of(tokens),
        )

    def _run(self, batch: ForwardBatch) -> None:
        """The captured function."""
        self._outputs.run(batch)

    @property
    def shapes(self) -> set[StepShape]:
        """Captured shapes."""
        return set(self._graphs)

    # -- steps

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """The graph for a step; None if it runs kernel by kernel.

        Depends only on facts known to all ranks, so all ranks choose the same graph: with several attention groups that
        of the largest group.
        """
        shape = common_shape(plan, self._settings)
        return shape if shape in self._graphs else None

    def run(self, shape: StepShape, batch: StepBatch | None) -> tuple[Tensor, Tensor | None]:
        """Replays a graph: hidden states [t, D] and logits [t, V] of the step's t tokens, valid until the next replay.
        Logits are None if the graph has no LM head; all ranks run the head then.

        Args:
            batch: of the plan passed to `shape_of`; None for an idle batch.
        """
        entry, inputs = self._graphs[shape], self.inputs
        inputs.fill(batch)
        if self._adapters is not None:
            self._adapters.fill(None if batch is None else batch.adapters)
        own = batch.attention.decode if batch is not None else None
        lens = own.context_lens if own is not None else []
        entry.queries.context_lens[:] = lens + [inputs.neutral_context] * (shape.size - len(lens))
        entry.plan.renew()
        entry.launches.replay()
        return self._outputs.of(shape.num_tokens, own.num_tokens if own is not None else 0)
