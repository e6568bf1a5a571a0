"""Prometheus metrics of speculative decoding; present only if it is enabled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_engine.server.metric_families import MetricFamilies

_GAUGES = {
    "spec_accept_length": "Tokens per request and verify step, including the target's own; since startup.",
    "spec_accept_rate": "Share of drafts accepted, since startup.",
    "spec_num_steps": "Draft depth of the last planned step.",
}
_BY_POSITION = ("spec_position_accept_rate", "Share of verify steps that accepted all drafts up to this position.")


class SpeculationMetrics:
    def __init__(self, families: MetricFamilies) -> None:
        self._gauges = {name: families.gauge(name, text) for name, text in _GAUGES.items()}
        self._by_position = families.gauges_by("position", *_BY_POSITION)

    def set(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """`ranks`: each rank's `SpecStats` as a dict."""
        proposed = [sum(counts) for counts in zip(*(rank["proposed"] for rank in ranks))]
        accepted = [sum(counts) for counts in zip(*(rank["accepted"] for rank in ranks))]
        steps = sum(rank["verify_total"] for rank in ranks)
        self._gauges["spec_accept_length"].set(1.0 + sum(accepted) / max(steps, 1))
        self._gauges["spec_accept_rate"].set(sum(accepted) / max(sum(proposed), 1))
        self._gauges["spec_num_steps"].set(max(rank["depth"] for rank in ranks))
        for position, (hits, tries) in enumerate(zip(accepted, proposed), 1):
            self._by_position(str(position)).set(hits / max(tries, 1))
