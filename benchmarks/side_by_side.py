"""This engine against transformers and against this machine's limits: ``python -m benchmarks.side_by_side [options]``.

Four workloads on a generated checkpoint (390 M parameters, V3-shaped, bf16): W1 one stream, W2 sixteen, W3 thirty-two
with a shared prefix, W4 one long prompt. The sides alternate in every round, with new prompts outside all caches;
medians count. A shared machine's speed can vary by a factor of two within minutes, so its limits are measured
immediately before and after each of the engine's runs, and a fraction is of the better of both limits of one run. For
transformers the fastest mode is searched per workload, and reported. About 15 to 40 minutes; needs a quiet machine.
Further options are flags of the engine.

    python -m benchmarks.side_by_side                     everything; JSON in benchmarks/results
    python -m benchmarks.side_by_side --peers none        the engine alone
    python -m benchmarks.side_by_side --quick --shape moe-tiny
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import reduce
from itertools import chain
from typing import Any

from benchmarks import report
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from benchmarks.limits import MeasuredLimits, Ruler, combine, limits_table
from benchmarks.peers import EngineSide, Run, TransformersSide, agreement, float32_agreement
from benchmarks.step_work import ModelWork
from benchmarks.workloads import PEERS, TARGET, WORKLOADS, Peer, Workload
from moe_engine.tuning.frozen_heap import frozen_heap
from moe_engine.tuning.stats import median, spread

KV_TOKENS = 32768
"""KV pool of the engine: fits every workload, small compared to the weights."""
RULER_TURNS = 2
"""Rounds of the limits' methods next to each run: about a second."""


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own options, and the engine's flags as keywords."""
    parser = report.command_parser("side_by_side", __doc__, allow_abbrev=False)
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, help="rounds with transformers (default: all)")
    parser.add_argument("--peers", choices=("transformers", "none"), default="transformers")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="moe-390m")
    parser.add_argument("--bench-device", default="cpu", help="device of the limits and of transformers")
    parser.add_argument("--quick", action="store_true", help="one round of small workloads: a smoke test, no figures")
    parser.add_argument(
        "--no-probe", action="store_true", help="use transformers' default mode, without searching the fastest"
    )
    parser.add_argument("--name", default="side_by_side", help="part of the result file's name")
    report.add_result_options(parser)
    own, flags = report.parse_with_engine_flags(parser, argv)
    return own, {"max_total_tokens": KV_TOKENS, **flags}


def measure(
    workloads: list[Workload],
    engine: EngineSide,
    peer: TransformersSide | None,
    ruler: Ruler,
    args: argparse.Namespace,
    vocab_size: int,
) -> tuple[dict[str, dict[str, list[Run]]], dict[str, list[MeasuredLimits]]]:
    """All rounds, the sides alternating: runs by workload and side, and the limits next to the engine's runs."""
    runs: dict[str, dict[str, list[Run]]] = {
        w.name: {"engine": [], "transformers": [], "by_hand": []} for w in workloads
    }
    limits: dict[str, list[MeasuredLimits]] = {w.name: [] for w in workloads}
    peer_rounds = args.rounds if args.peer_rounds is None else args.peer_rounds
    for workload in workloads:
        warm = workload.shortened().prompts(vocab_size, seed=-2)
        engine.run(warm, 2)
    for turn in range(args.rounds):
        for workload in workloads:
            found = runs[workload.name]
            prompts = workload.prompts(vocab_size, seed=turn)
            before = ruler.measure(RULER_TURNS)
            found["engine"].append(engine.run(prompts, workload.output_len))
            here = combine(before, ruler.measure(RULER_TURNS))
            limits[workload.name].append(here)
            line = f"round {turn + 1} {workload.name}: engine {found['engine'][-1].seconds:.2f} s"
            line += f" at {here.memory_gb_per_second:.0f} GB/s, {here.gemm_gflops:.0f} GFLOP/s"
            if peer is not None and turn < peer_rounds:
                found["transformers"].append(peer.run(prompts, workload.output_len, workload.name))
                line += f", transformers {found['transformers'][-1].seconds:.2f} s"
                if workload.shared_len and turn == 0:
                    hand = peer.run_with_shared_prefix(prompts, workload.shared_len, workload.output_len, workload.name)
                    found["by_hand"].append(hand)
                    line += f" ({hand.seconds:.2f} s with the shared prefix computed once by hand)"
            print(line, flush=True)
    return runs, limits


def side_figures(workload: Workload, runs: list[Run]) -> dict[str, Any]:
    """Median rate and spread over the rounds."""
    seconds = [run.seconds for run in runs]
    return {
        "tokens_per_second": workload.counted_tokens / median(seconds),
        "seconds": seconds,
        "spread": spread(seconds),
        "first_token_seconds": median([run.first_token_seconds for run in runs]),
    }


def workload_result(
    workload: Workload, runs: dict[str, list[Run]], limits: list[MeasuredLimits], work: ModelWork, peer: Peer | None
) -> dict[str, Any]:
    """The result of one workload. Run i of the engine is compared with `limits[i]`."""
    reachable = [workload.limit(work, here.machine) for here in limits]
    result: dict[str, Any] = {
        "workload": workload.text,
        "limit_tokens_per_second": median(reachable),
        "limits": [asdict(here) for here in limits],
    }
    result["engine"] = ours = side_figures(workload, runs["engine"])
    fractions = [workload.counted_tokens / run.seconds / limit for run, limit in zip(runs["engine"], reachable)]
    ours["fractions_of_limit"] = fractions
    ours["fraction_of_limit"] = median(fractions)
    if runs["transformers"]:
        result["transformers"] = side_figures(workload, runs["transformers"])
        result["ratios"] = in_turn(runs["transformers"], runs["engine"])
        result["ratio"] = median(result["ratios"])
        result["agreement"] = agreement(runs["engine"][0].outputs, runs["transformers"][0].outputs)
    if runs["by_hand"]:
        by_hand = side_figures(workload, runs["by_hand"])
        result["transformers_prefix_by_hand"] = by_hand | {"ratio": median(in_turn(runs["by_hand"], runs["engine"]))}
    if peer is not None:
        result["best_peer"] = asdict(peer)
    return result


def in_turn(theirs: list[Run], ours: list[Run]) -> list[float]:
    """The speed-up in each round with both sides: the machine's speed varies between rounds."""
    return [peer.seconds / engine.seconds for peer, engine in zip(theirs, ours)]


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    """The workloads below the target."""
    reached = {name: result["engine"]["fraction_of_limit"] for name, result in results.items()}
    return [f"{name}: {fraction:.0%} of the limit" for name, fraction in reached.items() if fraction < TARGET]


def result_table(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, result in results.items():
        ours, theirs, peer = result["engine"], result.get("transformers"), result.get("best_peer")
        rows.append(
            [
                f"{name}  {result['workload']}",
                f"{ours['tokens_per_second']:.1f}",
                f"{result['limit_tokens_per_second']:.1f}",
                f"{ours['fraction_of_limit']:.0%}",
                f"{peer['fraction']:.0%} {peer['name']}" if peer else "-",
                f"{theirs['tokens_per_second']:.1f}" if theirs else "-",
                f"{result['ratio']:.1f}x" if theirs else "-",
                f"{ours['first_token_seconds'] * 1e3:.0f}",
                f"{ours['spread']:.0%}",
            ]
        )
    header = ["workload", "tok/s", "limit", "of limit", "best peer", "transf.", "ratio", "TTFT ms", "spread"]
    return report.table(header, rows)


def notes(
    results: dict[str, dict[str, Any]], peer: TransformersSide | None, touched: dict[str, dict[str, float]]
) -> list[str]:
    """Notes below the table."""
    lines = [
        "tok/s counts output tokens (W4: prompt tokens), prefill time included.",
        "limit and fraction are medians over the rounds, each relative to the machine's limit in that round.",
        "ratio is the median over the rounds with both sides; spread is (slowest - fastest) / median.",
    ]
    if peer is not None:
        lines += [f"{name}: transformers ran with {mode}." for name, mode in peer.modes.items()]
    for name, counts in touched.items():
        lines.append(
            f"{name}: a decode step touched {counts['measured']:.1f} experts per layer; "
            f"the limit counts {counts['expected']:.1f}."
        )
    for name, result in results.items():
        if "agreement" in result:
            same = result["agreement"]
            lines.append(
                f"{name}: same first token in {same['same_first_token']:.0%} of the answers, "
                f"{same['mean_common_tokens']:.1f} common tokens on average (they diverge by bf16 rounding)."
            )
        if "transformers_prefix_by_hand" in result:
            hand = result["transformers_prefix_by_hand"]
            lines.append(
                f"{name}: transformers with the shared prefix computed once by hand: "
                f"{hand['tokens_per_second']:.1f} tok/s, ratio {hand['ratio']:.1f}x."
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    args, flags = parse_arguments(argv)
    workloads = [WORKLOADS[name] for name in args.workloads]
    if args.quick:
        workloads, args.rounds = [workload.shortened() for workload in workloads], 1
    else:
        report.wait_until_quiet(args)
    path = ensure_checkpoint(args.shape)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    work = ModelWork.from_checkpoint(path)
    ruler = Ruler(args.bench_device, **({"read_mib": 128, "gemm_size": 1024} if args.quick else {}))
    began = time.perf_counter()
    same = float32_agreement(path, flags, args.bench_device, vocab_size) if args.peers == "transformers" else None
    peer = TransformersSide(path, args.bench_device) if args.peers == "transformers" else None
    touched: dict[str, dict[str, float]] = {}
    for workload in workloads if peer is not None else []:
        assert peer is not None
        if not args.no_probe:
            print(f"{workload.name}: transformers is fastest with {peer.choose(workload, vocab_size)}", flush=True)
        count = peer.experts_touched(workload, vocab_size)
        if count is not None:
            touched[workload.name] = {"measured": count, "expected": work.experts_touched(workload.num_streams)}
    engine = EngineSide(path, flags)
    try:
        with frozen_heap():
            runs, limits = measure(workloads, engine, peer, ruler, args, vocab_size)
        facts = engine.facts()
    finally:
        engine.close()
    peers = {} if args.quick else PEERS.get(args.shape, {})
    results = {w.name: workload_result(w, runs[w.name], limits[w.name], work, peers.get(w.name)) for w in workloads}
    best = reduce(combine, chain.from_iterable(limits.values()))
    print("\nThe best of all rounds:\n" + limits_table(best) + "\n")
    print(result_table(results) + "\n")
    print("\n".join(notes(results, peer, touched)))
    if missed(results):
        print("\n".join(["\ntargets missed:", *missed(results)]))
    if same is not None:
        print(f"\nin float32 the first tokens of both sides agree in {same['same_first_token']:.0%} of the answers")
    values = {
        "shape": args.shape,
        "quick": args.quick,
        "rounds": args.rounds,
        "seconds": time.perf_counter() - began,
        "best_limits": asdict(best),
        "engine": facts,
        "transformers_modes": {name: asdict(mode) for name, mode in peer.modes.items()} if peer else {},
        "transformers_probes_seconds": peer.probes if peer else {},
        "experts_touched": touched,
        "float32_agreement": same,
        "missed": missed(results),
        "results": results,
    }
    report.write_if_asked(args, args.name, values, args.bench_device)
    return 0 if same is None or same["same_first_token"] == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
