"""Metrics under SGLang's names that all have the same labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import prometheus_client as prom


class MetricFamilies:
    """Registers metrics in `registry`, each with `labels` (name -> value)."""

    def __init__(self, registry: prom.CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.registry = registry
        self.labels = labels

    def counter(self, name: str, text: str) -> prom.Counter:
        return prom.Counter(f"sglang:{name}", text, list(self.labels), registry=self.registry).labels(**self.labels)

    def gauge(self, name: str, text: str) -> prom.Gauge:
        return prom.Gauge(f"sglang:{name}", text, list(self.labels), registry=self.registry).labels(**self.labels)

    def gauges_by(self, label: str, name: str, text: str) -> Callable[[str], prom.Gauge]:
        """A gauge for each value of one more label, which the result takes."""
        family = prom.Gauge(f"sglang:{name}", text, [*self.labels, label], registry=self.registry)
        return lambda value: family.labels(**self.labels, **{label: value})

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> prom.Histogram:
        return prom.Histogram(
            f"sglang:{name}", text, list(self.labels), registry=self.registry, buckets=tuple(buckets)
        ).labels(**self.labels)
