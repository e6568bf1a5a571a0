"""Steps of a pooled model: prompts only, and a vector for each request whose prompt ends in the step.

Legend: T tokens, S requests that end, D hidden, L labels or dimensions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import StepPlan, StepResult
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.device_stream import DeviceStream, HostCopy
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.pending_step import PendingResult


@dataclass
class PendingVectors:
    """A step of a pooled model, implements `PendingResult`. `sampled`: rows that the plan samples (warm-up, and the
    scheduler's probe); they get token 0."""

    number: int
    sampled: list[int]
    rows: list[int]
    vectors: HostCopy | None
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.vectors is None or self.vectors.ready

    def take(self) -> StepResult:
        vectors = None
        if self.vectors is not None:
            values: Tensor = self.vectors.wait()[0]
            vectors = {row: vector.tobytes() for row, vector in zip(self.rows, values.numpy())}
        tokens = [[0] for _ in self.sampled]
        return StepResult(self.number, self.sampled, tokens, seconds=self.seconds, vectors=vectors)


class StatePooling:
    """Reduces the hidden states of each request to one. Keeps the sum, or the first state, of prompts in chunks; their
    prefix is never cached then (`planning.model.resolve_pooling`)."""

    def __init__(self, kind: str, stream: DeviceStream) -> None:
        self._kind = kind
        self._stream = stream
        self._lengths: dict[int, int] = {}
        self._begun: dict[int, Tensor] = {}
        """Sum or first state [D] float32, by row, of prompts whose last chunk has not been computed."""

    def take(self, plan: StepPlan, offsets: np.ndarray, hidden: Tensor) -> tuple[list[int], Tensor]:
        """The rows whose prompt ends in this step, and their states [S, D], from hidden [T, D]."""
        for row in plan.finished_rows:
            self._lengths.pop(row, None)
            self._begun.pop(row, None)
        for new in plan.new_rows:
            self._lengths[new.row] = len(new.token_ids)
            self._begun.pop(new.row, None)
        ends = [start + count for start, count in zip(plan.starts, plan.counts)]
        ending = [i for i, row in enumerate(plan.rows) if ends[i] >= self._lengths[row]]
        rows = [plan.rows[i] for i in ending]
        if self._kind == "last":
            if not ending:
                return rows, hidden[:0]
            places = [int(offsets[i]) + plan.counts[i] - 1 for i in ending]
            return rows, hidden.index_select(0, self._stream.from_list(places, torch.int64))
        for row, begin, count in zip(plan.rows, offsets.tolist(), plan.counts):
            self._add(row, hidden[begin : begin + count])
        if not ending:
            return rows, hidden[:0]
        states = torch.stack([self._begun.pop(row) for row in rows])
        if self._kind == "mean":
            states /= self._stream.from_list([ends[i] for i in ending], torch.float32).unsqueeze(1)
        return rows, states

    def _add(self, row: int, part: Tensor) -> None:
        """Adds the states [n, D] of a chunk to the sum; with ``cls`` only a request's first state is kept."""
        before = self._begun.get(row)
        if self._kind == "mean":
            total = part.float().sum(dim=0)
            self._begun[row] = total if before is None else before + total
        elif before is None:
            self._begun[row] = part[0].float()


class PoolingRunner(ModelRunner):
    """The model runner of a pooled model, without sampling."""

    def __init__(self, pooling: PoolingConfig, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pooling = StatePooling(pooling.kind, self.stream)

    def _finish_step(
        self, plan: StepPlan, batch: StepBatch, hidden: Tensor, sizes: StepSizes | None, began: float
    ) -> PendingResult:
        self.forward.doing = "pooling"
        rows, states = self._pooling.take(plan, batch.offsets, hidden)
        copy = self.stream.download([self.model.logits(states)]) if rows else None
        sampled = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        return PendingVectors(plan.number, sampled, rows, copy, time.perf_counter() - began)
