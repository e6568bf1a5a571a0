"""`ExpertRecorder`: records the choices of MoE layers; started, stopped and dumped by the operator.

Legend: L layers, E logical experts, P physical experts, G ranks, T tokens, K experts per token, S passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.decoder.counting import CountPlace
from moe_engine.parallel.recording.accumulators import LogicalMap, RecordAccumulator, StatAccumulator
from moe_engine.parallel.recording.balance_windows import BalanceWindows
from moe_engine.parallel.recording.buffers import PassBuffer
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.dump_file import RecordingError, write_dump
from moe_engine.parallel.recording.merge import pack_counts
from moe_engine.parallel.recording.pass_counts import PassCounts

logger = logging.getLogger(__name__)

AllReduce = Callable[[Tensor], Tensor]
"""all_reduce of a tensor over all ranks, in place or not. Every rank calls it at the same point."""


def _alone(tensor: Tensor) -> Tensor:
    return tensor


class ExpertRecorder:
    """One rank's recorder. All methods run on the thread of the steps, in inference mode: tensors created there cannot
    be modified elsewhere.

    Layers count at their `count_place` if their kernel supports it; others pass their choices::

        if recorder.counting:
            recorder.on_select(layer_index, topk_ids)

    While `wanted` is false, `ExpertControl` disconnects layers and passes from the recorder.

    Counts of a pass have three consumers: the operator (start, stop: `recording`), the balancedness report, and the
    rebalancer (`watch`); the last two run from the start, because their collectives are at fixed passes. The operator's
    calls never make ranks wait for each other, so they need not arrive at all ranks in the same step.

    Args:
        config: sizes and choices.
        all_reduce: over the counting ranks; called in every pass with `report_balancedness`, else never.
        physical_to_logical: int [L, P]; None: slot i holds expert i mod E.
    """

    def __init__(
        self, config: RecorderConfig, all_reduce: AllReduce = _alone, physical_to_logical: Tensor | None = None
    ) -> None:
        self.config = config
        self.recording = False
        self.counting = False
        self.wanted = False
        """True if counts have a consumer on any rank."""
        self.wants_batches = config.mode == "per_token"
        """True if `begin_pass` must be followed by `describe_pass`."""
        self.balance = BalanceWindows(config.ep_size)
        self._all_reduce = all_reduce
        self._map = LogicalMap(config, physical_to_logical)
        self._counts = PassCounts(config)
        self._kept: StatAccumulator | RecordAccumulator = (
            RecordAccumulator(config, self._map) if config.mode.startswith("per_") else StatAccumulator(config)
        )
        self._by_router = config.source == "router"
        self._window: Tensor | None = None  # int64 [L, E] since `take_window`
        self._pass_id = -1
        self._in_pass = False
        self._uncounted = False  # the ids of the last pass are not counted yet
        self._all_in_place = False
        self._into: PassBuffer | None = None
        self._update_consumers()

    def _update_consumers(self) -> None:
        """Between passes: updates the consumers' state."""
        self.wanted = self.recording or self.config.report_balancedness or self._window is not None
        self.counting = self.wanted and self.config.counts_here
        self._in_pass = False
        kept = self._kept.buffer if isinstance(self._kept, StatAccumulator) and self.recording else None
        others = self.config.report_balancedness or self._window is not None
        alone = self._all_in_place and self._map.is_identity and not others
        self._into = kept if alone and self.config.counts_here else None

    def count_in_place(self, all_layers: bool) -> None:
        """Between passes: sets whether every layer counts at its `count_place`. If there is no other consumer, that
        place is the pass's row in the buffer, and a pass costs next to nothing."""
        self._count()
        self._all_in_place = all_layers
        self._update_consumers()

    # -- the operator

    @torch.inference_mode()
    def start(self) -> None:
        """Clears the record and records from the next pass on."""
        if self.recording:
            logger.warning("the expert distribution is already being recorded; the existing record is dropped")
        self._count()
        self._kept.reset()
        self._kept.clear_total()
        self.recording = True
        self._update_consumers()

    def stop(self) -> None:
        """Stops recording; the record is kept for a dump."""
        if not self.recording:
            logger.warning("the expert distribution is not being recorded; nothing to stop")
        self._count()
        self.recording = False
        self._update_consumers()

    @torch.inference_mode()
    def dump_part(self) -> dict[str, Any] | None:
        """This rank's part of a dump, cleared here; recording continues if active.

        Returns:
                Plain values for `merge.write_parts`: the counts in the modes stat and stat_approx; in the other modes,
                whose records are large, the ``path`` of the file written by this rank, or the ``error`` of a failed
                write (nothing is then cleared). None if another rank counts the same tokens.
        """
        if not self.config.counts_here:
            return None
        self._count()
        rank = self.config.rank
        if isinstance(self._kept, StatAccumulator):
            pass_ids, counts = self._kept.passes()
            part: dict[str, Any] = {"rank": rank, "capacity": self.config.buffer_size}
            part["utilization"] = self.balance.mean()
            part |= pack_counts(pass_ids, counts.cpu().numpy())
        else:
            try:
                part = {"rank": rank, "path": str(write_dump(self.config.directory, self._kept.content(), rank))}
            except RecordingError as error:
                return {"rank": rank, "error": str(error)}
        self._kept.reset()
        self._in_pass = False
        return part

    @torch.inference_mode()
    def snapshot(self) -> dict[str, Any]:
        """For the live view: plain values; `counts` [L][E] of this rank so far, None if another rank counts."""
        self._count()
        return {
            "layers": self.config.num_layers,
            "experts": self.config.num_experts,
            "counts": self._kept.total().tolist() if self.config.counts_here else None,
            "balancedness": self.balance.values(),
            "recording": self.recording,
            "pass": self._pass_id,
        }

    # -- the rebalancer

    def watch(self) -> None:
        """Enables counting for `take_window`."""
        self._count()
        shape = (self.config.num_layers, self.config.num_experts)
        self._window = torch.zeros(shape, dtype=torch.int64, device=self.config.device)
        self._update_consumers()

    @torch.inference_mode()
    def take_window(self) -> Tensor:
        """int64 [L, E]: logical counts of this rank since the last call; zeros if another rank counts."""
        assert self._window is not None, "watch first"
        self._count()
        window = self._window.clone()
        self._window.zero_()
        return window

    # -- the runner

    def begin_pass(self, pass_id: int) -> None:
        """Called before a forward pass if `counting`. `pass_id` is the same on all ranks."""
        into = self._into
        if into is None:
            self._count()
            self._counts.begin()
        else:
            self._counts.cell.point(into.next_address(), into.row_bytes)
        self._pass_id, self._in_pass = pass_id, True

    def describe_pass(
        self, input_ids: Tensor, positions: Tensor, extend_seq_lens: Sequence[int] | None, forward_mode: int
    ) -> None:
        """Describes the batch of the started pass.

        Args:
            input_ids, positions: [T].
            extend_seq_lens: new tokens of each request of a prefill.
            forward_mode: SGLang's value: 1 extend, 2 decode, 3 mixed, 4 idle.
        """
        self._counts.describe(input_ids, positions, extend_seq_lens, forward_mode)

    def drop_pass(self) -> None:
        """Cancels the started pass."""
        self._in_pass = False
        self._counts.cell.hide()

    def end_pass(self) -> None:
        """Called after a forward pass. Keeps nothing if no pass was started: recording began during it.

        The stored ids are counted later, between two steps: here kernels would wait for it, in the middle of a step.
        """
        was_begun, self._in_pass = self._in_pass, False
        into = self._into
        if into is not None:
            has_counted = self._counts.cell.hide()
            if was_begun:
                if not has_counted:  # no layer had a token
                    into.next_row().zero_()
                into.keep(self._pass_id)
            return
        self._uncounted = was_begun
        self._counts.end()
        if self.config.report_balancedness:  # on non-counting ranks too: a collective
            self._count()
            self.balance.add(self._pass_id, self._all_reduce(self._counts.physical.clone()))

    def _count(self) -> None:
        """Counts the last pass if still uncounted; called before any other operation."""
        if not self._uncounted:
            return
        self._uncounted = False
        if torch.is_inference_mode_enabled():  # true in every step
            self._count_now()
        else:
            with torch.inference_mode():
                self._count_now()

    def _count_now(self) -> None:
        self._counts.finish()
        logical = self._map.to_logical(self._counts.physical)
        if self.recording:
            self._kept.add(self._pass_id, self._counts, logical)
        if self._window is not None:
            self._window += logical

    @torch.inference_mode()
    def settle(self) -> None:
        """Counts the last pass now instead of at the next pass."""
        self._count()

    # -- the MoE layers

    def count_place(self, layer_index: int) -> CountPlace | None:
        """Position at which the layer counts itself, without further calls; None if more than counts is needed."""
        return self._counts.place(layer_index) if self._by_router and not self.wants_batches else None

    def ids_buffer(self, num_tokens: int) -> Tensor:
        """int32 [T, K] buffer that a layer may fill and pass to `on_select`, if `counting`."""
        return self._counts.ids_buffer(num_tokens)

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        """Records the router's choice in a layer, if `counting`: topk_ids int [T, K] physical ids."""
        if self._by_router:
            self._counts.add_choices(layer_index, topk_ids)

    def on_dispatch(self, layer_index: int, counts: Tensor | Sequence[int]) -> None:
        """Records tokens received for this rank's slots, [P/G], if `counting`."""
        if not self._by_router:
            self._counts.add_arrivals(layer_index, counts)

    @property
    def counts_dispatched(self) -> bool:
        """True if counts come from `on_dispatch`."""
        return not self._by_router

    # -- the placement

    @torch.inference_mode()
    def update_layer(self, layer_index: int, physical_to_logical: Tensor) -> None:
        """Between passes: sets the experts of a layer's slots, int [P]."""
        self._count()
        self._map.update_layer(layer_index, physical_to_logical)
        self._update_consumers()
