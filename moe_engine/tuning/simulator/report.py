"""Results of a simulation: figures with the keys of bench serving, a line of remarks, a plot over time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from moe_engine.tuning import serving_report
from moe_engine.tuning.simulator.fleet import Outcome


def figures(outcome: Outcome, goodput: dict[str, float], wall_seconds: float) -> dict[str, Any]:
    """As `serving_report.figures`, with retractions, steps and the speed of the simulation."""
    recorder = outcome.recorder
    duration = max(recorder.ended_at, 1e-9)
    values = serving_report.figures(
        recorder.answers, duration, goodput=goodput, accept_length=outcome.accept_length, gaps=recorder.gaps
    )
    return values | {
        "retractions": outcome.retractions,
        "cache_hit_rate": outcome.cached_tokens / max(outcome.prompt_tokens, 1),
        "steps": outcome.num_steps,
        "busy_seconds": outcome.busy_seconds,
        "wall_seconds": wall_seconds,
        "times_real_time": duration / max(wall_seconds, 1e-9),
        "failures": sorted(set(recorder.refused)),
    }


def remarks(values: dict[str, Any], outcome: Outcome) -> str:
    """Values that bench serving's table has no row for."""
    lines = [
        f"retractions: {values['retractions']}, cache hit rate: {values['cache_hit_rate']:.3f}, "
        f"steps: {values['steps']}",
        f"simulated {values['duration']:.1f} s in {values['wall_seconds']:.1f} s "
        f"({values['times_real_time']:.0f} times real time)",
    ]
    return "\n".join(lines + [f"failed: {reason}" for reason in values["failures"][:5]])


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of ended requests."""
    if not shown or not sys.stderr.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="request", file=sys.stderr) as bar:
        yield lambda count: bar.update(count) and None


def draw(outcome: Outcome, path: str, num_slots: int) -> None:
    """A PNG or SVG with requests, KV usage and throughput over simulated time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = outcome.samples
    seconds = [sample.seconds for sample in samples]
    figure, axes = pyplot.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    axes[0].plot(seconds, [sample.running for sample in samples], label="running")
    axes[0].plot(seconds, [sample.waiting for sample in samples], label="waiting")
    axes[0].set(ylabel="requests")
    axes[0].legend(loc="upper right")
    axes[1].plot(seconds, [sample.used_tokens / num_slots for sample in samples])
    axes[1].set(ylabel="token usage", ylim=(0, 1.05))
    rates = [
        (after.generated_tokens - before.generated_tokens) / max(after.seconds - before.seconds, 1e-9)
        for before, after in pairwise(samples)
    ]
    axes[2].plot(seconds[1:], rates)
    axes[2].set(ylabel="output tokens/s", xlabel="simulated seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
