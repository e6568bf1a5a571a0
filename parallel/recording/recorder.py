"""`ExpertRecorder`: the object the MoE layers and the runner call, and the operator starts, stops and dumps.

Legend: L layers, E logical experts, P physical experts, G ranks, T tokens, K experts per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_engine.parallel.recording.accumulators import Accumulator, LogicalMap, RecordAccumulator, StatAccumulator
from moe_engine.parallel.recording.balance_windows import BalanceWindows
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.dump_file import RecordingError, write_dump
from moe_engine.parallel.recording.pass_counts import PassCounts

logger = logging.getLogger(__name__)

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks and returns the sum, in place or not. Every rank calls it at the same point."""


def _alone(tensor: Tensor) -> Tensor:
    return tensor


class ExpertRecorder:
    """One rank's recorder. All methods run on the thread of the steps; all ranks start, stop and dump at the same step.

    While `recording` is False a layer pays for looking at that attribute and nothing else::

        if recorder.recording:
            recorder.on_select(layer_index, topk_ids)

    Args:
        config: sizes and choices.
        all_reduce: over the ranks whose counts are summed.
        physical_to_logical: int [L, P]; slot i holds expert i mod E where it is None.
    """

    def __init__(
        self, config: RecorderConfig, all_reduce: AllReduce = _alone, physical_to_logical: Tensor | None = None
    ) -> None:
        self.config = config
        self.recording = False
        self.balance = BalanceWindows(config.ep_size)
        self._all_reduce = all_reduce
        self._map = LogicalMap(config, physical_to_logical)
        self._counts = PassCounts(config)
        self._kept: Accumulator = (
            RecordAccumulator(config, self._map) if config.mode.startswith("per_") else StatAccumulator(config)
        )
        self._by_router = config.source == "router"
        self._pass_id = -1
        self._in_pass = False

    # -- the operator

    def start(self) -> None:
        """Forgets what was recorded and records from the next pass on."""
        if self.recording:
            logger.warning("the expert distribution is being recorded already; what was recorded is dropped")
        self._reset()
        self._kept.clear_total()
        self.recording = True

    def stop(self) -> None:
        """Records no more; what was recorded stays for a dump."""
        if not self.recording:
            logger.warning("the expert distribution is not being recorded; nothing to stop")
        self.recording = self._in_pass = False

    def dump(self) -> Path | None:
        """Writes what was recorded to a file and forgets it; goes on recording if it was.

        Returns:
            This rank's file; None on ranks that write none (stat: all but rank 0).

        Raises:
            RecordingError: on every rank, when one could not write. Nothing is forgotten, so dump again.
        """
        content = self._content()
        path, failure = None, None
        if self._kept.every_rank_writes or self.config.rank == 0:
            rank = self.config.rank if self._kept.every_rank_writes else None
            try:
                path = write_dump(self.config.directory, content, rank)
            except RecordingError as error:
                failure = error
        failed = self._all_reduce(torch.tensor([int(failure is not None)], device=self.config.device))
        if failure is not None:
            raise failure
        if int(failed):
            raise RecordingError(
                f"{int(failed)} other ranks could not write their dump; see their log, then dump again"
            )
        self._reset()
        if path is not None:
            logger.info("wrote the expert distribution to %s", path)
        return path

    def take(self) -> dict[str, Any]:
        """What `dump` would write, for a caller in this process (EPLB); forgets it.

        In the modes stat and stat_approx `logical_count` is summed over all ranks, on every rank.
        """
        content = self._content()
        self._reset()
        return content

    def snapshot(self) -> dict[str, Any]:
        """For the live view: plain values, `counts` [L][E] of this rank since the start."""
        return {
            "layers": self.config.num_layers,
            "experts": self.config.num_experts,
            "counts": self._kept.total().tolist(),
            "balancedness": self.balance.values(),
            "recording": self.recording,
            "pass": self._pass_id,
        }

    def _content(self) -> dict[str, Any]:
        content = self._kept.content()
        if "logical_count" not in content:
            return content
        summed = self._all_reduce(content["logical_count"]).cpu()
        return {
            "rank": self.config.rank,
            "logical_count": summed,
            "average_utilization_rate_over_window": self.balance.mean(),
        }

    def _reset(self) -> None:
        self._kept.reset()
        self.balance.reset()
        self._in_pass = False

    # -- the runner

    def begin_pass(
        self,
        pass_id: int,
        input_ids: Tensor,
        positions: Tensor,
        extend_seq_lens: Sequence[int] | None = None,
        forward_mode: int = 0,
    ) -> None:
        """Before a forward pass, where `recording`.

        Args:
            pass_id: number of the pass, the same on all ranks.
            input_ids, positions: [T], kept in per_token mode only.
            extend_seq_lens: new tokens of each request of a prefill, likewise.
            forward_mode: SGLang's number: 1 extend, 2 decode, 3 mixed, 4 idle.
        """
        self._pass_id, self._in_pass = pass_id, True
        self._counts.begin(input_ids, positions, extend_seq_lens, forward_mode)

    def end_pass(self) -> None:
        """After a forward pass, where `recording`. Nothing happens if none began: recording started within it."""
        if not self._in_pass:
            return
        self._in_pass = False
        logical = self._map.to_logical(self._counts.physical)
        self._kept.add(self._pass_id, self._counts, logical)
        if self.config.report_balancedness:
            self.balance.add(self._pass_id, self._all_reduce(self._counts.physical.clone()))

    # -- the MoE layers

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        """The router's choice in a layer, where `recording`: topk_ids int [T, K] physical ids."""
        if self._by_router:
            self._counts.add_choices(layer_index, topk_ids)

    def on_dispatch(self, layer_index: int, counts: Tensor | Sequence[int]) -> None:
        """What the dispatcher says arrived for this rank's slots, [P/G], where `recording`."""
        if not self._by_router:
            self._counts.add_arrivals(layer_index, counts)

    # -- the placement

    def update_layer(self, layer_index: int, physical_to_logical: Tensor) -> None:
        """Between passes: a layer's slots hold other experts from now on, int [P]."""
        self._map.update_layer(layer_index, physical_to_logical)
