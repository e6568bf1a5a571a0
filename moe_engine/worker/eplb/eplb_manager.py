"""EPLB manager (expert-parallel load balancer): counts expert load, plans a rebalance, and moves experts in chunks.

All ranks call `between_passes` at the same passes. Their actions depend only on the pass number and on broadcasts of
the planning rank, so all ranks act together:

    counting   until the interval is over; then the ranks sum their counts
    planning   on a thread of the planning rank, which broadcasts every few passes whether the plan is ready
    moving     one chunk per pass, or every few passes if passes are short: the comm stream transfers the chunk to spare
               slots during passes and prepares the layer's table; both are swapped in before the next pass

Legend: L layers, E logical experts, P physical experts (slots).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_engine.kernels.uploads import upload
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.expert_settings import RebalanceSettings
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.expert_transfer import ExpertTransfer
from moe_engine.parallel.placement.moves import Chunk
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.program import decode_moves
from moe_engine.parallel.recording.draft_counts import DraftCounts
from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.worker.eplb.eplb_interval import EPLBInterval
from moe_engine.worker.eplb.eplb_planner import NO_MOVES, Plan, Planner
from moe_engine.worker.eplb.eplb_throttle import EPLBThrottle

logger = logging.getLogger("moe_engine")

ASK_EVERY = 4
"""Passes between two broadcasts of whether the plan is ready."""


@dataclass
class BalanceStats:
    """Statistics of this rank since the start. Pauses are between passes; `moving_seconds` is the time of passes with
    moves, pauses included."""

    rebalances: int = 0
    experts_received: int = 0
    moving_passes: int = 0
    moving_seconds: float = 0.0
    pause_seconds: float = 0.0
    longest_pause: float = 0.0
    passes_per_move: int = 1
    """Passes per chunk, from measurements of the planning rank."""
    before: float = 1.0
    """Balancedness of the counted passes before and after the last plan."""
    after: float = 1.0
    interval: int = 0
    """Passes until the next plan."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, and ``pause_share``: share of pauses in the time of passes with moves."""
        share = self.pause_seconds / self.moving_seconds if self.moving_seconds else 0.0
        return asdict(self) | {"pause_share": share}


class EPLBManager:
    """EPLB of one rank.

    Args:
        settings: interval and thresholds.
        tables: the current placement, which this updates.
        recorder: expert counts, whose window this takes.
        make_transfer: with one spare slot per layer that moves at once; collective.
        world: all ranks of the model. Its collectives run between passes, so they cannot interleave with a step's.
        planner: used on the planning rank only, rank 0 until `restart`.
        drafts: counts of MTP layers, which are then planned and moved like the model's own layers.
    """

    def __init__(
        self,
        settings: RebalanceSettings,
        tables: ExpertTables,
        recorder: ExpertRecorder,
        make_transfer: Callable[[], ExpertTransfer],
        world: Group,
        planner: Planner,
        drafts: DraftCounts | None = None,
    ) -> None:
        self.stats = BalanceStats(interval=settings.interval)
        self._interval = EPLBInterval(settings.interval, settings.adaptive)
        self._settings = settings
        self._tables = tables
        self._recorder = recorder
        self._make_transfer = make_transfer
        self._transfer = make_transfer()
        self._world = world
        self.planner = planner
        self._planning_rank = 0
        self._drafts = drafts
        self._passes = 0  # in this stage
        self._stage: Callable[[], None] = self._count
        self._planning: Future[Plan] | None = None
        self._pending: deque[deque[Chunk]] = deque()  # by layer: remaining chunks
        self._in_transit: list[Chunk] = []
        self._last_call: float | None = None
        self._at_start = BalanceStats()
        self._throttle = EPLBThrottle()
        self._log("[EPLBManager] system started, will rebalance per %d iterations.", settings.interval)

    def between_passes(self) -> None:
        """To be called before each pass, on every rank."""
        self._passes += 1
        self._stage()

    def close(self) -> None:
        self.planner.close()

    # -- with other ranks

    def settle(self) -> None:
        """Completes the moves in transit; the remaining ones follow in later passes. Between the same two passes on
        every rank."""
        for chunk, prepared in zip(self._in_transit, self._transfer.finish() if self._in_transit else ()):
            self._tables.update_layer(chunk.layer, chunk.table, self.counter_of(chunk.layer), prepared)
        self._in_transit = []

    def reset(self) -> NDArray[np.int64]:
        """Aborts the current stage; ranks may be at different passes of it. Returns the counts [L, E] since the last
        plan, summed over the ranks of the world; collective."""
        self._planning = None
        self._transfer.give_up()
        self._pending.clear()
        self._in_transit = []
        self._enter(self._count)
        return self._take_counts()

    def restart(self, planner: Planner, planning_rank: int, balancedness: float) -> None:
        """Continues after `reset`, with a placement of this balancedness; collective."""
        self.planner, self._planning_rank = planner, planning_rank
        self.stats.after = balancedness
        self._transfer = self._make_transfer()

    # -- the stages

    def _enter(self, stage: Callable[[], None]) -> None:
        self._stage, self._passes = stage, 0

    def _count(self) -> None:
        if self._passes <= self.stats.interval:
            return
        self._log("[EPLBManager] rebalance start")
        counts = self._take_counts()
        if self._is_planning_rank:
            self._planning = self.planner.submit(counts, self._placement, self._settings.enough)
        self._enter(self._plan)

    def _take_counts(self) -> NDArray[np.int64]:
        window = self._recorder.take_window()
        if self._drafts is not None:
            window = torch.cat([window, self._drafts.take_window()])
        return self._world.all_reduce(window.to(self._world.device)).cpu().numpy()

    def _plan(self) -> None:
        if self._passes % ASK_EVERY:
            return
        plan = NO_MOVES
        length = 0
        if self._planning is not None and self._planning.done():
            plan = self._planned(self._planning)
            length = len(plan.program)
            if plan.unmoved is not None:
                self._interval.after_rebalance(plan.before - plan.unmoved, self.stats.after - plan.before)
        header = self._upload(np.array([length, self._throttle.passes_per_move, self._interval.passes]))
        length, *values = self._world.broadcast(header, self._planning_rank).tolist()
        self.stats.passes_per_move, self.stats.interval = values
        if not length:
            return
        program = self._upload(plan.program if self._is_planning_rank else np.empty(length, dtype=np.int64))
        program = self._world.broadcast(program, self._planning_rank).cpu()
        layers = decode_moves(program.numpy(), self._placement)
        self._pending = deque(deque(chunks) for chunks in layers)
        self.stats.before, self.stats.after = plan.before, plan.after
        self._at_start = BalanceStats(**asdict(self.stats))
        self._last_call = None
        self._enter(self._move)

    def _planned(self, planning: Future[Plan]) -> Plan:
        self._planning = None
        try:
            return planning.result()
        except Exception:
            logger.exception("[EPLBManager] planning failed; experts are not moved")
            return NO_MOVES

    def _move(self) -> None:
        self._recorder.settle()  # due in this pass anyway: not part of the cost of moves
        began = time.perf_counter()
        if (self._passes - 1) % self.stats.passes_per_move:
            self._record_pause(began)
            return
        moved = bool(self._in_transit)
        self.settle()
        transfer_seconds = self._transfer.way_seconds
        active = [self._pending.popleft() for _ in range(min(self._settings.layers_at_once, len(self._pending)))]
        self._in_transit = [chunks.popleft() for chunks in active]
        self._pending.extendleft(chunks for chunks in reversed(active) if chunks)
        prepare = self._tables.prepare
        received = self._transfer.begin(self._in_transit, lambda chunk: prepare(chunk.layer, chunk.table))
        self.stats.experts_received += received
        pause = self._record_pause(began)
        if moved:
            self._throttle.add_move(pause, transfer_seconds)
        if not self._in_transit:
            self._finish()

    def _record_pause(self, began: float) -> float:
        """Records a pause that began at `began` and ends now; returns its seconds."""
        stats, pause = self.stats, time.perf_counter() - began
        if self._last_call is not None:
            stats.moving_seconds += began - self._last_call
            stats.moving_passes += 1
            self._throttle.add_pass(began - self._last_call)
        stats.pause_seconds += pause
        stats.longest_pause = max(stats.longest_pause, pause)
        self._last_call = began
        return pause

    def _finish(self) -> None:
        stats, start = self.stats, self._at_start
        stats.rebalances += 1
        seconds, pauses = stats.moving_seconds - start.moving_seconds, stats.pause_seconds - start.pause_seconds
        passes = stats.moving_passes - start.moving_passes
        self._log(
            "[EPLBManager] rebalance end time=%.3fs; rank %d received %d experts in %d steps, pausing %.2f ms a step "
            "(%.1f %%, longest %.2f ms); balancedness of the counted steps %.3f, planned %.3f",
            seconds,
            self._world.rank,
            stats.experts_received - start.experts_received,
            passes,
            1e3 * pauses / max(passes, 1),
            100 * pauses / seconds if seconds else 0.0,
            1e3 * stats.longest_pause,
            stats.before,
            stats.after,
        )
        self._enter(self._count)

    # -- helpers

    @property
    def _placement(self) -> ExpertPlacement:
        """Placement of the layers that move."""
        return self._tables.placement if self._drafts is None else self._tables.whole_placement

    def counter_of(self, layer: int) -> ExpertRecorder | DraftCounts | None:
        """None: an MTP layer that does not draft."""
        return self._recorder if layer < self._tables.num_layers else self._drafts

    @property
    def _is_planning_rank(self) -> bool:
        return self._world.rank == self._planning_rank

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        return upload(values, self._world.device)

    def _log(self, line: str, *args: object) -> None:
        if self._is_planning_rank:
            logger.info(line, *args)
