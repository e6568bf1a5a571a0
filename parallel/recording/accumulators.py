"""Storage of recorded passes: summable counts in a buffer, or one record per pass.

Legend: L layers, E logical experts, P physical experts, S passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.parallel.recording.buffers import PassBuffer
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.pass_counts import PassCounts


class LogicalMap:
    """Physical to logical experts, on the device; updated layer by layer while experts move.

    Args:
        table: int [L, P]; -1 is an empty slot. None: slot i holds expert i mod E.
    """

    def __init__(self, config: RecorderConfig, table: Tensor | None = None) -> None:
        if table is None:
            row = torch.arange(config.num_physical) % config.num_experts
            table = row.repeat(config.num_layers, 1)
        if table.shape != (config.num_layers, config.num_physical):
            raise ValueError(f"map is {list(table.shape)}, not [{config.num_layers}, {config.num_physical}]")
        self._num_experts = config.num_experts
        self.table = table.to(config.device, torch.int64, copy=True)
        self._target = torch.where(self.table < 0, self._num_experts, self.table)  # empty slots: extra last column
        self._sums = torch.zeros(config.num_layers, config.num_experts + 1, dtype=torch.int32, device=config.device)
        own = torch.arange(config.num_physical, device=config.device)
        self.is_identity = config.num_physical == config.num_experts and bool((self.table == own).all())

    def update_layer(self, layer: int, table: Tensor) -> None:
        """`table` int [P]."""
        self.table[layer] = table.to(self.table.device, torch.int64)
        self._target[layer] = torch.where(self.table[layer] < 0, self._num_experts, self.table[layer])
        self.is_identity = False

    def to_logical(self, physical: Tensor) -> Tensor:
        """Counts int32 [L, P] -> [L, E]; valid until the next call."""
        if self.is_identity:
            return physical
        return self._sums.zero_().scatter_add_(1, self._target, physical)[:, :-1]


class StatAccumulator:
    """Logical counts of the last passes; the modes stat and stat_approx."""

    def __init__(self, config: RecorderConfig) -> None:
        shape = (config.num_layers, config.num_experts)
        self.buffer = PassBuffer(config.buffer_size, shape, torch.device(config.device))

    def add(self, pass_id: int, counts: PassCounts, logical: Tensor) -> None:
        self.buffer.next_row().copy_(logical)
        self.buffer.keep(pass_id)

    def passes(self) -> tuple[list[int], Tensor]:
        """Ids of the stored passes and their counts int32 [S, L, E] on this rank, oldest first."""
        return self.buffer.pass_ids, self.buffer.rows()

    def total(self) -> Tensor:
        return self.buffer.total()

    def clear_total(self) -> None:
        self.buffer.clear_total()

    def reset(self) -> None:
        self.buffer.reset()


class RecordAccumulator:
    """A record of each pass of this rank; the modes per_pass and per_token. Memory grows until the dump."""

    def __init__(self, config: RecorderConfig, logical_map: LogicalMap) -> None:
        self._rank = config.rank
        self._per_token = config.mode == "per_token"
        self._map = logical_map
        self._records: list[dict[str, Any]] = []
        self._total = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64, device=config.device)

    def add(self, pass_id: int, counts: PassCounts, logical: Tensor) -> None:
        record = {
            "forward_pass_id": pass_id,
            "rank": self._rank,
            "gatherer_key": "primary",
            "global_physical_count": counts.physical.to("cpu", copy=True).contiguous(),
        }
        if self._per_token:
            record |= {**counts.details, "topk_ids_of_layer": counts.token_choices()}
        self._records.append(record)
        self._total += logical

    def content(self) -> dict[str, Any]:
        """Content of this rank's dump file."""
        return {"records": list(self._records), "last_physical_to_logical_map": self._map.table.cpu()}

    def total(self) -> Tensor:
        return self._total

    def clear_total(self) -> None:
        self._total.zero_()

    def reset(self) -> None:
        self._records = []
