"""What is written to the log and to /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag

LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class LoggingArgs:
    log_level: str = flag(
        "info", "Least severe messages that are printed.", choices=LEVELS, synonyms={"warn": "warning"}
    )
    log_level_http: str | None = flag(
        None,
        "The same for lines of the HTTP server. Left out: --log-level.",
        choices=LEVELS,
        synonyms={"warn": "warning"},
    )
    uvicorn_access_log_exclude_prefixes: str = flag(
        "",
        "Requests whose path begins with one of these get no line in the log, for instance /health /metrics. Left "
        "out: all get one.",
        many=True,
        metavar="PATH",
    )
    log_requests: bool = flag(False, "Log each request when it arrives and when it ends.")
    log_requests_level: int = flag(
        2,
        "What --log-requests writes. 0: metadata; 1: and sampling parameters; 2: and the beginning of texts; "
        "3: everything.",
        metavar="0..3",
    )
    enable_metrics: bool = flag(False, "Serve Prometheus metrics at /metrics.")
    decode_log_interval: int = flag(40, "Decode steps between two `Decode batch` lines.", metavar="STEPS")
