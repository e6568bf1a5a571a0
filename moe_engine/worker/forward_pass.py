"""The forward of a step: builds the batch, plans its attention, and runs the model or replays a CUDA graph of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.models.layers.decoder import Decoder
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import StepPlan
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.dp_step import DPSteps
from moe_engine.worker.batch.expanded_prefix import ExpandedPrefix
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.step_batch import StepBatch, concatenate
from moe_engine.worker.eplb.expert_recording_model import ExpertRecordingModel
from moe_engine.worker.kv_cache.kv_pool import KVPool
from moe_engine.worker.static_inputs import StaticInputs
from moe_engine.worker.step_graphs import StepGraphs
from moe_engine.worker.step_shape import StepShape

if TYPE_CHECKING:  # of models with a vision tower alone
    from moe_engine.worker.image_encoder import ImageEncoder


RUNNING = "running the model"


class ForwardPass:
    """Runs one model over one KV pool.

    `graphs` is set after CUDA graphs are captured; without it every step runs kernel by kernel. `images`: encodes the
    images of prompts, for a model with a vision tower. `doing`: the phase of the current step.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KVPool,
        rows: RequestRows,
        attention: MLABackend | GQABackend,
        builder: BatchBuilder,
        shared: DPSteps,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.rows = rows
        self.attention = attention
        self.builder = builder
        self.shared = shared
        self.doing = "idle"
        self.graphs: StepGraphs | None = None
        self.images: ImageEncoder | None = None

    @property
    def phase(self) -> str:
        """Phase of the current or last step; may be read from any thread."""
        doing, model = self.doing, self.model
        if not (doing.startswith(RUNNING) and isinstance(model, Decoder | ExpertRecordingModel)):
            return doing
        return f"{doing}, layer {model.at_layer}"

    def graph_shape(self, plan: StepPlan) -> StepShape | None:
        """The CUDA graph for a step, if any; None with two-batch overlap or while passes are recorded."""
        return self.graphs.shape_of(plan) if self.graphs is not None and self.replays(plan) else None

    def replays(self, plan: StepPlan) -> bool:
        """False if no CUDA graph may be replayed for a step."""
        if self.shared.halves(plan) is not None:
            return False
        return not (isinstance(self.model, ExpertRecordingModel) and self.model.is_watching)

    def replay(
        self, shape: StepShape, build: Callable[[StaticInputs], StepBatch]
    ) -> tuple[StepBatch, Tensor, Tensor | None]:
        """Replays a graph: the step's batch, hidden states [T, D] and logits [T, V] (None if the graph has no head)."""
        assert self.graphs is not None
        self.doing = "building the batch"
        batch = build(self.graphs.inputs)
        self.rows.note_tokens(batch.slots, batch.input_ids)
        self.doing = f"{RUNNING} (replayed for {shape.size} requests)"
        return batch, *self.graphs.run(shape, batch)

    def run(
        self, plan: StepPlan, sizes: StepSizes | None, prefixes: ExpandedPrefix | None = None
    ) -> tuple[StepBatch, Tensor]:
        """Builds the batch and runs the model, in two halves with two-batch overlap: hidden states [T, D].

        Args:
            prefixes: of prompts that share one.
        """
        # with several groups the exchanged facts include prompt logprobs, so that all groups decide alike
        whole = bool(self.rows.prompt_logprobs) and not self.shared.is_shared
        parts = None if whole else self.shared.halves(plan)
        self.doing = "building the batch"
        if parts is None:
            batch = self.builder.build(plan)
            forward = _with_prefix(self.prepare(batch, sizes), prefixes)
            self.doing = RUNNING
            return batch, self.model.forward(forward)
        batches = [self.builder.build(part) for part, _ in parts]
        forwards, before = [], 0
        for batch, (_, half) in zip(batches, parts):
            forwards.append(self.prepare(batch, half, before))
            before += 0 if batch.images is None else len(batch.images.tokens)
        self.doing = f"{RUNNING} in two halves"
        return concatenate(*batches), torch.cat(self._run_overlapped(forwards))

    def prepare(
        self, batch: StepBatch, sizes: StepSizes | None, before: int = 0, keep_images: bool = False
    ) -> ForwardBatch:
        """Plans the attention of a batch and encodes its images; `before`: image tokens of the first half."""
        self.rows.note_tokens(batch.slots, batch.input_ids)
        self.doing = "planning attention"
        forward = batch.forward_batch(self.attention.plan(batch.attention), self.kv_pool.layers, sizes)
        if batch.images is None:
            return forward
        assert self.images is not None
        self.doing = f"encoding {len(batch.images.parts)} images"
        return replace(forward, images=self.images.rows(batch.images, before, keep_images))

    def run_idle(self, plan: StepPlan, sizes: StepSizes) -> Tensor:
        """Runs the model with an idle batch, as the other ranks run theirs: hidden states [0, D]."""
        parts = self.shared.halves(plan)
        self.doing = f"{RUNNING} with an idle batch"
        if parts is None:
            return self.model.forward(self.shared.idle_batch(sizes))
        return self._run_overlapped([self.shared.idle_batch(half) for _, half in parts])[0]

    def _run_overlapped(self, forwards: list[ForwardBatch]) -> list[Tensor]:
        assert isinstance(self.model, Decoder | ExpertRecordingModel)
        return self.model.forward_overlapped(forwards)


def _with_prefix(forward: ForwardBatch, prefixes: ExpandedPrefix | None) -> ForwardBatch:
    prompts = forward.attention.prefill
    if prefixes is None or prompts is None or forward.adapters is not None:
        return forward
    return replace(forward, expanded=prefixes.of_prompts(prompts))
