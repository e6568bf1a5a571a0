"""Metrics, table rows and curve of agent sessions: `bench serving --dataset-name agentic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.serving_report import WIDTH, distribution, row
from moe_engine.tuning.stats import percentile

KINDS = ("first", "returning", "subagent")
"""The first turn of a session, a later turn, the first turn of a sub-agent."""
TIERS = ("device", "host", "storage")


def normalized_interactivity(answers: Sequence[Answer]) -> float:
    """AgentX's metric in tokens per second: 1 / P90(end-to-end latency / output tokens), of successful requests.

    0 without any. Unlike 1 / TPOT it includes the time to the first token.
    """
    seconds = [answer.latency / answer.output_len for answer in answers if answer.success and answer.output_len]
    slow = percentile(seconds, 90)
    return 1 / slow if slow > 0 else 0.0


def figures(answers: Mapping[str, Sequence[Answer]], sessions: int, abandoned: int) -> dict[str, Any]:
    """The keys that agent sessions have besides `serving_report.figures`.

    Args:
        answers: by kind of turn (`KINDS`).
    """
    done = [answer for kind in KINDS for answer in answers.get(kind, ()) if answer.success]
    prompt = sum(answer.prompt_len for answer in done)
    values: dict[str, Any] = {
        "sessions": sessions,
        "abandoned_sessions": abandoned,
        "e2e_normalized_interactivity": normalized_interactivity(done),
        "cache_hit_rate": sum(answer.cached_tokens for answer in done) / max(prompt, 1),
        "cached_tokens_by_tier": by_tier(done),
    }
    for kind in KINDS:
        of_kind = [answer for answer in answers.get(kind, ()) if answer.success]
        values[f"{kind}_turns"] = len(of_kind)
        values |= distribution(f"{kind}_turn_ttft", [answer.ttft for answer in of_kind])
    return values


def by_tier(answers: Sequence[Answer]) -> dict[str, int]:
    """Cached tokens of each tier; those of a server without tiers are ``device``'s."""
    tiers = dict.fromkeys(TIERS, 0)
    for answer in answers:
        for name, tokens in (answer.cached_by_tier or {"device": answer.cached_tokens}).items():
            tiers[name] += tokens
    return tiers


def table_rows(values: dict[str, Any]) -> str:
    """Rows below those of `serving_report.result_table`."""
    lines = [f"{'Agent Sessions':-^{WIDTH}}", row("Sessions:", values["sessions"])]
    if values["abandoned_sessions"]:
        lines.append(row("Abandoned sessions:", values["abandoned_sessions"]))
    lines.append(row("E2E normalized interactivity (tok/s):", f"{values['e2e_normalized_interactivity']:.2f}"))
    for kind, label in zip(KINDS, ("first", "returning", "sub-agents' first")):
        if values[f"{kind}_turns"]:
            lines.append(row(f"Median TTFT, {label} turns (ms):", f"{values[f'median_{kind}_turn_ttft_ms']:.2f}"))
            lines.append(row(f"P90 TTFT, {label} turns (ms):", f"{values[f'p90_{kind}_turn_ttft_ms']:.2f}"))
    lines.append(row("Cache hit rate:", f"{values['cache_hit_rate']:.3f}"))
    for name, tokens in values["cached_tokens_by_tier"].items():
        lines.append(row(f"Cached tokens, {name}:", tokens))
    return "\n".join([*lines, "=" * WIDTH])


def curve_table(points: Sequence[dict[str, Any]]) -> str:
    """One line for each concurrency."""
    lines = [f"{'sessions':>8} {'interactivity':>13} {'output tok/s':>12} {'total tok/s':>12} {'hit rate':>8}"]
    for point in points:
        lines.append(
            f"{point['max_concurrency'] or 'all':>8} {point['e2e_normalized_interactivity']:>13.2f} "
            f"{point['output_throughput']:>12.1f} {point['total_throughput']:>12.1f} {point['cache_hit_rate']:>8.3f}"
        )
    return "\n".join(lines)


def draw_curve(points: Sequence[dict[str, Any]], path: str | Path, title: str) -> None:
    """A picture of output and total throughput over interactivity, a point for each concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    speeds = [point["e2e_normalized_interactivity"] for point in points]
    for axis, key in zip(axes, ("output_throughput", "total_throughput")):
        rates = [point[key] for point in points]
        axis.plot(speeds, rates, marker="o")
        for point, x, y in zip(points, speeds, rates):
            axis.annotate(str(point["max_concurrency"] or "all"), (x, y), xytext=(5, 5), textcoords="offset points")
        axis.set(xlabel="E2E normalized interactivity, tok/s", ylabel=f"{key.replace('_throughput', '')} tokens/s")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
