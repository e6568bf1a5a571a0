"""Balance of experts as Prometheus metrics; on the page only where the engine reports or rebalances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client as prom

_EPLB = {
    "eplb_rebalances": "Times that experts were moved to a new plan, since the start.",
    "eplb_experts_received": "Experts that came to a rank from others, since the start (rank 0).",
    "eplb_pause_seconds": "Time that steps waited for moves, since the start (rank 0), s.",
    "eplb_longest_pause_seconds": "Longest wait of one step for moves (rank 0), s.",
    "eplb_pause_share": "Waits for moves over the time of the steps with moves (rank 0).",
    "eplb_planned_balancedness": "Mean over max tokens of the ranks that the last plan should bring.",
}
_KEYS = {
    "eplb_rebalances": "rebalances",
    "eplb_experts_received": "experts_received",
    "eplb_pause_seconds": "pause_seconds",
    "eplb_longest_pause_seconds": "longest_pause",
    "eplb_pause_share": "pause_share",
    "eplb_planned_balancedness": "after",
}


class ExpertGauges:
    """Set from what the cores tell of themselves (`worker.expert_control.ExpertControl.state`)."""

    def __init__(self, registry: prom.CollectorRegistry, labels: Mapping[str, str]) -> None:
        names = list(labels)
        self._labels = labels
        self._gauges = {
            name: prom.Gauge(f"sglang:{name}", text, names, registry=registry).labels(**labels)
            for name, text in _EPLB.items()
        }
        text = "Mean over max tokens of the ranks, averaged over layers and the last passes."
        self._balancedness = prom.Gauge("sglang:eplb_balancedness", text, [*names, "window"], registry=registry)

    def set(self, states: Sequence[Mapping[str, Any]]) -> None:
        """`states` of the cores that have any of it; of several the first one's, whose rank 0 is the world's."""
        for state in states[:1]:
            for window, value in state.get("balancedness", {}).items():
                self._balancedness.labels(**self._labels, window=window).set(value)
            for name, key in _KEYS.items() if "eplb" in state else ():
                self._gauges[name].set(state["eplb"][key])
