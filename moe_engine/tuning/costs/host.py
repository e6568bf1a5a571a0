"""Seconds of a step for which the device waits for the host: schedule, inputs, tokens out."""

from __future__ import annotations

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.step_cost import StepShape


class Host:
    def __init__(self, share: Efficiency) -> None:
        self.step_s, self.row_s = share.step_us * 1e-6, share.row_us * 1e-6

    def seconds(self, shape: StepShape) -> float:
        return self.step_s + shape.decode_rows * self.row_s
