"""Compiles every Triton kernel ahead of time for sm_90 and sm_100 and shows the compiler's report; needs no GPU.

    python -m benchmarks.aot_table [--arch 90 100] [--only TEXT] [--one-of-each | --quick] [--output FILE] [--no-json]
    python -m benchmarks.aot_table --complete FILE    # compiles what FILE lacks, leaves out what is no case

Each line is a kernel with the types and constants of a model's shape. `stack` is ptxas's spill memory and must be 0.
`tensor cores` are the instructions in the PTX: wgmma (sm_90), tcgen05 (sm_100), or mma.sync if a tile has fewer than 64
rows. Exit code 1 if a kernel does not compile, spills, exceeds the shared memory of a block, or has matrix products
without tensor cores.

Writes benchmarks/results/<date>_<device>_aot_table.json, or FILE, and the table in Markdown beside it. Seconds are of
this run; 0.00: loaded from Triton's cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.report import command_parser, table, write_result
from moe_engine.kernels.triton.aot import AotCase, AotReport
from moe_engine.kernels.triton.compile_many import AotFailure, Job, Result, compile_many, one_of_each
from moe_engine.kernels.triton.modules import all_cases

ARCHS = (90, 100)
COLUMNS = ("kernel", "sm", "registers", "stack", "shared", "tensor memory", "warps", "tensor cores", "s")


def line(result: Result) -> list[str]:
    """A row of the table."""
    if not isinstance(result, AotReport):
        return [result.name, str(result.arch), result.error[:60], *[""] * (len(COLUMNS) - 3)]
    r = result
    numbers = (r.arch, r.registers, r.spill_bytes, r.shared_bytes, r.tensor_memory_columns, r.num_warps)
    return [r.name, *map(str, numbers), " ".join(r.instructions) or "-", f"{r.seconds:.2f}"]


def markdown(results: Sequence[Result]) -> str:
    """The table in Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(line, results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def jobs_of(cases: Sequence[AotCase], archs: Sequence[int], quick: bool) -> list[Job]:
    """Every case for every architecture; quick: each case for one architecture. Cases without matrix products use the
    first, cases with them alternate."""
    if not quick:
        return [(case, arch) for arch in archs for case in cases]
    matrix = [case for case in cases if case.matrix]
    places = {id(kernel): place for place, kernel in enumerate(dict.fromkeys(case.kernel for case in matrix))}
    return [(case, archs[places[id(case.kernel)] % len(archs)] if case.matrix else archs[0]) for case in cases]


def run(
    archs: Sequence[int], only: str, one_each: bool, processes: int, quick: bool = False, part: tuple[int, int] = (0, 1)
) -> list[Result]:
    """Results of the cases with `only` in their name, for every architecture. `part`: (number, count) of parts."""
    cases = [case for case in all_cases() if only in case.name]
    if one_each or quick:
        cases = one_of_each(cases)
    if quick:  # large tiles run out of registers and shared memory first
        largest = {id(case.kernel): case for case in cases}
        cases = [case for case in cases if case is largest[id(case.kernel)]]
    jobs = jobs_of(cases[part[0] :: part[1]], archs, quick)
    results = []
    for number, result in enumerate(compile_many(jobs, processes), 1):
        results.append(result)
        for problem in result.problems():
            print(f"{result.name} sm_{result.arch}: {problem}", file=sys.stderr)
        if sys.stderr.isatty():
            print(f"\r{number}/{len(jobs)}", end="", file=sys.stderr)
    return results


def lacking(file: Path, cases: Sequence[AotCase]) -> list[Job]:
    """The cases that a written table lacks, for each architecture."""
    known = {(row["name"], row["arch"]) for row in json.loads(file.read_text())["kernels"]}
    return [(case, arch) for arch in ARCHS for case in cases if (case.name, arch) not in known]


def complete(file: Path, processes: int) -> int:
    """Compiles the cases that a written table lacks and writes it again: in the order of the modules, without kernels
    that are no cases any more. Returns the number of kernels with problems."""
    body, cases = json.loads(file.read_text()), all_cases()
    rows = {(row["name"], row["arch"]): row for row in body["kernels"]}
    found = list(compile_many(lacking(file, cases), processes))
    rows |= {(result.name, result.arch): _row(result) for result in found}
    places = [(case.name, arch) for arch in ARCHS for case in cases]
    body["kernels"] = [rows[place] for place in places]
    file.write_text(json.dumps(body, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown([read(row) for row in body["kernels"]]))
    print(table(COLUMNS, [line(result) for result in found]))
    return sum(bool(result.problems()) for result in found)


def _row(result: Result) -> dict[str, Any]:
    return asdict(result) | {"problems": result.problems()}


def read(row: Mapping[str, Any]) -> Result:
    """The result of a written row."""
    kind = AotFailure if "error" in row else AotReport
    names = {each.name for each in fields(kind)}
    own: dict[str, Any] = {name: value for name, value in row.items() if name in names}
    own |= {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
    return kind(**own)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("aot_table", __doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[*ARCHS], choices=ARCHS)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--one-of-each", action="store_true", help="one case of every kernel")
    parser.add_argument("--quick", action="store_true", help="the largest case of every kernel, for one --arch")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="part I (from 0) of N parts"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON here")
    parser.add_argument("--no-json", action="store_true")
    parser.add_argument("--complete", type=Path, metavar="FILE", help="compile what this table lacks, and add it")
    options = parser.parse_args(argv)
    if options.complete:
        return 1 if complete(options.complete, options.processes) else 0
    began = time.perf_counter()
    results = run(options.arch, options.only, options.one_of_each, options.processes, options.quick, options.part)
    bad = [result for result in results if result.problems()]
    print(table(COLUMNS, [line(result) for result in results]))
    print(f"{len(results)} kernels in {time.perf_counter() - began:.0f} s, {len(bad)} with problems")
    if not options.no_json:
        body: dict[str, Any] = {"kernels": [_row(result) for result in results]}
        file = write_result("aot_table", body, path=options.output)
        file.with_suffix(".md").write_text(markdown(results))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
