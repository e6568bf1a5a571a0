"""Prometheus metrics of ``--enable-prefill-delayer``, with SGLang's names; present only if it is enabled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from moe_engine.server.metric_families import MetricFamilies

_LABELS = ("input_estimation", "output_allow", "output_reason", "actual_execution")
_HISTOGRAMS = {
    "passes": ("prefill_delayer_wait_forward_passes", "Steps that prompts waited by --enable-prefill-delayer."),
    "seconds": ("prefill_delayer_wait_seconds", "Seconds that prompts waited by --enable-prefill-delayer."),
}
_OUTCOMES = ("prefill_delayer_outcomes", "Decisions of --enable-prefill-delayer, one a step.")


class PrefillDelayerMetrics:
    """Registers itself. Shows the state that the schedulers report (`PrefillDelayer.state`), as a sum over them."""

    def __init__(self, families: MetricFamilies) -> None:
        self._names, self._values = list(families.labels), list(families.labels.values())
        self._states: Sequence[Mapping[str, Any]] = ()
        families.registry.register(self)

    def set(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for key, (name, text) in _HISTOGRAMS.items():
            found = [state[key] for state in self._states]
            if not found:
                continue
            counts = [sum(column) for column in zip(*(part["counts"] for part in found))]
            bounds = [*map(str, found[0]["bounds"]), "+Inf"]
            histogram = HistogramMetricFamily(f"sglang:{name}", text, labels=self._names)
            histogram.add_metric(self._values, list(zip(bounds, counts)), sum(part["sum"] for part in found))
            yield histogram
        totals: dict[tuple[str, ...], int] = {}
        for state in self._states:
            for groups, allow, reason, executed, count in state["outcomes"]:
                key_values = (groups, str(allow).lower(), reason, str(executed).lower())
                totals[key_values] = totals.get(key_values, 0) + count
        outcomes = CounterMetricFamily(f"sglang:{_OUTCOMES[0]}", _OUTCOMES[1], labels=[*self._names, *_LABELS])
        for values, count in totals.items():
            outcomes.add_metric([*self._values, *values], count)
        yield outcomes
