"""The experts of each token, for requests with `return_routed_experts`.

Every step is recorded, not only the tokens of such requests: a later one may read cached prefixes. The layers write a
step's choices to one tensor, at fixed addresses, so that CUDA graphs record too; the host keeps them by KV slot.

Legend: L layers, T tokens of a step, K experts per token, R requests of a step.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.decoder.counting import CountPlace
from moe_engine.types import PositionRows, StepPlan
from moe_engine.worker.device_stream import DeviceStream, HostCopy


class RoutedExperts:
    """Implements `LayerRecorder`. Layers without experts have zeros, as in SGLang.

    Args:
        keeps: whether this rank reports results; the ranks of a group route the same tokens.
        num_slots: KV slots.
        max_tokens: of a step.
    """

    counting = True
    counts_dispatched = False

    def __init__(
        self, num_layers: int, top_k: int, max_tokens: int, num_slots: int, stream: DeviceStream, *, keeps: bool
    ) -> None:
        self._stream = stream
        self._ids = torch.zeros(num_layers, max_tokens, top_k, dtype=torch.int16, device=stream.device)
        self._kept = np.zeros((num_slots if keeps else 0, num_layers * top_k), np.int16)
        self._prefixes: dict[int, list[int]] = {}
        """Slots of the cached prefixes that are not reported yet, by row."""

    # -- the layers

    def count_place(self, layer_index: int) -> CountPlace | None:
        """None: counts do not suffice."""

    def ids_buffer(self, num_tokens: int) -> Tensor:
        return torch.empty(num_tokens, self._ids.shape[2], dtype=torch.int32, device=self._ids.device)

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        tokens, count = topk_ids.shape
        self._ids[layer_index, :tokens, :count].copy_(topk_ids)

    def on_dispatch(self, layer_index: int, counts: Tensor) -> None: ...

    # -- the runner

    def pending(self, plan: StepPlan, offsets: np.ndarray, wanted: Collection[int]) -> PendingExperts | None:
        """Begins to copy the experts of a step.

        Args:
            offsets: [R], of each row's tokens in the batch: batches have prompts in another order than plans.
            wanted: rows that return experts.
        """
        if not len(self._kept):
            return None
        for new in plan.new_rows:
            self._prefixes.pop(new.row, None)
            if new.returns_positions and new.slots:
                self._prefixes[new.row] = new.slots
        counts = np.array(plan.counts)
        ends = np.cumsum(counts)
        order = np.repeat(offsets - ends + counts, counts) + np.arange(plan.num_tokens)
        rows = [
            (row, start, end - count, end, self._prefixes.pop(row, []))
            for row, start, count, end in zip(plan.rows, plan.starts, plan.counts, ends.tolist())
            if row in wanted
        ]
        ids = self._ids[:, : plan.num_tokens].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        copy = self._stream.download([ids])
        return PendingExperts(self._kept, copy, order, plan.slots, rows)


class PendingExperts:
    """Experts being copied to the host. `take` waits for them; steps are taken in their order."""

    def __init__(
        self,
        kept: np.ndarray,
        copy: HostCopy,
        order: np.ndarray,
        slots: list[int],
        rows: list[tuple[int, int, int, int, list[int]]],
    ) -> None:
        self._kept, self._copy, self._order, self._slots, self._rows = kept, copy, order, slots, rows

    def take(self) -> dict[int, PositionRows]:
        """int16 [n, L * K] of the n tokens of each row computed by the step, behind those of its cached prefix."""
        ids = self._copy.wait()[0].numpy().reshape(len(self._order), -1)[self._order]
        self._kept[self._slots] = ids
        found = {}
        for row, start, begin, end, prefix in self._rows:
            data = self._kept[prefix].tobytes() + ids[begin:end].tobytes()
            found[row] = PositionRows(start - len(prefix), len(prefix) + end - begin, data)
        return found
