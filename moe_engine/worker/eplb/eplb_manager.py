"""EPLB while the engine serves: counts over some passes, a plan, and experts that move a few at a time.

All ranks call `between_passes` at the same passes, and what they do there follows from the number of the pass and from
what one of them, the planning rank, sent, so no rank ever acts alone:

    counting   until the interval is over; then the ranks sum their counts
    planning   on a thread of the planning rank; every few passes it tells the others whether the plan is there
    moving     one chunk a pass, or every few passes where those are short: it travels into spare slots meanwhile, in a
               lane, where the layer's table is made too; before the next pass both are put in place

Legend: L layers, E logical experts, P slots.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_engine.parallel.collectives import Group
from moe_engine.parallel.expert_settings import RebalanceSettings
from moe_engine.parallel.expert_tables import ExpertTables
from moe_engine.parallel.expert_transfer import ExpertTransfer
from moe_engine.parallel.placement.balance import balancedness
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import Chunk, plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.program import decode_moves, encode_moves
from moe_engine.parallel.placement.replicas import LayerChoice
from moe_engine.parallel.placement.survivors import plan_for_survivors
from moe_engine.parallel.recording.draft_counts import DraftCounts
from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.worker.eplb.eplb_throttle import EPLBThrottle

logger = logging.getLogger("moe_engine")

ASK_EVERY = 4
"""Passes between two looks at whether there is a plan."""
MIN_GAIN = 0.01
"""Balancedness that a layer gives up rather than move more experts."""


@dataclass(frozen=True)
class Plan:
    """How to get there, and what it brings: balancedness of the counted passes as it was, and in the new place."""

    program: NDArray[np.int64]
    before: float = 1.0
    after: float = 1.0


NO_MOVES = Plan(np.zeros(1, dtype=np.int64))


class Planner:
    """Makes plans beside the steps, on the planning rank. `close` waits for the one in work."""

    def __init__(self, layout: ExpertLayout, policy: str, executor: Executor) -> None:
        self.alive = (True,) * layout.num_ranks
        """The ranks to plan for."""
        self._layout = layout
        self._policy = policy
        self._executor = executor

    def submit(self, counts: NDArray[np.int64], current: ExpertPlacement, enough: float) -> Future[Plan]:
        """A plan for counts [L, E]; `NO_MOVES` where the balancedness is `enough` already."""
        return self._executor.submit(self.plan, counts, current, enough)

    def plan(self, counts: NDArray[np.int64], current: ExpertPlacement, enough: float) -> Plan:
        alive = self.alive
        before = balancedness(current.of_ranks(alive), counts)
        if not counts.any() or before > enough:
            return NO_MOVES
        new = plan_for_survivors(counts, self._layout, alive, current, self._policy, MIN_GAIN).placement
        moves = plan_moves(current, new, num_nodes=self._layout.num_nodes)
        return Plan(encode_moves(moves), before, balancedness(new.of_ranks(alive), counts))

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


@dataclass
class BalanceStats:
    """Of this rank, since the start. Seconds of pauses are those between passes; `moving_seconds` are the passes' own,
    pauses included."""

    rebalances: int = 0
    experts_received: int = 0
    moving_passes: int = 0
    moving_seconds: float = 0.0
    pause_seconds: float = 0.0
    longest_pause: float = 0.0
    passes_per_move: int = 1
    """That a chunk is given, as the planning rank has measured before."""
    before: float = 1.0
    """Balancedness of the counted passes, as they were and as planned: of the last plan."""
    after: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, and ``pause_share``: the part of the time of passes with moves that they paused."""
        share = self.pause_seconds / self.moving_seconds if self.moving_seconds else 0.0
        return asdict(self) | {"pause_share": share}


class EPLBManager:
    """One rank's part in rebalancing.

    Args:
        settings: when.
        tables: the placement in force, which this changes.
        recorder: counts, with a window that this empties.
        make_transfer: with as many spare slots as layers move at once; collective.
        world: all ranks of the model. Operations in it happen between passes, so they cannot meet those of a step.
        planner: asked on the planning rank alone: the first that was not lost.
        drafts: counts in MTP layers, which are then planned and moved as the model's own layers.
        clock: seconds.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = BalanceStats()
        self._settings = settings
        self._tables = tables
        self._recorder = recorder
        self._make_transfer = make_transfer
        self._transfer = make_transfer()
        self._world = world
        self._planner = planner
        self._planning_rank = 0
        self._drafts = drafts
        self._clock = clock
        self._passes = 0  # in this stage
        self._stage: Callable[[], None] = self._count
        self._planning: Future[Plan] | None = None
        self._waiting: deque[deque[Chunk]] = deque()  # layers, and what is left to do in each
        self._under_way: list[Chunk] = []
        self._last_call: float | None = None
        self._at_start = BalanceStats()
        self._pace = EPLBThrottle()
        self._log("[EPLBManager] system started, will rebalance per %d iterations.", settings.interval)

    def between_passes(self) -> None:
        """Before each pass, on every rank."""
        self._passes += 1
        self._stage()

    def close(self) -> None:
        self._planner.close()

    # -- ranks were lost

    def forget(self) -> NDArray[np.int64]:
        """Leaves the stage that it was in, for ranks may have been at different passes of it. Returns the counts since
        the last plan, summed over the ranks that are left, as a plan takes them [L, E]; collective among them."""
        self._planning = None
        self._transfer.give_up()
        self._waiting.clear()
        self._under_way = []
        self._enter(self._count)
        return self._take_counts()

    def begin_anew(self, alive: Sequence[bool], balancedness: float) -> None:
        """Balances among the ranks alive from now on, whose placement has that balancedness; collective among them."""
        self._planner.alive = tuple(alive)
        self._planning_rank = self._planner.alive.index(True)
        self.stats.after = balancedness
        self._transfer = self._make_transfer()

    # -- the stages

    def _enter(self, stage: Callable[[], None]) -> None:
        self._stage, self._passes = stage, 0

    def _count(self) -> None:
        if self._passes <= self._settings.interval:
            return
        self._log("[EPLBManager] rebalance start")
        counts = self._take_counts()
        if self._plans:
            self._planning = self._planner.submit(counts, self._placement, self._settings.enough)
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
        told = self._tensor(torch.tensor([length, self._pace.passes_per_move]))
        length, self.stats.passes_per_move = self._world.broadcast(told, self._planning_rank).tolist()
        if not length:
            return
        program = torch.from_numpy(plan.program) if self._plans else torch.zeros(length, dtype=torch.int64)
        program = self._world.broadcast(self._tensor(program), self._planning_rank).cpu()
        layers = decode_moves(program.numpy(), self._placement)
        self._waiting = deque(deque(chunks) for chunks in layers)
        self.stats.before, self.stats.after = plan.before, plan.after
        self._at_start = BalanceStats(**asdict(self.stats))
        self._last_call = None
        self._enter(self._move)

    def _planned(self, planning: Future[Plan]) -> Plan:
        self._planning = None
        try:
            return planning.result()
        except Exception:
            logger.exception("[EPLBManager] no plan could be made; experts stay where they are")
            return NO_MOVES

    def _move(self) -> None:
        self._recorder.settle()  # this pass owes it anyway: it is not what moves cost
        began = self._clock()
        if (self._passes - 1) % self.stats.passes_per_move:
            self._note_pause(began)
            return
        moved = bool(self._under_way)
        if moved:
            for chunk, prepared in zip(self._under_way, self._transfer.finish()):
                self._tables.update_layer(chunk.layer, chunk.table, self.counter_of(chunk.layer), prepared)
        way = self._transfer.way_seconds
        active = [self._waiting.popleft() for _ in range(min(self._settings.layers_at_once, len(self._waiting)))]
        self._under_way = [chunks.popleft() for chunks in active]
        self._waiting.extendleft(chunks for chunks in reversed(active) if chunks)
        self.stats.experts_received += self._transfer.begin(self._under_way, self._prepare)
        pause = self._note_pause(began)
        if moved:
            self._pace.moved(pause, way)
        if not self._under_way:
            self._ended()

    def _prepare(self, chunk: Chunk) -> LayerChoice:
        return self._tables.prepare(chunk.layer, chunk.table)

    def _note_pause(self, began: float) -> float:
        """Which ends now, after so many seconds."""
        stats, pause = self.stats, self._clock() - began
        if self._last_call is not None:
            stats.moving_seconds += began - self._last_call
            stats.moving_passes += 1
            self._pace.passed(began - self._last_call)
        stats.pause_seconds += pause
        stats.longest_pause = max(stats.longest_pause, pause)
        self._last_call = began
        return pause

    def _ended(self) -> None:
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

    # -- pieces

    @property
    def _placement(self) -> ExpertPlacement:
        """Of the layers that move."""
        return self._tables.placement if self._drafts is None else self._tables.whole_placement

    def counter_of(self, layer: int) -> ExpertRecorder | DraftCounts:
        if layer < self._tables.num_layers:
            return self._recorder
        assert self._drafts is not None
        return self._drafts

    @property
    def _plans(self) -> bool:
        return self._world.rank == self._planning_rank

    def _tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._world.device)

    def _log(self, line: str, *args: object) -> None:
        if self._plans:
            logger.info(line, *args)
