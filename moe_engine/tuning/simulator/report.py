"""Results of a simulation: figures with the keys of bench serving, a line of remarks, a plot over time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.tuning import serving_report
from moe_engine.tuning.simulator.fleet import Outcome


def figures(outcome: Outcome, goodput: dict[str, float], wall_seconds: float) -> dict[str, Any]:
    """As `serving_report.figures`, with retractions, steps and the speed of the simulation."""
    recorder = outcome.recorder
    duration = max(recorder.ended_at, 1e-9)
    values = serving_report.figures(
        recorder.answers, duration, goodput=goodput, accept_length=outcome.accept_length, gaps=recorder.gaps
    )
    seconds = outcome.process_seconds
    of_parts = {"seams": outcome.seams, "process_seconds": seconds} if seconds else {}
    return values | {
        "retractions": outcome.retractions,
        "cut_answers": sum(answer.cut_tokens > 0 for answer in recorder.answers),
        "cache_hit_rate": outcome.cached_tokens / max(outcome.prompt_tokens, 1),
        "steps": outcome.num_steps,
        "busy_seconds": outcome.busy_seconds,
        "wall_seconds": wall_seconds,
        "times_real_time": duration / max(wall_seconds, 1e-9),
        "failures": sorted(set(recorder.refused)),
        "expert_load": outcome.expert_load,
        **of_parts,
    }


def details(outcome: Outcome) -> dict[str, Any]:
    """Every request, with keys as of bench serving, and every step: requests that decode, prompt tokens, seconds."""
    answers = sorted(outcome.recorder.answers, key=lambda answer: answer.started)
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "errors": [answer.error for answer in answers],
        "phases": [answer.phases for answer in answers],
        "step_times": outcome.recorder.steps,
    }


def remarks(values: dict[str, Any], outcome: Outcome) -> str:
    """Values without a row in bench serving's table."""
    lines = [
        f"retractions: {values['retractions']}, cache hit rate: {values['cache_hit_rate']:.3f}, "
        f"steps: {values['steps']}",
        f"simulated {values['duration']:.1f} s in {values['wall_seconds']:.1f} s "
        f"({values['times_real_time']:.0f} times real time)",
    ]
    if values["cut_answers"]:
        lines.append(
            f"{values['cut_answers']} answers are shorter than in the load: with their prompts they exceed the context "
            "(--context-length) or the KV pool"
        )
    lines += [
        f"--fail rank={fault.rank}@t={fault.seconds:g}s: no effect, the last answer came before"
        for fault in outcome.missed
    ]
    lines += [_seam_line(seam) for seam in outcome.seams]
    if outcome.expert_load:
        lines.append(_expert_line(outcome.expert_load))
    return "\n".join(lines + [f"failed: {reason}" for reason in values["failures"][:5]])


def _seam_line(seam: dict[str, Any]) -> str:
    """Where the results of a process begin (`parts.Seams.report`)."""
    return (
        f"process {seam['part'] + 1}: warm-up of {seam['requests_twice']} requests, over the last of which it differs "
        f"from process {seam['part']} by {seam['latency']:+.2%} in mean latency, {seam['ttft']:+.2%} in mean TTFT"
    )


def _expert_line(load: dict[str, Any]) -> str:
    """The skew of the run, and of other placements for the same traffic."""
    skew = f"{load['skew_first']:.2f}"
    if load["rebalances"]:
        count = load["rebalances"]
        skew += f", then {load['skew_last']:.2f} after {'a rebalance' if count == 1 else f'{count} rebalances'}"
    others = ", ".join(f"{name} {value:.2f}" for name, value in load["skew_of_placements"].items())
    straggler = f"rank {load['straggler_rank']} has {load['straggler_load']:.2f} times the mean"
    return f"expert load, busiest rank over the mean: {skew} ({straggler}); placements: {others}"


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
    if not samples:
        raise ConfigError(f"--plot {path}: the simulation has no sample; lower --sample-seconds")
    scale, unit = _time_unit(samples[-1].seconds)
    seconds = [sample.seconds / scale for sample in samples]
    skewed = any(sample.expert_skew for sample in samples)
    figure, axes = pyplot.subplots(3 + skewed, 1, figsize=(10, 8 + 2 * skewed), sharex=True, layout="constrained")
    axes[0].plot(seconds, [sample.running for sample in samples], label="running")
    axes[0].plot(seconds, [sample.waiting for sample in samples], label="waiting")
    axes[0].set(ylabel="requests", ylim=(0, None), title="Simulated load")
    axes[0].legend(loc="upper right")
    axes[1].plot(seconds, [100 * sample.used_tokens / num_slots for sample in samples])
    axes[1].set(ylabel="KV slots in use, %", ylim=(0, None))
    rates = [
        (after.generated_tokens - before.generated_tokens) / max(after.seconds - before.seconds, 1e-9)
        for before, after in pairwise(samples)
    ]
    axes[2].stairs(rates, seconds)
    axes[2].set(ylabel="output tokens/s", ylim=(0, None))
    if skewed:
        axes[3].step(seconds, [sample.expert_skew for sample in samples], where="post")
        axes[3].set(ylabel="experts: busiest rank / mean", ylim=(1, None))
    axes[-1].set(xlabel=f"simulated {unit}", xlim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    for fault in outcome.faults:
        for axis in axes:
            axis.axvline(fault.seconds / scale, color="tab:red", linestyle="--", linewidth=1)
        axes[0].annotate(f"rank {fault.rank} lost", (fault.seconds / scale, 1), xycoords=("data", "axes fraction"),
            xytext=(3, -10), textcoords="offset points", color="tab:red", fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which a run of this length is drawn, and its name."""
    return (3600.0, "hours") if seconds > 3 * 3600 else (60.0, "minutes") if seconds > 600 else (1.0, "seconds")
