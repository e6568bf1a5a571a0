"""Flags of logging and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.config.field import flag
from moe_engine.config.values import parse_json_object

LEVELS = ("debug", "info", "warning", "error", "critical")


def _buckets(what: str) -> Any:
    return flag(
        None,
        f"Upper bounds of the buckets of the {what}, in seconds, rising. Left out: SGLang's.",
        many=True,
        metavar="SECONDS",
    )


def _token_buckets(what: str) -> Any:
    return flag(
        None,
        f"Buckets of the histogram of {what}: `custom N N ...`, `tse MIDDLE BASE COUNT` (the distances from the middle "
        "are powers of the base) or `default`, also if left out.",
        many=True,
        metavar="RULE",
    )


@dataclass(frozen=True)
class LoggingArgs:
    log_level: str = flag(
        "info", "Lowest severity of log lines that are printed.", choices=LEVELS, synonyms={"warn": "warning"}
    )
    log_level_http: str | None = flag(
        None, "Log level of the HTTP server. Left out: --log-level.", choices=LEVELS, synonyms={"warn": "warning"}
    )
    uvicorn_access_log_exclude_prefixes: str = flag(
        "",
        "Path prefixes that are excluded from the access log, for instance /health /metrics. Left out: none.",
        many=True,
        metavar="PATH",
    )
    log_requests: bool = flag(False, "Log each request when it arrives and when it ends.")
    log_requests_level: int = flag(
        2,
        "Detail of --log-requests. 0: metadata; 1: also sampling parameters; 2: also the beginning of texts; 3: full "
        "texts.",
        metavar="0..3",
    )
    log_requests_format: str = flag(
        "text", "Lines of --log-requests. json: one JSON object a line.", choices=("text", "json")
    )
    log_requests_target: str = flag(
        "",
        "Where --log-requests writes: stdout, folders, or both. A folder gets a file for each hour. Left out: the log.",
        many=True,
        metavar="TARGET",
    )
    kv_events_config: str | None = flag(
        None,
        "Publishes what the radix cache stores and evicts, for KV-aware routers: a JSON object with the keys of vLLM "
        "and SGLang: publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic.",
        metavar="JSON",
    )
    enable_metrics: bool = flag(False, "Serve Prometheus metrics at /metrics.")
    extra_metric_labels: str = flag(
        "{}",
        'JSON object with labels of all metrics, for instance \'{"pool": "blue"}\'.',
        parse=parse_json_object,
        metavar="JSON",
    )
    bucket_time_to_first_token: str | None = _buckets("time to the first token")
    bucket_inter_token_latency: str | None = _buckets("time between tokens")
    bucket_e2e_request_latency: str | None = _buckets("time of whole requests")
    prompt_tokens_buckets: str | None = _token_buckets("prompt lengths")
    generation_tokens_buckets: str | None = _token_buckets("output lengths")
    record_step_times: bool = flag(
        False,
        "Keep the newest 20000 steps of a scheduler (requests that decoded, prompt tokens, prompts, their cached "
        "tokens, Unix time, seconds) in /server_info, for comparisons with simulations (SGLANG_RECORD_STEP_TIME in "
        "SGLang).",
    )
    enable_request_time_stats_logging: bool = flag(
        False, "Log a line with the times of each request: queue, prefill, decode, first token, between tokens."
    )
    enable_trace: bool = flag(False, "Export OpenTelemetry traces of requests; needs the extra trace.")
    otlp_traces_endpoint: str = flag(
        "localhost:4318",
        "OTLP/HTTP endpoint of the collector of --enable-trace: HOST:PORT or a URL. SGLang's default, port 4317, is "
        "that of gRPC.",
        metavar="ADDRESS",
    )
    otlp_service_name: str | None = flag(
        None, "`service.name` of the traces. Left out: OTEL_SERVICE_NAME, else moe-engine.", metavar="NAME"
    )
    decode_log_interval: int = flag(40, "Decode steps between two `Decode batch` lines.", metavar="STEPS")
