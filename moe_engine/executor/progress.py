"""How far a rank has come, cheap enough to note in every step and every collective, readable from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from moe_engine.types import StepPlan

IDLE = "idle"


class Position(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank is. Ranks of a group run the same steps and collectives, so positions can be compared."""

    steps_done: int = 0
    """Steps of the group that it has finished, failed ones not among them."""
    operations: int = 0
    """Collective operations that it has entered in its life."""
    step: int = -1
    """Number of the plan in work; -1: none."""
    phase: str = IDLE
    """What the step is doing (`ModelRunner.phase`)."""
    operation: str = ""
    """The collective entered last; a rank ahead of others waits in it."""

    @property
    def order(self) -> tuple[int, int]:
        """Larger is further."""
        return self.steps_done, self.operations

    def describe(self) -> str:
        """``step 812, running the model, after all_gather``."""
        if self.step < 0:
            return self.phase
        return f"step {self.step}, {self.phase}" + (f", after {self.operation}" if self.operation else "")


class Progress:
    """Notes one rank's way. `begin` is called by the thread that hands out plans, `observe` by the one that runs them.

    Args:
        phase: tells what the step in work is doing.
        report_every: `on_stride` is called whenever so many more steps are done.
    """

    def __init__(
        self,
        phase: Callable[[], str] = lambda: IDLE,
        report_every: int = 16,
        on_stride: Callable[[], None] = lambda: None,
    ) -> None:
        self.phase = phase
        self._report_every, self._on_stride = report_every, on_stride
        self.ready = False
        """Set when plans can come; until then `phase` tells how the start goes."""
        self._lock = threading.Lock()
        self._in_work: deque[int] = deque()
        self._steps_done = 0
        self._operations = 0
        self._operation = ""

    def observe(self, operation: str, num_bytes: Any = None) -> None:
        """A `parallel.collectives.Observer`: this rank enters a collective."""
        self._operation = operation
        self._operations += 1

    def restart(self) -> None:
        """All ranks are at the same place again: the steps in work were given up."""
        with self._lock:
            self._in_work.clear()
            self._steps_done = self._operations = 0
            self._operation = ""

    def begin(self, plan: StepPlan) -> None:
        self._in_work.append(plan.number)

    def done(self, future: Future[Any]) -> None:
        """A plan, the oldest in work, has been run; as a callback of its future."""
        if future.exception() is not None:
            return  # the position where it failed stays
        with self._lock:
            self._in_work.popleft()
            self._steps_done += 1
        if self._steps_done % self._report_every == 0:
            self._on_stride()

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def position(self) -> Position:
        with self._lock:
            step, steps_done = (self._in_work[0] if self._in_work else -1), self._steps_done
        phase = self.phase() if step >= 0 or not self.ready else IDLE
        return Position(steps_done, self._operations, step, phase, self._operation)
