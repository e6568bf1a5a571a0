"""Distance of a step from the roofline of its hardware, on a machine without a GPU.

    python -m benchmarks.step_costs --model v3 --form dp8ep8 --batch 1 32 128
    python -m benchmarks.step_costs --all                 # every committed case; writes benchmarks/results/
    python -m benchmarks.step_costs --update-expected     # after a change of launches: the values that CI checks

The production worker runs a step at the model's true sizes on a simulated device: weights have no values, nothing is
computed, and every launch is recorded with the bytes that it reads and writes, its operations, its stream, its CUDA
graph if any, and its messages to other ranks; so are the host's waits. Two layers of each kind run; the last represents
all further layers. There are no other ranks, and routing is uniform.

A launch takes: gap + max(shortest kernel, bytes / bandwidth, operations / rate, messages). Streams overlap, and the
host prepares the next step meanwhile unless it waits. Every constant is in step_costs/hardware.json, with its source.
The roofline (step_costs/roofline.py) is a formula over config.json: weights used, KV and messages once at the device's
rates. `of roofline` is the roofline's share of the step's time, an estimate for comparing builds; `constants allow` is
the most that it can be with the rates that kernels reach by the same constants. Launches, bytes and waits are exact.
--rows triton: no vendor library is installed; vendors: DeepGEMM, FlashAttention 3 and DeepEP are installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.step_costs.cases import GROUPS, CaseFailed, run_all, update_expected
from benchmarks.step_costs.hardware import Hardware
from benchmarks.step_costs.models import MODELS, config_of
from benchmarks.step_costs.roofline import FORMS

COLUMNS = {
    "case": "case", "fraction": "of roofline", "allowed": "constants allow", "us": "step us",
    "roofline_us": "roofline us",
    "tokens_per_s_per_gpu": "tok/s/GPU", "launches_a_dense_layer": "dense layer", "launches_a_moe_layer": "MoE layer",
    "launches_outside": "outside", "host_waits": "waits",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = report.command_parser("step_costs", __doc__)
    made.add_argument(
        "--model", default="v2-lite", metavar="NAME|DIR", help=f"{', '.join(MODELS)}, or a folder with a config.json"
    )
    made.add_argument("--form", default="tp1", choices=FORMS, help="ranks: tensor, data and expert parallelism")
    made.add_argument("--batch", type=int, nargs="+", default=[1], help="requests of a rank (tp8: of the group)")
    made.add_argument("--context", type=int, default=2048, help="tokens of each request before the step")
    made.add_argument("--mtp", type=int, default=0, metavar="N", help="draft tokens of a step; 0: none")
    made.add_argument(
        "--drafter", choices=("mtp", "mtp2", "ngram", "standalone"), default="mtp",
        help="mtp2: with two MTP layers (tp8); standalone: a draft model of four layers",
    )  # fmt: skip
    made.add_argument("--topk", type=int, default=1, metavar="N", help="draft trees of 2N nodes; 1: chains")
    made.add_argument("--threshold", type=float, default=1.0, metavar="P", help="acceptance threshold (1: none)")
    made.add_argument("--attention", default="auto", metavar="ROW", help="attention row (auto)")
    made.add_argument(
        "--kv", default="auto", metavar="TYPE", help="--kv-cache-dtype (auto); FP8: with FlashMLA of sgl_kernel"
    )
    made.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="a prompt instead of a decode step")
    made.add_argument("--hardware", default="H200x8", help="GPU, and GPUs of a node (H200x8)")
    made.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE",
        help="other constants of the device than hardware.json's, for a comparison with other people's estimates",
    )  # fmt: skip
    made.add_argument("--rows", choices=("vendors", "triton"), default="vendors", help="libraries that are installed")
    made.add_argument(
        "--dispatch",
        default="deepep",
        choices=("deepep", "deepep2", "symm_mem", "megamoe"),
        help="of expert parallelism; deepep: DeepEP 1, deepep2: DeepEP 2, by the rates of DeepEP 1",
    )
    made.add_argument(
        "--flags", nargs="+", default=[], metavar="NAME[=VALUE]",
        help="further flags of the engine, as slurm/serve.sbatch has: moe-dense-tp-size=1 enable-dp-lm-head",
    )  # fmt: skip
    made.add_argument("--lines", action="store_true", help="print every launch of the step")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the values to this file")
    made.add_argument("--all", action="store_true", help="every committed case; writes a result and a table beside it")
    made.add_argument("--update-expected", action="store_true", help="write the values that CI checks")
    return made


def print_summary(summary: Any, lines: bool) -> None:
    """The step by section, its most expensive launches, and the host's waits."""
    case, least = summary.case, summary.least
    rows = [
        (
            part.name, part.repeats, part.launches, f"{part.total('bytes') / 1e6:.1f}",
            f"{part.total('total_flops') / 1e9:.1f}", f"{(part.total('nvlink') + part.total('network')) / 1e6:.2f}",
            f"{part.microseconds:.1f}", f"{part.microseconds * part.repeats:.0f}",
        )
        for part in summary.sections
    ]  # fmt: skip
    print(f"\n{case.name}: {', '.join(f'{family} {row}' for family, row in summary.rows.items())}")
    print(report.table(("section", "times", "launches", "MB", "GFLOP", "MB sent", "us", "us of step"), rows))
    print(
        f"step {summary.microseconds:.0f} us (device {summary.device_us:.0f}, host {summary.host_us:.0f}); roofline "
        f"{least.microseconds:.0f} us (weights {least.weights_us:.0f}, attention {least.attention_us:.0f}, messages "
        f"{least.links_us:.0f}): {summary.fraction:.1%}; {summary.tokens_per_s:.0f} tok/s/GPU; "
        f"{summary.num_waits} waits of the host, {summary.num_early} early launches"
    )
    print(
        f"the constants allow {summary.allowed:.1%}: the same work takes {summary.allowed_us:.0f} us at their rates, "
        "with these messages and nothing else"
    )
    print(report.table(("dearest launches", "us"), [(name, f"{us:.0f}") for us, name in summary.dearest()]))
    for times, wait in summary.waits:
        print(f"the host waits {times} times: {wait.what}, {wait.where}")
    if not lines:
        return
    for part in summary.sections:
        print(f"\n{part.name} (x {part.repeats})")
        every = [
            (
                line.name, line.place, "early" if line.early else "graph" if line.graph else "eager", line.stream,
                f"{line.cost.read / 1e6:.2f}", f"{line.cost.written / 1e6:.2f}", f"{line.cost.total_flops / 1e9:.2f}",
                f"{span.microseconds:.1f}",
            )
            for span, line in zip(part.spans, part.lines, strict=True)
        ]  # fmt: skip
        print(report.table(("launch", "from", "", "stream", "MB read", "MB written", "GFLOP", "us"), every))


def _hardware(options: argparse.Namespace) -> Hardware:
    return Hardware.named(options.hardware).with_constants(options.set)


def run_group(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of these options, in this process."""
    from benchmarks.step_costs.session import Case, Session
    from benchmarks.step_costs.summary import summarize, values

    first = Case(
        options.model, config_of(options.model), FORMS[options.form], _hardware(options),
        max(options.batch), options.context, options.rows == "vendors", options.mtp, options.prefill or None,
        options.dispatch, options.drafter, options.attention, options.topk, options.threshold,
        options.kv, tuple(options.flags),
    )  # fmt: skip
    session = Session(first)
    found = []
    for batch in options.batch:
        summary = summarize(*session.run(batch))
        print_summary(summary, options.lines)
        found.append(values(summary))
    session.close()
    return found


def as_table(cases: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for values in cases:
        lines.append("| " + " | ".join(_shown(key, values[key]) for key in COLUMNS) + " |")
    return "\n".join(lines)


def _shown(key: str, value: Any) -> str:
    if key in ("fraction", "allowed"):
        return f"{value:.1%}"
    return str(value) if key == "case" else f"{value:,}"


def run_every_group() -> int:
    cases, hardware = [], sorted({group.hardware for group in GROUPS})
    for _, found in run_all(GROUPS):
        cases += found
        path = report.write_result("step_costs", {"hardware": hardware, "cases": cases})
    about = (
        f"# Step costs on {' and '.join(hardware)}, {time.strftime('%Y-%m-%d')}\n\nSimulated on a CPU: launches (per "
        "layer, and outside the layers), bytes and waits are counted, times are computed from\n"
        "`step_costs/hardware.json`. No GPU was measured. Context 2,048 tokens, uniform routing; tokens of drafts are "
        "not counted in tok/s.\n`python -m benchmarks.step_costs --all` writes both files; the most expensive launches "
        f"of each case are in `{path.name}`.\n"
    )
    path.with_suffix(".md").write_text(f"{about}\n{as_table(cases)}\n")
    print(as_table(cases))
    print(path, file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(argv)
    try:
        if options.update_expected:
            update_expected()
            return 0
        if options.all:
            return run_every_group()
        _hardware(options)
        config_of(options.model)
        cases = run_group(options)
    except (ValueError, CaseFailed) as error:
        print(f"benchmarks.step_costs: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if options.json:
        hardware = {"hardware": options.hardware, "other_constants": options.set}
        report.write_result("step_costs", {**hardware, "cases": cases}, path=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
