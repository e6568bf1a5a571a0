"""Decode steps that are recorded before the first request and replayed: one launch instead of one for each kernel.

A recording serves steps of `size` requests with `count` tokens each, several where drafts are verified. It reads static
buffers that a step's own tensors are copied to, and leaves hidden states and logits in two more (a step whose logits
would be too large at once leaves hidden states alone). Fewer requests are padded: a padded token goes to slot 0, whose
page no request owns, a padded request sees the first slots of row 0, and no result of theirs is read. All recordings
share the buffers and one memory pool, so the largest is made first.

Legend: T tokens, R requests, D hidden, V vocabulary; most of any recording unless said otherwise.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from moe_engine.errors import MoeEngineError
from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries, RenewablePlan, Replayable
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import GraphSettings, StepFacts, StepPlan
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool

logger = logging.getLogger("moe_engine")


class CaptureError(MoeEngineError):
    """A step could not be recorded. The cause is chained."""


class Recording(Protocol):
    """Launches that were recorded; they read and write the memory that they were recorded with."""

    def replay(self) -> None:
        """Launches all of it on the calling thread's stream."""


class GraphBackend(Protocol):
    """What records launches of a device."""

    def capture(self, run: Callable[[], None]) -> Recording:
        """Records what `run` launches, without running it. Memory that it takes stays the recordings' own."""


@dataclass(frozen=True)
class StepShape:
    """A recording: so many requests, with so many tokens each."""

    size: int
    count: int

    @property
    def num_tokens(self) -> int:
        return self.size * self.count


@dataclass(frozen=True)
class _Recorded:
    """A recording, the queries it reads, and the plan that must be renewed for them before it is replayed."""

    launches: Recording
    queries: PagedQueries
    plan: RenewablePlan


class _Inputs:
    """The static buffers that recordings read. Behind the requests of a step all is neutral."""

    def __init__(self, settings: GraphSettings, stream: DeviceStream) -> None:
        tokens, requests, device = settings.max_tokens, max(settings.sizes), stream.device
        self.neutral_context = max(settings.counts)
        """Tokens that a padded request sees: as many as it computes at most."""
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.rows = torch.zeros(requests, dtype=torch.int32, device=device)  # [R]
        self.context_lens = torch.full((requests,), self.neutral_context, dtype=torch.int32, device=device)  # [R]
        self._used = (0, 0)  # requests and tokens of the step before

    def fill(self, batch: StepBatch | None) -> None:
        """A step's tensors go in; None: all is neutral."""
        num_tokens = num_requests = 0
        queries = batch.attention.decode if batch is not None else None
        if batch is not None and queries is not None:
            num_tokens, num_requests = queries.num_tokens, queries.num_requests
        used_requests, used_tokens = self._used
        self._used = (max(used_requests, num_requests), max(used_tokens, num_tokens))  # should a copy raise
        if batch is not None and queries is not None:
            self.input_ids[:num_tokens].copy_(batch.input_ids)
            self.positions[:num_tokens].copy_(batch.positions)
            self.slots[:num_tokens].copy_(batch.slots)
            self.rows[:num_requests].copy_(queries.rows)
            self.context_lens[:num_requests].copy_(queries.context_lens_device)
        if used_tokens > num_tokens:
            for buffer in (self.input_ids, self.positions, self.slots):
                buffer[num_tokens:used_tokens].zero_()
        if used_requests > num_requests:
            self.rows[num_requests:used_requests].zero_()
            self.context_lens[num_requests:used_requests].fill_(self.neutral_context)
        self._used = (num_requests, num_tokens)


class StepGraphs:
    """The recordings of one rank.

    Args:
        model: its `forward` and `logits` are recorded; on many ranks all of them record and replay alike.
        max_logits: most rows of logits at once; steps with more tokens are recorded without the head.
    """

    def __init__(
        self,
        settings: GraphSettings,
        model: Model,
        attention: Replayable,
        kv_pool: KVPool,
        rows: RequestRows,
        shared: DPSteps,
        stream: DeviceStream,
        backend: GraphBackend,
        max_logits: int = 1 << 30,
    ) -> None:
        self._settings = settings
        self._model = model
        self._attention = attention
        self._kv_pool = kv_pool
        self._rows = rows
        self._shared = shared
        self._stream = stream
        self._backend = backend
        self._max_logits = max_logits
        self._inputs = _Inputs(settings, stream)
        self._hidden: Tensor | None = None  # [T, D]
        self._logits: Tensor | None = None  # [T, V] float32
        self._recorded: dict[StepShape, _Recorded] = {}

    # -- before READY

    def capture(self, *, progress: bool = False) -> bool:
        """Records every size; False where the attention backend has no plan for that. Runs the model.

        Args:
            progress: show a bar on stderr.

        Raises:
            CaptureError: the device refuses to record one.
        """
        settings, began = self._settings, time.perf_counter()
        free = self._stream.free_bytes()
        shapes = [StepShape(size, count) for size in settings.sizes for count in settings.counts]
        shapes.sort(key=lambda shape: -shape.num_tokens)
        with (
            torch.inference_mode(),
            tqdm(shapes, "Capturing batches", unit="graph", disable=not progress, file=sys.stderr) as bar,
        ):
            for shape in bar:
                bar.set_postfix_str(f"bs={shape.size}, tokens={shape.num_tokens}")
                if not self._capture(shape):
                    return False
        self._stream.synchronize()
        logger.info(
            "Capture cuda graph end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
            time.perf_counter() - began,
            max(0, free - self._stream.free_bytes()) / 2**30,
            self._stream.free_bytes() / 2**30,
        )
        return True

    def _capture(self, shape: StepShape) -> bool:
        batch = self._static_batch(shape)
        plan = self._attention.plan_in_place(batch.attention)
        if plan is None:
            return False
        self._run(replace(batch, attention_plan=plan))  # once as it is: makes what is made at the first call
        plan = self._attention.plan_in_place(batch.attention)
        queries = batch.attention.decode
        assert plan is not None and queries is not None
        try:
            launches = self._backend.capture(lambda: self._run(replace(batch, attention_plan=plan)))
        except RuntimeError as error:
            raise CaptureError(
                f"a decode step of {shape.size} requests cannot be recorded as a CUDA graph: {error}; "
                "--disable-cuda-graph serves without"
            ) from error
        self._recorded[shape] = _Recorded(launches, queries, plan)
        return True

    def _static_batch(self, shape: StepShape) -> ForwardBatch:
        """A step over the static buffers."""
        inputs, size, count, tokens = self._inputs, shape.size, shape.count, shape.num_tokens
        starts = torch.arange(0, tokens + 1, count, dtype=torch.int32)
        queries = PagedQueries(
            query_lens=[count] * size,
            context_lens=[inputs.neutral_context] * size,
            rows=inputs.rows[:size],
            query_starts=self._stream.upload(starts),
            context_lens_device=inputs.context_lens[:size],
            slot_table=self._rows.slot_table,
            page_size=self._kv_pool.page_size,
        )
        return ForwardBatch(
            input_ids=inputs.input_ids[:tokens],
            positions=inputs.positions[:tokens],
            slots=inputs.slots[:tokens],
            logits_rows=torch.arange(tokens, device=self._stream.device),
            attention=AttentionBatch(queries, None),
            attention_plan=None,
            kv=self._kv_pool.layers,
            sizes=self._sizes(tokens),
        )

    def _sizes(self, num_tokens: int) -> StepSizes | None:
        """Every attention group is padded to the same size."""
        if not self._shared.is_shared:
            return None
        tokens = [num_tokens] * self._shared.parallel.attn_dp_size
        return StepSizes.known(self._shared.parallel, tokens, tokens, False)

    def _run(self, batch: ForwardBatch) -> None:
        """What is recorded. Results are copied out of the pool, where the next recording takes their place."""
        hidden = self._model.forward(batch)
        if self._hidden is None:  # the largest comes first, and runs before it is recorded
            self._hidden = torch.empty_like(hidden)
        self._hidden[: len(hidden)].copy_(hidden)
        if batch.num_tokens > self._max_logits:
            return
        logits = self._model.logits(hidden, batch.sizes)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[: len(logits)].copy_(logits)

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    # -- steps

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """The recording that serves a step; None where it is run kernel by kernel.

        Decided by what all ranks know, so that all decide alike: with several attention groups the largest one's size.
        """
        facts = plan.dp_facts or (StepFacts.of(plan),)
        shapes = [_even(group) for group in facts if group.num_tokens or group.prefills]
        counts = {shape.count for shape in shapes if shape is not None}
        if None in shapes or len(counts) != 1:
            return None
        size = self._settings.size_for(max(shape.size for shape in shapes if shape is not None))
        shape = StepShape(size or 0, counts.pop())
        return shape if shape in self._recorded else None

    def run(self, shape: StepShape, batch: StepBatch | None) -> tuple[Tensor, Tensor | None]:
        """Replays a step: hidden states [t, D] and logits [t, V] of its t tokens, valid until the next one. Logits are
        None where the recording has no head; all ranks run it then.

        Args:
            batch: as `shape_of` saw it; None where only other attention groups have tokens.
        """
        recorded, inputs = self._recorded[shape], self._inputs
        inputs.fill(batch)
        own = batch.attention.decode if batch is not None else None
        lens = own.context_lens if own is not None else []
        recorded.queries.context_lens[:] = lens + [inputs.neutral_context] * (shape.size - len(lens))
        recorded.plan.renew()
        recorded.launches.replay()
        assert self._hidden is not None
        num_tokens = own.num_tokens if own is not None else 0
        if shape.num_tokens > self._max_logits:
            return self._hidden[:num_tokens], None
        assert self._logits is not None
        return self._hidden[:num_tokens], self._logits[:num_tokens]


def _even(facts: StepFacts) -> StepShape | None:
    """The shape of one attention group's part; None if its requests have not all the same number of tokens, or more
    than decodes are in it. A chain of drafts has one token more than its depth."""
    count = facts.depth + 1 if facts.num_drafting else 1
    size, rest = divmod(facts.num_tokens, count)
    if facts.prefills or facts.prompt_logprobs or rest or facts.num_logits != facts.num_tokens:
        return None
    if facts.num_drafting not in (0, size):
        return None
    return StepShape(size, count)
