"""Counts of one pass: tokens of each physical expert per layer, and optionally each token's experts.

Legend: L layers, M of them with experts, P physical experts, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.decoder.counting import CountCell, CountPlace
from moe_engine.kernels.uploads import upload
from moe_engine.parallel.recording.config import MAX_TOP_K, RecorderConfig


class PassCounts:
    """Filled layer by layer; tensors are reused in every pass.

    A layer either counts at its `place` during a pass, or only stores its ids here; stored ids are counted once, at the
    end of the pass, in a few operators.
    """

    def __init__(self, config: RecorderConfig) -> None:
        self._device = torch.device(config.device)
        # one extra first column, for the -1 of padding rows
        shape = (config.num_layers, config.num_physical + 1)
        self._all = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._flat = self._all.view(-1)
        self.cell = CountCell()
        self._in_place = torch.zeros(config.num_layers, config.num_physical, dtype=torch.int32, device=self._device)
        self.physical = self._all[:, 1:]
        """int32 [L, P], valid between `finish` and the next `begin`."""
        local = config.num_physical // config.ep_size
        self._local = self.physical[:, config.ep_rank * local : (config.ep_rank + 1) * local]
        self._adds = False
        """True if layers counted in place in the last pass."""
        self._layers: list[int] = []
        self._ids: list[Tensor] = []
        self._ids_buffer = torch.empty(config.num_layers, 0, config.top_k, dtype=torch.int32, device=self._device)
        self._layer_ids: Sequence[Tensor] = self._ids_buffer.unbind(0)
        self._num_stored = 0
        self._first: dict[tuple[int, ...], Tensor] = {}  # by layers: int32 [M, 1, 1], index of slot 0
        self._ones = torch.ones(0, dtype=torch.int32, device=self._device)
        self._cached: tuple[tuple[int, ...], Tensor, Tensor, Tensor, Tensor, Tensor] | None = None
        self._per_token = config.mode == "per_token"
        self._topk_ids = torch.empty(0)
        self.details: dict[str, Any] = {}
        """Mode per_token: batch fields of the record."""

    def place(self, layer: int) -> CountPlace:
        """Position at which the layer counts its choices itself, in host memory: a row of [L, P]."""
        return CountPlace(self.cell, layer * self._in_place.shape[1])

    def begin(self) -> None:
        """Clears the counts."""
        self._all.zero_()
        if self._ids:
            self._layers, self._ids, self._num_stored = [], [], 0
        self.cell.point(self._in_place.data_ptr(), self._in_place.nbytes)

    def end(self) -> None:
        """Ends the pass: later layer runs are not counted."""
        self._adds = self.cell.hide()

    def describe(
        self, input_ids: Tensor, positions: Tensor, extend_seq_lens: Sequence[int] | None, forward_mode: int
    ) -> None:
        """Mode per_token: the batch, after `begin`; `input_ids` and `positions` are [T]."""
        self._topk_ids = torch.full((len(self._all), input_ids.shape[0], MAX_TOP_K), -1, dtype=torch.int32)
        self.details = {
            "input_ids": input_ids.tolist(),
            "positions": positions.tolist(),
            "extend_seq_lens": None if extend_seq_lens is None else list(extend_seq_lens),
            "forward_mode": forward_mode,
            "misc_objects": [],
        }

    def ids_buffer(self, num_tokens: int) -> Tensor:
        """int32 [T, K] buffer for a layer's choices, passed to `add_choices` afterwards: avoids a copy."""
        if self._ids_buffer.shape[1] != num_tokens:
            self._ids_buffer = self._ids_buffer.new_empty(
                self._ids_buffer.shape[0], num_tokens, self._ids_buffer.shape[2]
            )
            self._layer_ids = self._ids_buffer.unbind(0)
            self._cached = None
        self._num_stored += 1
        return self._layer_ids[self._num_stored - 1]

    def add_choices(self, layer: int, topk_ids: Tensor) -> None:
        """topk_ids int32 [T, K] physical, unchanged until counted. A layer may run several times, for consecutive parts
        of the tokens."""
        self._layers.append(layer)
        self._ids.append(topk_ids)

    def add_arrivals(self, layer: int, counts: Tensor | Sequence[int]) -> None:
        """counts [P/G] of received tokens of this rank's slots."""
        if not isinstance(counts, Tensor):
            counts = upload(np.asarray(counts, dtype=np.int32), self._device)
        self._local[layer] += counts

    def finish(self) -> None:
        """Counts the ids stored by the layers."""
        if self._adds:
            self.physical += self._in_place
            self._adds = False
        if not self._ids:
            return
        if self._num_stored == len(self._ids):
            ids, offsets, places, flat, ones = self._views(tuple(self._layers))
            torch.add(ids, offsets, out=places)
        else:
            width = self._all.shape[1]
            flat = torch.cat([ids.view(-1) + (layer * width + 1) for layer, ids in zip(self._layers, self._ids)])
            ones = self._some_ones(flat.numel())
        self._flat.index_add_(0, flat, ones)
        if self._per_token:
            self._keep_choices()

    def token_choices(self) -> Tensor:
        """int32 [L, T, 8] on the host, -1 where unused."""
        return self._topk_ids

    def _views(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views for counting stored ids: ids [M, T, K], their offsets, a buffer for the sum, its flat view, and ones.

        Cached: decode passes have the same number of tokens, and creating views costs as much as counting.
        """
        if self._cached is None or self._cached[0] != layers:
            ids = self._ids_buffer[: len(layers)]
            places = torch.empty_like(ids)
            self._cached = (layers, ids, self._offsets(layers), places, places.view(-1), self._some_ones(ids.numel()))
        return self._cached[1:]

    def _some_ones(self, count: int) -> Tensor:
        if len(self._ones) < count:
            self._ones = torch.ones(count, dtype=torch.int32, device=self._device)
        return self._ones[:count]

    def _keep_choices(self) -> None:
        """Stores each token's choices. If a layer ran twice (two halves of a pass), the second half's tokens follow."""
        kept = [0] * len(self._all)
        for layer, ids in zip(self._layers, self._ids):
            begin, end = kept[layer], kept[layer] + len(ids)
            self._topk_ids = _at_least(self._topk_ids, end)
            self._topk_ids[layer, begin:end, : ids.shape[1]] = ids.to("cpu", torch.int32)
            kept[layer] = end

    def _offsets(self, layers: tuple[int, ...]) -> Tensor:
        found = self._first.get(layers)
        if found is None:
            places = torch.tensor(layers) * self._all.shape[1] + 1
            found = self._first[layers] = places.to(self._device, torch.int32).view(-1, 1, 1)
        return found


def _at_least(topk_ids: Tensor, tokens: int) -> Tensor:
    """[L, T, 8] grown to at least `tokens`: a layer that gets other ranks' tokens routes more than the batch has."""
    missing = tokens - topk_ids.shape[1]
    if missing <= 0:
        return topk_ids
    return torch.cat([topk_ids, topk_ids.new_full((topk_ids.shape[0], missing, MAX_TOP_K), -1)], dim=1)
