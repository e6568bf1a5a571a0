"""Metrics, table and chart of a serving run; names and rows are bench_serving's.

Used by `benchmarks.serving` and `moe-engine simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.gap_histogram import GapHistogram
from moe_engine.tuning.stats import mean, median, percentile, std

WIDTH = 50
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str] | None) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` -> milliseconds by metric.

    Raises:
        ValueError: unknown metric or not a number.
    """
    limits: dict[str, float] = {}
    for pair in pairs or []:
        name, colon, value = pair.partition(":")
        if not colon or name not in GOODPUT_METRICS:
            raise ValueError(f"--goodput {pair}: write {', '.join(f'{m}:MS' for m in GOODPUT_METRICS)}")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if not 0 < limits[name] < math.inf:
            raise ValueError(f"--goodput {pair}: MS must be a number of milliseconds above 0")
    return limits


def is_good(answer: Answer, limits: dict[str, float]) -> bool:
    """True if the answer met every limit (milliseconds)."""
    measured = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency}
    return answer.success and all(measured[name] * 1e3 <= limit for name, limit in limits.items())


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """``mean_<name>_ms`` and the like."""
    values = [value * 1e3 for value in seconds]
    figures = {f"mean_{name}_ms": mean(values), f"median_{name}_ms": median(values), f"std_{name}_ms": std(values)}
    figures |= {f"p{q}_{name}_ms": percentile(values, q) for q in (90, 95, 99)}
    return figures | {f"max_{name}_ms": max(values, default=0.0)}


def peak_output_throughput(answers: Sequence[Answer]) -> float:
    """Max tokens received in one full second of the run."""
    seconds: dict[int, int] = {}
    origin = min((answer.started for answer in answers), default=0.0)
    for answer in answers:
        moment = answer.started - origin + answer.ttft
        with_first_chunk = answer.output_len - len(answer.itl)
        for gap in [0.0] * with_first_chunk + answer.itl:
            moment += gap
            seconds[int(moment)] = seconds.get(int(moment), 0) + 1
    return float(max(seconds.values(), default=0))


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """Max concurrent requests."""
    changes = [(answer.started, 1) for answer in answers] + [
        (answer.started + answer.latency, -1) for answer in answers
    ]
    running = most = 0
    for _, change in sorted((round(moment, 9), change) for moment, change in changes):  # an end before a start
        running += change
        most = max(most, running)
    return most


def figures(
    answers: Sequence[Answer],
    duration: float,
    *,
    goodput: dict[str, float] | None = None,
    retokenized: int | None = None,
    accept_length: float | None = None,
    gaps: GapHistogram | None = None,
) -> dict[str, Any]:
    """The metrics of a run of `duration` seconds. Failed requests count only in ``failed``.

    Args:
        gaps: the gaps between tokens, of answers whose `itl` is empty.
    """
    done = [answer for answer in answers if answer.success]
    inputs, outputs = sum(a.prompt_len for a in done), sum(a.output_len for a in done)
    values: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": outputs if retokenized is None else retokenized,
        "total_cached_tokens": sum(a.cached_tokens for a in done),
        "retractions": sum(a.retractions for a in done),
        "request_throughput": len(done) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        "concurrency": sum(a.latency for a in done) / duration,
        "max_output_tokens_per_s": peak_output_throughput(done) if gaps is None else gaps.peak_tokens,
        "max_concurrent_requests": peak_concurrency(done),
        "accept_length": accept_length,
    }
    values |= distribution("e2e_latency", [a.latency for a in done])
    values |= distribution("ttft", [a.ttft for a in done])
    values |= distribution("tpot", [a.tpot for a in done if a.tpot is not None])
    if gaps is None:
        values |= distribution("itl", [gap for a in done for gap in a.itl])
    else:
        values |= gaps.distribution("itl")
    if goodput:
        values["request_goodput"] = sum(is_good(a, goodput) for a in done) / duration
        values["goodput_limits_ms"] = goodput
    return values


def row(label: str, value: Any) -> str:
    return f"{label:<40} {value:<10}"


def _section(title: str, name: str, values: dict[str, Any], more: Sequence[tuple[str, str]] = ()) -> list[str]:
    lines = [f"{title:-^{WIDTH}}"]
    short = {"e2e_latency": "E2E Latency"}.get(name, name.upper())
    kinds = [("Mean", "mean"), ("Median", "median"), ("P90", "p90"), ("P95", "p95"), ("P99", "p99"), *more]
    return lines + [row(f"{label} {short} (ms):", f"{values[f'{key}_{name}_ms']:.2f}") for label, key in kinds]


def result_table(
    values: dict[str, Any], *, backend: str, request_rate: float | str, max_concurrency: int | None
) -> str:
    """bench_serving's table, row for row. `request_rate`: ``trace`` for the times of a trace."""
    lines = [
        "",
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        row("Backend:", backend),
        row("Traffic request rate:", request_rate),
        row("Max request concurrency:", max_concurrency or "not set"),
        row("Successful requests:", values["completed"]),
    ]
    if values["failed"]:
        lines.append(row("Failed requests:", values["failed"]))
    lines.append(row("Benchmark duration (s):", f"{values['duration']:.2f}"))
    for label, key in (
        ("Total input tokens:", "total_input_tokens"),
        ("Total input text tokens:", "total_input_text_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
    ):
        lines.append(row(label, values[key]))
    if values["total_cached_tokens"]:
        lines.append(row("Total cached tokens:", values["total_cached_tokens"]))
    for label, key in (
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_throughput"),
        ("Concurrency:", "concurrency"),
        ("Accept length:", "accept_length"),
    ):
        if values.get(key) is not None:
            lines.append(row(label, values[key] if isinstance(values[key], int) else f"{values[key]:.2f}"))
    lines += _section("End-to-End Latency", "e2e_latency", values)
    lines += _section("Time to First Token", "ttft", values)
    lines += _section("Time per Output Token (excl. 1st token)", "tpot", values)
    lines += _section("Inter-Token Latency", "itl", values, [("Max", "max")])
    return "\n".join([*lines, "=" * WIDTH])


def draw_chart(answers: Sequence[Answer], path: str | Path, title: str) -> None:
    """A PNG with the cumulative distribution of each latency, median and P99 marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [answer for answer in answers if answer.success]
    panels = {
        "Time to first token": [a.ttft for a in done],
        "Time per output token": [a.tpot for a in done if a.tpot is not None],
        "Inter-token latency": [gap for a in done for gap in a.itl],
        "End-to-end latency": [a.latency for a in done],
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    for axis, (name, seconds) in zip(axes.flat, panels.items()):
        values = sorted(value * 1e3 for value in seconds)
        axis.set(title=name, xlabel="ms", ylabel="share of samples", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        if not values:
            axis.text(0.5, 0.5, "no samples", ha="center", transform=axis.transAxes)
            continue
        axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        for q, style in ((50, "--"), (99, ":")):
            axis.axvline(
                percentile(values, q), linestyle=style, color="grey", label=f"P{q} {percentile(values, q):.1f} ms"
            )
        axis.set_xlim(left=0)
        axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
