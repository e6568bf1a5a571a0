"""Command line of ``moe-engine experts DUMP...``: reads dumps, prints the report, draws plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from moe_engine.cli.experts_report import terminal
from moe_engine.cli.experts_report.dumps import ExpertCounts, read_dumps
from moe_engine.cli.experts_report.plots import draw
from moe_engine.cli.experts_report.statistics import LayerStatistics, layer_statistics
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.gain import Gain, eplb_gain, usual_layouts
from moe_engine.parallel.placement.layout import ExpertLayout

EPILOG = """\
examples:
  moe-engine experts expert_distribution_recorder_1763712000.1.pt
  moe-engine experts dumps/expert_distribution_recorder_*_{0,1,2,3}.pt       the ranks of a per_pass dump
  moe-engine experts DUMP.pt --ep-size 32 --nodes 4 --groups 8 --redundant 32 --out report/"""


def main(argv: Sequence[str], prog: str) -> int:
    """Runs the command; returns the exit code. Raises ConfigError for user errors."""
    options = _parser(prog).parse_args(list(argv))
    counts = read_dumps(options.dumps)
    layers = layer_statistics(counts.total)
    gains = [eplb_gain(counts.passes, layout) for layout in _layouts(options, counts.passes.shape[2])]
    console = terminal.console()
    console.print(terminal.summary(counts, layers))
    console.print(terminal.layer_table(layers))
    if gains:
        console.print(terminal.gain_table(gains))
    pictures = _write(Path(options.out), counts, layers, gains if options.ep_size else []) if options.out else []
    if options.out and not pictures:
        console.print("no plots: matplotlib is not installed (pip install matplotlib); as text:")
    if not pictures:
        console.print(terminal.heat_map(counts.total, console.width))
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Reports expert load imbalance from dumps of the expert recorder, and the gain of EPLB.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="a dump, or several of one model (.pt)")
    parser.add_argument(
        "--ep-size", type=int, action="append", metavar="N", help="EP size to plan for; may be repeated"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes of the ranks (1)")
    parser.add_argument("--groups", type=int, default=1, metavar="N", help="the router's expert groups, n_group (1)")
    parser.add_argument(
        "--redundant", type=int, metavar="R", help="redundant experts (default: none, and one per rank)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="write heat_map.png and imbalance.png; with --ep-size also the placements"
    )
    return parser


def _layouts(options: argparse.Namespace, num_experts: int) -> list[ExpertLayout]:
    """Layouts to evaluate EPLB on.

    Raises:
        ConfigError: --redundant, --nodes or --groups does not fit the requested EP sizes or the experts.
    """
    if options.nodes < 1:
        raise ConfigError(f"--nodes {options.nodes}: at least 1")
    if options.redundant is not None and options.redundant < 0:
        raise ConfigError(f"--redundant {options.redundant}: must not be negative")
    for size in options.ep_size or ():
        if size % options.nodes:
            raise ConfigError(f"--ep-size {size}: not a multiple of --nodes {options.nodes}")
    if options.groups < 1 or num_experts % options.groups:
        raise ConfigError(f"--groups {options.groups}: {num_experts} experts do not form as many equal groups")
    usual = list(usual_layouts(num_experts, options.nodes, options.groups, options.ep_size))
    if options.redundant is None:
        return usual
    num_slots = num_experts + options.redundant
    for size in options.ep_size or ():
        if num_slots % size:
            raise ConfigError(
                f"--redundant {options.redundant}: {num_experts} experts plus these are {num_slots} slots, not a "
                f"multiple of --ep-size {size}; {options.redundant + -num_slots % size} are valid"
            )
    ranks = dict.fromkeys(layout.num_ranks for layout in usual)
    sizes = options.ep_size or [size for size in ranks if num_slots % size == 0]
    return [ExpertLayout(num_experts, size, options.redundant, options.nodes, options.groups) for size in sizes]


def _write(folder: Path, counts: ExpertCounts, layers: Sequence[LayerStatistics], gains: Sequence[Gain]) -> list[Path]:
    """Writes placements and plots; returns the plots' paths, none without matplotlib."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for gain in gains:
            layout = gain.layout
            path = folder / f"placement_ep{layout.num_ranks}_redundant{layout.num_redundant}.json"
            path.write_text(json.dumps({"physical_to_logical_map": gain.placement.physical_to_logical.tolist()}))
            print(f"{path}: for --init-expert-location, with --ep-num-redundant-experts {layout.num_redundant}")
        pictures = draw(folder, counts.total, layers)
    except ImportError:
        return []
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}") from error
    for path in pictures:
        print(path)
    return pictures
