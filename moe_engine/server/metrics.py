"""Prometheus metrics under SGLang's names: counters and histograms of the frontend, gauges read at scrape time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import prometheus_client as prom

from moe_engine.config.buckets import token_buckets
from moe_engine.config.logging import LoggingArgs
from moe_engine.frontend.client_api import EngineClient, EngineInfo
from moe_engine.frontend.generation import Generation
from moe_engine.frontend.sequence import Observer
from moe_engine.server.experts_metrics import ExpertMetrics
from moe_engine.server.metric_families import MetricFamilies
from moe_engine.server.prefill_delayer_metrics import PrefillDelayerMetrics
from moe_engine.server.speculation_metrics import SpeculationMetrics

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_ITL = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8)
_E2E = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 350, 500, 1000)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 200, 500, 1000)
_TOKENS = (10, 30, 60, 100, 200, 400, 700, 1000, 1500, 2000, 3000, 5000, 8000, 16000, 32000, 64000, 128000)


@dataclass(frozen=True)
class Buckets:
    """Upper bounds of the buckets: of latencies in seconds, of prompt and output lengths in tokens."""

    ttft: tuple[float, ...] = _TTFT
    itl: tuple[float, ...] = _ITL
    e2e: tuple[float, ...] = _E2E
    prompt_sizes: tuple[float, ...] = _TOKENS
    output_sizes: tuple[float, ...] = _TOKENS

    @classmethod
    def of(cls, flags: LoggingArgs) -> Buckets:
        given = {
            "ttft": flags.bucket_time_to_first_token,
            "itl": flags.bucket_inter_token_latency,
            "e2e": flags.bucket_e2e_request_latency,
        }
        found = {name: tuple(map(float, words.split())) for name, words in given.items() if words is not None}
        rules = {"prompt_sizes": flags.prompt_tokens_buckets, "output_sizes": flags.generation_tokens_buckets}
        for name, rule in rules.items():
            found[name] = (token_buckets(rule) if rule is not None else None) or _TOKENS
        return cls(**found)


_GAUGES = {
    "num_running_reqs": ("", "Requests running now."),
    "num_queue_reqs": ("", "Requests waiting."),
    "num_used_tokens": ("", "KV slots held by running requests."),
    "token_usage": ("", "Share of the KV pool in use."),
    "kv_used_tokens": ("num_used", "KV slots held by running requests, as the schedulers count them."),
    "kv_available_tokens": ("num_free", "KV slots that are free."),
    "kv_evictable_tokens": ("num_evictable", "KV slots with cached prefixes that are not in use."),
    "gen_throughput": ("last_gen_throughput", "Generated tokens per second."),
    "cache_hit_rate": ("cache_hit_rate", "Share of the last prefill batch's tokens found in the prefix cache."),
    "num_retracted_reqs": ("num_retracted", "Requests retracted to the queue because KV slots ran out."),
    "new_token_ratio": ("new_token_ratio", "Share of the remaining output length that admission reserves."),
    "utilization": ("", "Running requests over the maximum."),
    "is_cuda_graph": ("is_cuda_graph", "Schedulers whose last decode step was replayed from a CUDA graph."),
    "compilations_after_ready": ("compilations_after_ready", "Kernels compiled after READY."),
    "num_alive_schedulers": ("", "Data-parallel ranks alive."),
    "max_total_num_tokens": ("", "KV slots."),
    "page_size": ("", "KV slots per page."),
    "context_len": ("", "Longest sequence, tokens."),
    "weight_memory_usage_gb": ("", "Memory of the weights, GB."),
    "kv_cache_memory_usage_gb": ("", "Memory of the KV pool, GB."),
    "hicache_host_used_tokens": ("host_used_tokens", "Tokens in the host-RAM tier of the KV cache."),
    "hicache_storage_paused": ("storage_paused", "Schedulers that do not read their storage because it hangs."),
    "num_decode_transfer_queue_reqs": (
        "num_incoming_transfers",
        "Requests whose KV is on its way from a prefill server.",
    ),
    "num_prefill_inflight_queue_reqs": (
        "num_outgoing_transfers",
        "Requests whose KV is on its way to a decode server.",
    ),
    "hicache_host_total_tokens": (
        "host_total_tokens",
        "Size of the host-RAM tier of the KV cache in tokens; 0 without it.",
    ),
}
"""Name -> (field of a core's state, or empty: set from elsewhere; help text)."""
_MEANS = {"cache_hit_rate", "new_token_ratio"}
"""Averaged over several schedulers; all others are summed."""

_TOTALS_FROM_STATE = {
    "num_retracted_requests_total": (
        "num_retractions_total",
        "Number of retractions of running requests to the queue.",
    ),
    "num_preemptions_total": (
        "num_preemptions_total",
        "Number of running requests returned to the queue for a more urgent one.",
    ),
    "num_waiting_timeouts_total": (
        "waiting_timeouts_total",
        "Requests that waited for longer than --request-waiting-timeout.",
    ),
    "num_running_timeouts_total": (
        "running_timeouts_total",
        "Requests that ran for longer than --request-running-timeout.",
    ),
    "hicache_host_hit_tokens_total": ("host_hit_tokens_total", "Tokens loaded from the host-RAM tier of the KV cache."),
    "hicache_storage_hit_tokens_total": (
        "storage_hit_tokens_total",
        "Of the tokens loaded from the host-RAM tier, those that were read from storage.",
    ),
    "hicache_storage_backed_up_tokens_total": (
        "storage_backed_up_tokens_total",
        "Tokens written to the storage below the host-RAM tier.",
    ),
    "kv_transferred_tokens_total": ("transferred_tokens_total", "Tokens whose KV arrived from prefill servers."),
    "num_transfer_failed_reqs_total": (
        "failed_transfers_total",
        "Transfers of KV that failed; the prompts were computed by the decode server.",
    ),
}

_PARTS: dict[str, tuple[Callable[[MetricFamilies], Any], Callable[[Mapping[str, Any]], Any]]] = {
    "speculation": (SpeculationMetrics, lambda state: state.get("speculation")),
    "experts": (ExpertMetrics, lambda state: state if "eplb" in state or "balancedness" in state else None),
    "prefill_delayer": (PrefillDelayerMetrics, lambda state: state.get("prefill_delayer")),
}
"""Metrics that begin when a core first reports their part of the state: how they are made, and that part."""


class Metrics(Observer):
    """An `Observer` of the frontend that renders the Prometheus page."""

    def __init__(
        self,
        model_name: str,
        info: EngineInfo,
        version: str,
        buckets: Buckets = Buckets(),
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`labels`: more labels of every metric (`--extra-metric-labels`)."""
        self.registry = prom.CollectorRegistry()
        prom.ProcessCollector(registry=self.registry)
        prom.GCCollector(registry=self.registry)
        build = prom.Info("moe_engine_build", "The running version and the model.", registry=self.registry)
        build.info({"version": version, "model_name": model_name, "model_type": info.model_type, "dtype": info.dtype})
        self._info = info
        all_labels = {
            "model_name": model_name,
            "engine_type": "unified",
            "tp_rank": "0",
            "pp_rank": "0",
            "moe_ep_rank": "0",
            "dp_rank": "0",
            **labels,
        }
        self.families = families = MetricFamilies(self.registry, all_labels)
        prom.disable_created_metrics()
        self._prompt_tokens = families.counter("prompt_tokens_total", "Prompt tokens processed.")
        self._generation_tokens = families.counter("generation_tokens_total", "Tokens generated.")
        self._cached_tokens = families.counter("cached_tokens_total", "Prompt tokens found in the prefix cache.")
        self._requests = families.counter("num_requests_total", "Requests processed.")
        self._aborted = families.counter("num_aborted_requests_total", "Requests aborted.")
        self._ttft = families.histogram("time_to_first_token_seconds", "Time to the first token.", buckets.ttft)
        self._itl = families.histogram("inter_token_latency_seconds", "Time between tokens.", buckets.itl)
        self._e2e = families.histogram("e2e_request_latency_seconds", "Time of a whole request.", buckets.e2e)
        self._queue = families.histogram("queue_time_seconds", "Time spent waiting.", _QUEUE)
        self._prompt_sizes = families.histogram("prompt_tokens_histogram", "Prompt lengths.", buckets.prompt_sizes)
        self._output_sizes = families.histogram("generation_tokens_histogram", "Output lengths.", buckets.output_sizes)
        self._totals = {name: families.counter(name, text) for name, (_, text) in _TOTALS_FROM_STATE.items()}
        self._seen: dict[tuple[str, int], int] = {}
        """The last total of each scheduler, by metric and data-parallel rank: a lost one has no state."""
        self._gauges = {name: families.gauge(name, text) for name, (_, text) in _GAUGES.items()}
        self._parts: dict[str, Any] = {}

    # -- Observer

    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None:
        self._generation_tokens.inc(count)
        if first:
            self._ttft.observe(seconds)
            count -= 1
            seconds = 0.0
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(self, generation: Generation) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(len(generation.prompt_ids))
        self._cached_tokens.inc(generation.cached_tokens)
        self._prompt_sizes.observe(len(generation.prompt_ids))
        self._output_sizes.observe(len(generation.output_ids))
        if generation.finish is None or generation.finish["type"] == "abort":
            self._aborted.inc()
        else:
            self._queue.observe(generation.queue_time)
            self._e2e.observe((generation.finished_at or time.monotonic()) - generation.received_at)

    # -- the page

    def render(self, client: EngineClient, states: Sequence[dict[str, Any]]) -> bytes:
        """The page; gauges are read from shared memory and the cores' replies."""
        health, info = client.health(), self._info
        alive = sum(health.alive for health in client.healths())
        schedulers = max(1, alive)
        values: dict[str, float] = {
            "num_running_reqs": health.num_running,
            "num_queue_reqs": health.num_waiting,
            "num_used_tokens": health.num_used_tokens,
            "token_usage": health.num_used_tokens / max(1, info.max_total_num_tokens * schedulers),
            "utilization": health.num_running / max(1, info.max_running_requests * schedulers),
            "num_alive_schedulers": alive,
            "max_total_num_tokens": info.max_total_num_tokens,
            "page_size": info.page_size,
            "context_len": info.context_len,
            "weight_memory_usage_gb": info.weight_bytes / 2**30,
            "kv_cache_memory_usage_gb": info.kv_bytes / 2**30,
        }
        for name, (key, _) in _GAUGES.items():
            found = [s[key] for s in states if isinstance(s.get(key), (int, float))]
            if found:
                values[name] = sum(found) / (len(found) if name in _MEANS else 1)
        for name, value in values.items():
            self._gauges[name].set(value)
        for name, (key, _) in _TOTALS_FROM_STATE.items():
            for number, state in enumerate(states):
                rank, total = (name, state.get("dp_rank", number)), state.get(key) or 0
                self._totals[name].inc(max(0, total - self._seen.get(rank, 0)))
                self._seen[rank] = total
        for name, (make, part_of) in _PARTS.items():
            parts = [part for state in states if (part := part_of(state))]
            if parts:
                if name not in self._parts:
                    self._parts[name] = make(self.families)
                self._parts[name].set(parts)
        return prom.generate_latest(self.registry)
