"""Structured output: ``python -m benchmarks.structured_output [--parts walks battery performance]``.

*walks*: random texts that the masks of a backend allow, without a model. *battery*: the same schemas through the engine
with the embedded model, greedy and sampled, with drafts, on several ranks, among free requests. Every finished output
must be valid for the `jsonschema` package with its format checks; every schema is served or refused by name. Exits with
1 otherwise. *performance*: cost of constraints, against targets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.structured_output import performance
from benchmarks.structured_output.battery import ENGINES, SUBSET, Outcome, compare, engine_of, run_form, server_flags
from benchmarks.structured_output.gaps import COMPARED, measure_gaps
from benchmarks.structured_output.schemas import Drawn, draw_schemas
from benchmarks.structured_output.walks import run_walks

HOT = 1.5


def run_battery(schemas: Sequence[Drawn], backend: str, engines: Sequence[str], max_new_tokens: int) -> list[Outcome]:
    found: list[Outcome] = []
    first: Outcome | None = None
    for name in engines:
        some = schemas[:SUBSET] if name in ("tp2", "dp2") else schemas
        with engine_of(name, backend) as engine:
            greedy = run_form(engine, f"{name}, greedy", some, 0, max_new_tokens // 2)
            sampled = run_form(engine, f"{name}, sampled", some, HOT, max_new_tokens)
        if first is None:
            first = greedy
        else:
            compare(first, greedy, some)
        found += [greedy, sampled]
        for one in found[-2:]:
            show(one)
    return found


def show(one: Outcome) -> None:
    print(
        f"{one.form}: {one.finished} finished and valid or faulty, {one.cut} cut at the limit, {one.refused} refused, "
        f"{len(one.faults)} faults, {one.seconds:.1f} s",
        flush=True,
    )
    for fault in one.faults[:10]:
        print("  fault:", json.dumps(fault, ensure_ascii=False)[:600])


def show_performance(values: dict[str, Any]) -> None:
    ttft, rates, gaps = values["ttft"], values["throughput"], values["gaps"]
    rows = [
        ["first token, none -> cached (ms)", f"{ttft['none_s'] * 1e3:.2f}", f"{ttft['cached_s'] * 1e3:.2f}"],
        ["32 streams, free -> constrained (tok/s)", f"{rates['free_tok_s']:.0f}", f"{rates['constrained_tok_s']:.0f}"],
    ]
    for row, part in zip(rows, (ttft, rates)):
        row.append(f"{part['ratio']:.3f}")
    largest = gaps["largest_s"]
    for base, kind in COMPARED:
        name = f"largest gap, {base} request -> {kind} (ms)"
        both = f"{largest[base] * 1e3:.2f}", f"{largest[kind] * 1e3:.2f}"
        rows.append([name, *both, f"{gaps['ratio'][f'{base} -> {kind}']:.3f}"])
    for streams, free, calls in (
        (performance.STREAMS, rates["free_tok_s"], rates["calls_tok_s"]),
        (1, rates["one_free_tok_s"], rates["one_of_calls_tok_s"]),
    ):
        name = f"{streams} streams, free -> tool calls, mostly fixed text (tok/s)"
        rows.append([name, f"{free:.0f}", f"{calls:.0f}", f"{calls / free:.3f}"])
    print(report.table(["median", "without", "with", "ratio"], rows))
    for name, passed in {
        "first token within 5 %": ttft["ratio"] <= performance.TARGETS["ttft"],
        "throughput at least 0.95": rates["ratio"] >= performance.TARGETS["throughput"],
        **{
            f"gaps beside a {kind} within 5 % of those beside a {base} request": gaps["ratio"][f"{base} -> {kind}"]
            <= performance.TARGETS["gaps"]
            for base, kind in COMPARED
            if kind.startswith("new")
        },
    }.items():
        print(f"target: {name}: {'pass' if passed else 'short'}")


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("structured_output", __doc__, allow_abbrev=False)
    parser.add_argument("--parts", nargs="+", default=["walks", "battery", "performance"])
    parser.add_argument("--backend", default="llguidance", help="of --grammar-backend")
    parser.add_argument("--schemas", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walks", type=int, default=8, help="random texts of each schema")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the performance part")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream of the performance part")
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    if "performance" in args.parts:
        report.wait_until_quiet(args)
    schemas = draw_schemas(args.seed, args.schemas)
    values: dict[str, Any] = {"backend": args.backend, "seed": args.seed, "schemas": len(schemas)}
    if "performance" in args.parts:
        with engine_of("plain", args.backend) as engine:
            values["performance"] = performance.measure(engine, args.rounds, args.tokens)
        values["performance"]["gaps"] = measure_gaps(server_flags(args.backend), args.rounds)
        show_performance(values["performance"])
    outcomes: list[Outcome] = []
    if "walks" in args.parts:
        outcomes.append(run_walks(args.backend, schemas, args.seed, args.walks))
        show(outcomes[0])
    if "battery" in args.parts:
        outcomes += run_battery(schemas, args.backend, args.engines, args.max_new_tokens)
    if outcomes:
        reasons = max((one.reasons for one in outcomes), key=Counter.total)
        print(f"{len(schemas) - reasons.total()} schemas served, {reasons.total()} refused:")
        for reason, count in reasons.most_common():
            print(f"  {count:4d}  {reason}")
        values["refused"] = dict(reasons.most_common())
        values["forms"] = {
            one.form: {"finished": one.finished, "cut": one.cut, "refused": one.refused, "faults": one.faults}
            for one in outcomes
        }
    report.write_if_asked(args, _name(args.backend), values)
    return 1 if any(one.faults for one in outcomes) else 0


def _name(backend: str) -> str:
    return "structured_output" if backend == "llguidance" else f"structured_output_{backend}"


if __name__ == "__main__":
    raise SystemExit(main())
