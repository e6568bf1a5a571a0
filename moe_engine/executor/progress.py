"""Progress of a rank: cheap enough to update in every step and collective, readable from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from moe_engine.types import StepPlan

IDLE = "idle"
STRIDE = 16
"""Finished steps between two calls of `on_stride`."""


class Position(msgspec.Struct, array_like=True, frozen=True):
    """Position of a rank. Ranks of a group run the same steps and collectives, so positions are comparable."""

    steps_done: int = 0
    """Steps of the group that it has finished, not counting failed ones."""
    operations: int = 0
    """Collective operations that it has entered."""
    step: int = -1
    """Number of the running plan; -1: none."""
    phase: str = IDLE
    """Phase of the step (`ModelRunner.phase`)."""
    operation: str = ""
    """The collective entered last; a rank ahead of the others waits in it."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key; larger is further ahead."""
        return self.steps_done, self.operations

    def describe(self) -> str:
        """``step 812, running the model, after all_gather``."""
        if self.step < 0:
            return self.phase
        return f"step {self.step}, {self.phase}" + (f", after {self.operation}" if self.operation else "")


class Progress:
    """Tracks a rank's position. `begin` is called by the thread that sends plans, `observe` by the one that runs them.

    Args:
        phase: returns the phase of the running step.
    """

    def __init__(self, phase: Callable[[], str] = lambda: IDLE, on_stride: Callable[[], None] = lambda: None) -> None:
        self.phase = phase
        self._on_stride = on_stride
        self.ready = False
        """Set when plans can arrive; until then `phase` is the phase of the startup."""
        self._lock = threading.Lock()
        self._in_work: deque[int] = deque()
        self._steps_done = 0
        self._operations = 0
        self._operation = ""

    def observe(self, operation: str, num_bytes: Any = None) -> None:
        """A `parallel.collectives.Observer`: called when this rank enters a collective."""
        self._operation = operation
        self._operations += 1

    def restart(self) -> None:
        """Resets to zero after the steps in flight were abandoned."""
        with self._lock:
            self._in_work.clear()
            self._steps_done = self._operations = 0
            self._operation = ""

    def begin(self, plan: StepPlan) -> None:
        self._in_work.append(plan.number)

    def done(self, future: Future[Any]) -> None:
        """Done callback of a plan's future; the plan is the oldest one in flight."""
        if future.exception() is not None:
            return  # keeps the position of the failure
        with self._lock:
            self._in_work.popleft()
            self._steps_done += 1
        if self._steps_done % STRIDE == 0:
            self._on_stride()

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def position(self) -> Position:
        with self._lock:
            step, steps_done = (self._in_work[0] if self._in_work else -1), self._steps_done
        phase = self.phase() if step >= 0 or not self.ready else IDLE
        return Position(steps_done, self._operations, step, phase, self._operation)
