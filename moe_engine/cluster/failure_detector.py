"""Failure detector of a rank group: from heartbeats, exits and reported errors it finds late and lost ranks.

Silence is measured in this process's own ticks, not by comparing clocks: an interval in which this process was itself
blocked counts as two ticks at most, so that a machine that sleeps or swaps does not lose its ranks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_engine.core.executor import RankLost
from moe_engine.executor.options import DetectorLimits, RankPlace
from moe_engine.executor.progress import Position
from moe_engine.processes.stopped import is_starved

logger = logging.getLogger("moe_engine")

TICK_SECONDS = 0.1
RECENT_STEPS = 32
NO_FOLLOWERS = 1 << 60
SUSPECT_SILENT_SECONDS = 0.8
"""Silence limit once a collective has failed, which means that some rank is lost."""


class Silence:
    """Seconds since the last event, not counting time in which this process was blocked."""

    def __init__(self, tick: float = TICK_SECONDS) -> None:
        self._tick = tick
        self.seconds = 0.0

    def reset(self) -> None:
        self.seconds = 0.0

    def add(self, elapsed: float) -> None:
        self.seconds += min(elapsed, 2 * self._tick)


@dataclass
class RankState:
    place: RankPlace
    host: str = ""
    pid: int = 0
    loaded: bool = False
    kernels: Mapping[str, str] | None = None
    plan_address: str = ""
    core_address: str = ""
    step_address: str = ""
    position: Position = field(default_factory=Position)
    silence: Silence = field(default_factory=Silence)
    still: Silence = field(default_factory=Silence)
    """Since its position last changed."""
    reported: bool = False
    """The 'late' or 'silent during startup' warning for this position was already logged."""


class FailureDetector:
    """Receives events from any thread; `tick` belongs to one. Implements `executor.leader_worker.Detector`.

    Attributes:
        failure: the error that stops the group, or None.

    Args:
        position: position of rank 0 if this process is rank 0; None if rank 0 is monitored like any other.
        own: (host, pid) of rank 0 if this process is rank 0.
    """

    def __init__(
        self,
        places: Sequence[RankPlace],
        limits: DetectorLimits,
        position: Callable[[], Position] | None = None,
        own: tuple[str, int] = ("", 0),
    ) -> None:
        self.failure: RankLost | None = None
        self.config_error = False
        """Whether the failure is a user error: a flag or a checkpoint."""
        self._limits = limits
        self._position = position
        self._ranks = [RankState(place) for place in places]
        self._watched = list(self._ranks)
        self._ranks[0].host, self._ranks[0].pid = own
        self._lock = threading.RLock()
        self._listeners: list[Callable[[RankLost], None]] = []
        self._seconds: deque[float] = deque([0.0], RECENT_STEPS)
        self.armed = False
        """Whether all ranks are ready: from then on missing beats count."""
        self.ending = False
        """Whether shutdown has begun: exits of ranks are no failures."""
        self._suspected: tuple[int, str] | None = None
        self._suspected_time = Silence()
        self._slow_reported = -1

    # -- events

    def joined(self, rank: int, host: str, pid: int, plan_address: str = "") -> None:
        state = self._ranks[rank]
        state.host, state.pid, state.plan_address = host, pid, plan_address
        state.silence.reset()

    def beat(self, rank: int, position: Position) -> None:
        self.runs(rank)
        self._moved(self._ranks[rank], position)

    def runs(self, rank: int) -> None:
        """Its process is alive and reachable."""
        state = self._ranks[rank]
        state.silence.reset()
        if not self.armed:
            state.reported = False

    def loaded(self, rank: int, kernels: Mapping[str, str], core_address: str = "", step_address: str = "") -> None:
        """Fails if ranks chose different kernels: results would differ in the last bits and eventually in a token."""
        with self._lock:
            state = self._ranks[rank]
            state.core_address, state.step_address, state.kernels = core_address, step_address, kernels
            expected = self._ranks[0].kernels
            for other in self._ranks:
                if None not in (expected, other.kernels) and other.kernels != expected:
                    self._fail(
                        f"{self.describe(other.place.rank)} chose the kernels {other.kernels}, rank 0 {expected}: "
                        "set the same for all with --attention-backend and the other backend flags",
                        config_error=True,
                    )
            state.loaded = True

    def died(self, rank: int, how: str) -> None:
        """`how` names the process."""
        if not self.ending:
            self._lose([rank], f"{how} ({self._last_position(rank)})")

    def failed(self, rank: int, message: str, *, peer_lost: bool = False, config_error: bool = False) -> None:
        """A rank failed. With `peer_lost` another rank is at fault, which the detector then waits to identify."""
        if not peer_lost:
            self._fail(f"{self.describe(rank)} failed: {message}", config_error)
            return
        with self._lock:
            if self._suspected is None:
                self._suspected = (rank, message)

    def stepped(self, seconds: float) -> None:
        self._seconds.append(seconds)

    # -- queries

    @property
    def all_loaded(self) -> bool:
        return all(state.loaded for state in self._ranks)

    def plan_address_of(self, group: int) -> str:
        """Address of a group's plan channel; empty until its scheduler has started."""
        leaders = (state for state in self._ranks if state.place.leads)
        return next(state.plan_address for state in leaders if state.place.group == group)

    @property
    def core_addresses(self) -> list[str]:
        """Addresses of all schedulers, by group, once all have loaded; empty for this process's own."""
        return [state.core_address for state in self._ranks if state.place.leads]

    @property
    def step_addresses(self) -> list[str]:
        return [state.step_address for state in self._ranks if state.place.leads]

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group."""
        return [state.place.rank for state in self._watched]

    def slowest_steps_done(self) -> int:
        return min((state.position.steps_done for state in self._ranks[1:]), default=NO_FOLLOWERS)

    def describe(self, rank: int) -> str:
        """``DP0 TP3 (pid 4242 on node7)``."""
        state = self._ranks[rank]
        several = any(other.place.node_rank for other in self._ranks)
        host = f" on {state.host or f'node {state.place.node_rank}'}" if several else ""
        return f"{state.place.name} (pid {state.pid}{host})" if state.pid else f"{state.place.name} (not joined{host})"

    def waited_for(self) -> str:
        """The ranks that are not ready, with their startup phases."""
        return ", ".join(
            self.describe(state.place.rank) + (f" {state.position.phase}" if state.pid else "")
            for state in self._ranks
            if not state.loaded
        )

    def on_failure(self, listener: Callable[[RankLost], None]) -> None:
        """Calls `listener(failure)` once; immediately if the group has failed already."""
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    # -- time

    def arm(self) -> None:
        """Startup is over: late ranks are reported from now on, and the silence limit is shorter."""
        for state in self._ranks:
            state.silence.reset()
            state.still.reset()
        self.armed = True

    def end(self) -> None:
        """Shutdown has begun: exits of ranks are no failures."""
        self.ending = True

    def give_up(self, message: str, *, config_error: bool = False) -> None:
        """Fails the group with this message, which names the ranks itself."""
        self._fail(message, config_error)

    def tick(self, elapsed: float) -> None:
        if self.ending or self.failure is not None:
            return
        if self._position is not None:
            self._moved(self._ranks[0], self._position())
            self._ranks[0].silence.reset()
        if self._suspected is not None:
            self._suspected_time.add(elapsed)
            if self._suspected_time.seconds > self._limits.silent + 1:
                self._fail_suspected(*self._suspected)
        for state in self._watched:
            state.silence.add(elapsed)
            state.still.add(elapsed)
        if self.armed:
            self._find_silent()
            self._report_late()
        else:
            self._find_silent_start()

    def _last_position(self, rank: int) -> str:
        """A rank's last reported position and, because that may be outdated, rank 0's current one."""
        where = f"last sign: {self._ranks[rank].position.describe()}"
        if self._position is None or not self.armed:
            return where
        return f"{where}; rank 0 now: {self._position().describe()}"

    def _find_silent(self) -> None:
        limit = self._limits.silent if self._suspected is None else min(self._limits.silent, SUSPECT_SILENT_SECONDS)
        silent = [state for state in self._watched if state.silence.seconds > limit]
        self._lose_silent([state for state in silent if not self._is_starved(state)])

    def _is_starved(self, state: RankState) -> bool:
        """Whether a silent rank of this machine gets too little processor time for its beats; not longer than
        `start_silent`."""
        if state.place.node_rank or state.silence.seconds > self._limits.start_silent or not is_starved(state.pid):
            return False
        if not state.reported:
            state.reported = True
            name, seconds = self.describe(state.place.rank), state.silence.seconds
            logger.warning("%s silent for %.1f s: it runs; this machine has too few processors", name, seconds)
        return True

    def _find_silent_start(self) -> None:
        """Checks ranks that have joined; `waited_for` lists the others."""
        joined = [state for state in self._ranks if state.pid]
        for state in joined:
            if state.silence.seconds > self._limits.start_late and not state.reported:
                state.reported = True
                name, where = self.describe(state.place.rank), self._last_position(state.place.rank)
                logger.warning("%s silent for %.1f s during startup (%s)", name, state.silence.seconds, where)
        self._lose_silent([state for state in joined if state.silence.seconds > self._limits.start_silent])

    def _lose_silent(self, silent: list[RankState]) -> None:
        if silent:
            ranks = [state.place.rank for state in silent]
            names = ", ".join(map(self.describe, ranks))
            seconds, seen = silent[0].silence.seconds, self._last_position(ranks[0])
            self._lose(ranks, f"{names} silent for {seconds:.1f} s: stopped, or its machine or link is down ({seen})")

    def _report_late(self) -> None:
        """Logs ranks that are stuck behind others; or the step, if all ranks are stuck at the same position."""
        limit, watched = max(self._limits.late, self._limits.late_factor * max(self._seconds)), self._watched
        front = max(state.position.order for state in watched)
        if all(state.position.step < 0 and state.position.order == front for state in watched):
            for state in watched:
                state.still.reset()  # idle
            return
        still = [state for state in watched if state.still.seconds > limit]
        for state in still:
            if state.position.order < front and not state.reported:
                state.reported = True
                name, where = self.describe(state.place.rank), state.position.describe()
                logger.warning("%s is late: %s, %.1f s", name, where, state.still.seconds)
        leader = watched[0].position
        together = len(still) == len(watched) and all(state.position.order == front for state in still)
        if together and leader.step >= 0 and self._slow_reported != leader.step:
            self._slow_reported = leader.step
            seconds = min(state.still.seconds for state in still)
            logger.warning("Every rank is slow: %s, %.1f s", leader.describe(), seconds)

    def _fail_suspected(self, rank: int, message: str) -> None:
        """A collective failed and no rank died or fell silent: the rank furthest behind never entered it."""
        last = min(self._watched, key=lambda state: state.position.order)
        if last.position.order < max(state.position.order for state in self._watched):
            name, where = self.describe(last.place.rank), last.position.describe()
            self._fail(f"{name} never entered the collective: {where}; on {self._ranks[rank].place.name}: {message}")
        else:
            self._fail(f"{self.describe(rank)} failed: {message}")

    def _moved(self, state: RankState, position: Position) -> None:
        if (position.order, position.step) != (state.position.order, state.position.step):
            state.still.reset()
            state.reported = False
        state.position = position

    def _lose(self, ranks: Sequence[int], message: str) -> None:
        """Ranks are lost: fails the group."""
        self._fail(message)

    def _fail(self, message: str, config_error: bool = False) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.config_error = config_error
            self.failure = RankLost(message)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(self.failure)
