"""Prometheus metrics of expert balance; present only if the engine records or rebalances experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_engine.server.metric_families import MetricFamilies

# name -> (field of the state, help text)
_COUNTERS = {
    "eplb_rebalances_total": ("rebalances", "Number of rebalances (moves of experts to a new plan)."),
    "eplb_experts_received_total": ("experts_received", "Experts received from other ranks (rank 0)."),
    "eplb_pause_seconds_total": ("pause_seconds", "Time that steps waited for expert moves (rank 0), s."),
}
_GAUGES = {
    "eplb_longest_pause_seconds": ("longest_pause", "Longest wait of one step for expert moves (rank 0), s."),
    "eplb_pause_share": ("pause_share", "Share of waits for moves in the time of steps with expert moves (rank 0)."),
    "eplb_planned_balancedness": ("after", "Mean over max tokens of the ranks expected from the last plan."),
}


class ExpertMetrics:
    """Set from the state that the cores report (`worker.eplb.expert_control.ExpertControl.state`)."""

    def __init__(self, families: MetricFamilies) -> None:
        self._gauges = {name: families.gauge(name, text) for name, (_, text) in _GAUGES.items()}
        self._counters = {name: families.counter(name, text) for name, (_, text) in _COUNTERS.items()}
        self._counted = dict.fromkeys(_COUNTERS, 0.0)
        text = "Mean over max tokens of the ranks, averaged over layers and the last passes."
        self._balancedness = families.gauges_by("window", "eplb_balancedness", text)

    def set(self, states: Sequence[Mapping[str, Any]]) -> None:
        """`states`: of the cores that report it; only the first one is used, whose rank 0 is the world's."""
        for state in states[:1]:
            for window, value in state.get("balancedness", {}).items():
                self._balancedness(window).set(value)
            if "eplb" in state:
                self._set_eplb(state["eplb"])

    def _set_eplb(self, eplb: Mapping[str, float]) -> None:
        for name, (key, _) in _GAUGES.items():
            self._gauges[name].set(eplb[key])
        for name, (key, _) in _COUNTERS.items():
            self._counters[name].inc(max(0.0, eplb[key] - self._counted[name]))
            self._counted[name] = max(self._counted[name], eplb[key])
