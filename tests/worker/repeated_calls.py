"""CUDA graphs without a device, for the logic around them: a replay calls the captured function again.

Tests of captured graphs are in `simulated_cuda/on_device`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.queries import AttentionBatch


class RepeatedCall:
    """Implements `step_graphs.CapturedGraph`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class RepeatedCalls:
    """Implements `step_graphs.GraphBackend`."""

    def __init__(self) -> None:
        self.num_replays = self.num_captured = 0

    def capture(self, run: Callable[[], None]) -> RepeatedCall:
        def replay() -> None:
            self.num_replays += 1
            run()

        self.num_captured += 1
        return RepeatedCall(replay)


class ReplayableTorch:
    """A torch row of attention with `plan_in_place`: it has no plans, and its layers read the queries."""

    on_device = False
    common = True

    def __init__(self, backend: Any) -> None:
        self.name = backend.name
        self.plan = backend.plan
        self.capabilities = AttentionCapabilities(self.plan_in_place)

    def plan_in_place(self, batch: AttentionBatch) -> ReplayableTorch:
        return self

    def renew(self) -> None:
        """No effect: there is no plan."""


class OnDevice(ReplayableTorch):
    """The same for layers that read lengths on the device."""

    on_device = True
