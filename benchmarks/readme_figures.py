"""README.md's benchmark figures, generated from result files: ``python -m benchmarks.readme_figures --check``.

A block of README.md has its table's name and its results, files of benchmarks/results without suffix:

    <!-- figures: speed 2026-11-28_cpu_side_by_side -->
    <!-- end of figures -->

`--write` fills in every block; `--check` (the default) exits with 1 if a block differs. A figure is the median over the
rounds of all results, with the slowest and the fastest round. Caveats are printed with it: a gain within
the noise, a busy machine, a peer whose fastest mode was not searched.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import QUIET_LOAD, RESULTS, command_parser
from benchmarks.workloads import PEERS, TARGET, WORKLOADS
from moe_engine.tuning.stats import median

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- figures: (\w+)((?: [\w.+-]+)+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
Result = dict[str, Any]

WORKLOAD_LABELS = {
    "W1": "one stream, 128 in, 128 out",
    "W2": "16 streams, 128 in, 64 out",
    "W3": "32 streams, 512 shared + 32 own in, 32 out",
    "W4": "one prompt of 2048",
}
SUBJECT_LABELS = {
    "embedded": "embedded model, answers of about 20 tokens",
    "agreeing": "390 M V3-shaped checkpoint, {agreement:.0%} of the drafts right",
    "random": "the same shape, drafts never right",
}


def interval(values: Sequence[float], write: Callable[[float], str]) -> str:
    """``150 (140 to 166)``: the median, and minimum and maximum if they are printed differently."""
    middle, low, high = write(median(values)), write(min(values)), write(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


# -- tables


def speed(results: Sequence[Result]) -> str:
    """Tokens/s, fraction of the machine's limit, ratio to transformers: results of `benchmarks.side_by_side`."""
    rows = []
    for name, label in WORKLOAD_LABELS.items():
        found = [result["results"][name] for result in results if name in result["results"]]
        if not found:
            continue
        counted = WORKLOADS[name].counted_tokens
        rates = [counted / seconds for one in found for seconds in one["engine"]["seconds"]]
        fractions = [share for one in found for share in _fractions(one)]
        best = PEERS.get(results[0]["shape"], {}).get(name)
        peer = f"{best.fraction:.0%} ({best.name})" if best else "not measured"
        rows.append(
            [label, interval(rates, "{:.0f}".format), interval(fractions, "{:.0%}".format), peer, _ratio(name, results)]
        )
    notes = [
        "Medians of all rounds; in brackets the slowest and the quickest round. "
        f"The engine's target is {TARGET:.0%} of the limit on each workload. "
        "The other engines were measured on two cores of another machine, a Xeon with AMX.",
        *_machine(results),
        *_limits(results),
    ]
    if any(_compared(result) and not result["transformers_probes_seconds"] for result in results):
        notes.append("\\* transformers as it comes: its quickest way was not looked for.")
    table = markdown(
        ["workload", "tokens/s", "of the machine's limit", "best other engine", "against transformers"], rows
    )
    return f"{table}\n\n{' '.join(notes)}"


def summary(results: Sequence[Result]) -> str:
    """The range of the medians over the workloads, a line: results of `benchmarks.side_by_side`."""
    found = {name: [one["results"][name] for one in results if name in one["results"]] for name in WORKLOAD_LABELS}
    medians = [median([share for one in ones for share in _fractions(one)]) for ones in found.values() if ones]
    peers = [peer for name in found if (peer := PEERS.get(results[0]["shape"], {}).get(name))]
    others = f" (the best other engine on its machine: {_range([peer.fraction for peer in peers])})" if peers else ""
    return (
        f"- **How fast**: on two CPU cores {_range(medians)} of what their memory and arithmetic units allow{others};\n"
        "  [figures](#speed-on-two-cores). GPU speeds are estimates of a cost model."
    )


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}"


def _fractions(one: Result) -> list[float]:
    return one["engine"].get("fractions_of_limit") or [one["engine"]["fraction_of_limit"]]


def _compared(result: Result) -> bool:
    return any("ratio" in one for one in result["results"].values())


def _ratio(name: str, results: Sequence[Result]) -> str:
    compared = [result for result in results if "ratio" in result["results"].get(name, {})]
    if not compared:
        return "not measured"
    found = [result["results"][name] for result in compared]
    ratios = [
        theirs / ours for one in found for ours, theirs in zip(one["engine"]["seconds"], one["transformers"]["seconds"])
    ]
    unprobed = any(not result["transformers_probes_seconds"] for result in compared)
    return interval(ratios, "{:.1f}x".format) + (" \\*" if unprobed else "")


def speculation(results: Sequence[Result]) -> str:
    """`auto` against the same engine without drafts: results of `benchmarks.speculation`."""
    concurrency = sorted(
        {int(n) for result in results for model in result["models"].values() for n in model["concurrency"]}
    )
    rows = []
    for name, label in SUBJECT_LABELS.items():
        of_subject = [result for result in results if name in result["models"]]
        if of_subject:
            cells = [
                _gain([result["models"][name]["concurrency"][str(n)] for result in of_subject]) for n in concurrency
            ]
            rows.append([label.format(**of_subject[0]["options"]), *cells])
    header = ["", *(f"{n} request" if n == 1 else str(n) for n in concurrency)]
    notes = "Medians of the rounds; in brackets the least and the largest ratio. *No difference*: some rounds were "
    notes += "faster and some slower than without drafts."
    return "\n\n".join([markdown(header, rows), " ".join([notes, *_machine(results)])])


def _gain(sides: Sequence[Result]) -> str:
    """The ratio, unless the rounds are on both sides of 1."""
    ratios = [off / auto for one in sides for off, auto in zip(one["off"]["seconds"], one["auto"]["seconds"])]
    if min(ratios) <= 1 <= max(ratios):
        return f"no difference ({min(ratios):.2f}x to {max(ratios):.2f}x)"
    return interval(ratios, "{:.2f}x".format)


def startup(results: Sequence[Result]) -> str:
    """Seconds to READY: results of `benchmarks.startup`."""
    seconds = [run["ready_seconds"] for result in results for run in result["runs"][1:] or result["runs"]]
    return f"The embedded model is READY in {interval(seconds, '{:.1f}'.format)} seconds."


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "summary": summary,
    "speed": speed,
    "speculation": speculation,
    "startup": startup,
}


# -- notes on the machine


def _machine(results: Sequence[Result]) -> list[str]:
    abouts = [result["about"] for result in results]
    kinds = sorted({f"{about['machine']['num_cpus']} x {about['machine']['cpu']}" for about in abouts})
    dates = sorted({about["date"][:10] for about in abouts})
    notes = [f"Measured on {', '.join(kinds)}, {', '.join(dates)}."]
    busy = [about["machine"]["load_1min_at_start"] for about in abouts]
    if max(busy) > QUIET_LOAD:
        notes.append(
            f"Other programs were at work (load {', '.join(f'{load:.1f}' for load in busy if load > QUIET_LOAD)})."
        )
    return notes


def _limits(results: Sequence[Result]) -> list[str]:
    measured = [here for result in results for one in result["results"].values() for here in one.get("limits", [])]
    if not measured:
        return []
    memory, products = ([here[key] for here in measured] for key in ("memory_gb_per_second", "gemm_gflops"))
    return [
        f"The machine's limits, measured right beside each run: memory {min(memory):.0f} to {max(memory):.0f} GB/s, "
        f"products {min(products):.0f} to {max(products):.0f} GFLOP/s."
    ]


# -- the file


def filled(text: str, folder: Path = RESULTS) -> str:
    """The text with every block filled in from its results.

    Raises:
        ValueError: a block has an unknown table or a missing result, or a smoke test's result.
    """

    def fill(found: re.Match[str]) -> str:
        opening, name, files, _, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"{opening.strip()}: unknown table {name}; choose from {', '.join(TABLES)}")
        results = [_read(folder / f"{file}.json") for file in files.split()]
        return f"{opening}{TABLES[name](results)}\n{end}"

    return BLOCK.sub(fill, text)


def _read(file: Path) -> Result:
    try:
        result: Result = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file}: no such result") from None
    if result.get("quick"):
        raise ValueError(f"{file}: the result of a smoke test (--quick) has no figures")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("readme_figures", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="exit with 1 if README.md differs (the default)")
    what.add_argument("--write", action="store_true", help="fill README.md in")
    parser.add_argument("--readme", type=Path, default=README, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    old = args.readme.read_text()
    try:
        new = filled(old)
    except ValueError as error:
        print(f"readme_figures: {error}", file=sys.stderr)
        return 2
    if args.write:
        args.readme.write_text(new)
        return 0
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(args.readme), "as measured", lineterm="")
    print("\n".join(lines), end="\n" if old != new else "")
    return int(old != new)


if __name__ == "__main__":
    raise SystemExit(main())
