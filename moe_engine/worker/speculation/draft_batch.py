"""Batches of a drafter's forwards: the target's rows and slots, and the KV cache of the drafter's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import GQABackend, MLABackend
from moe_engine.kernels.decoder.drafting import ChainSteps
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.batch import ForwardBatch
from moe_engine.worker.batch.batch_builder import BatchBuilder
from moe_engine.worker.batch.step_batch import RaggedTokens, StepBatch
from moe_engine.worker.device_stream import DeviceStream

_NONE = np.zeros(0, dtype=np.int64)


class DraftBatches:
    """Builds batches for one drafter.

    Args:
        attention: attention backend of the drafter's layers.
        kv: the KV cache of every layer, as `ForwardBatch.kv`.
    """

    def __init__(
        self, builder: BatchBuilder, attention: MLABackend | GQABackend, kv: Sequence[Any], stream: DeviceStream
    ) -> None:
        self._builder = builder
        self.attention = attention
        self.kv = kv
        self._stream = stream

    def steps(self, rows: np.ndarray, rows_device: Tensor, positions: np.ndarray, levels: Sequence[int]) -> ChainSteps:
        """Steps of one token per row at positions [S, D]; `levels`: the MTP layer of each step."""
        return self._builder.uniform.chain(rows, rows_device, positions, levels)

    def chain(self, rows: np.ndarray, rows_device: Tensor, positions: np.ndarray) -> Iterator[ForwardBatch]:
        """The same as one batch per step; the batches have no ids."""
        if not len(positions):
            return
        lengths = (positions + 1).tolist()
        steps = self._builder.uniform.chain(rows, rows_device, positions, ())
        pool_starts = [self._builder.pool_starts(rows, places) for places in positions]
        for i, (places, slots) in enumerate(zip(steps.positions, steps.slots)):
            queries = replace(steps.queries, context_lens=lengths[i], context_lens_device=steps.context_lens[i])
            attention = AttentionBatch(queries, None)
            plan = self.attention.plan(attention)
            batch = ForwardBatch(places[:0], places, slots, places[:0], attention, plan, self.kv)
            windows = self._builder.window_slots(steps.flat[i])
            yield replace(batch, pool_starts=pool_starts[i], windows=windows)

    def runs(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        ids: Tensor | None = None,
        *,
        num_decodes: int | None = None,
        positions: np.ndarray | None = None,
        visible: np.ndarray | None = None,
    ) -> tuple[StepBatch, ForwardBatch]:
        """Tokens [starts[i], starts[i] + counts[i]) of each row; slots from the table.

        Args:
            ids: [T], in the order of the runs; None: the batch has none (the caller has its own).
            num_decodes: number of first runs that are computed as decodes, the others as prompt chunks; None: all.
        """
        total = int(counts.sum())
        batch = self._builder.assemble(
            RaggedTokens(
                rows=rows,
                starts=starts,
                counts=counts,
                num_decodes=len(rows) if num_decodes is None else num_decodes,
                device_ids=torch.zeros(total, dtype=torch.int64, device=self._stream.device) if ids is None else ids,
                host_ids=_NONE,
                slots=_NONE,
                sampled=np.cumsum(counts) - 1,
                positions=positions,
                visible=visible,
            )
        )
        return batch, batch.forward_batch(self.attention.plan(batch.attention), self.kv)


def places_in_runs(offsets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each token of a batch, whose run i begins at offsets[i], its index in the original order of the runs."""
    begins = np.cumsum(counts) - counts
    places = np.empty(int(counts.sum()), dtype=np.int64)
    for offset, begin, count in zip(offsets.tolist(), begins.tolist(), counts.tolist()):
        places[offset : offset + count] = np.arange(begin, begin + count)
    return places
