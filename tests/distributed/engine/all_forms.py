"""A long correctness run: ``python -m tests.distributed.engine.all_forms`` compares all parallel forms with one rank.

The cases combine the factors of `tests.distributed.engine.forms` on tiny random checkpoints: each attention form with
each expert form at 2, 4 and 8 ranks, and every pair of other settings (model, replicas, head, dense layers, drafts,
chunks, pages, prefix cache, retraction, ...) occurs. Tokens, greedy and sampled, must be equal, and log-probabilities
of tokens and prompts equal to within 1e-4. The command prints a line per case, writes JSON after each case, exits with
1 on a difference, and continues an interrupted run with ``--resume FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.distributed.engine.forms import FACTORS, Case, Forms, allowed
from tests.speculation.pairwise import pairwise_cover

SPREAD = ("attention", "experts")


def whole_matrix(seed: int) -> list[dict[str, Any]]:
    """Cases that cover each form with each number of ranks, and any two other settings together."""
    spreads = [(attention, experts) for attention in FACTORS["attention"] for experts in FACTORS["experts"]]
    factors = {"form": spreads, **{name: values for name, values in FACTORS.items() if name not in SPREAD}}
    cover = pairwise_cover(factors, lambda case: allowed(_apart(case)), seed)
    return sorted((_apart(case) for case in cover), key=lambda case: [str(value) for value in case.values()])


def _apart(case: Mapping[str, Any]) -> dict[str, Any]:
    found = {**dict(zip(SPREAD, case["form"])), **case} if "form" in case else dict(case)
    return {name: found[name] for name in FACTORS if name in found}


def run_cases(
    forms: Forms,
    cases: list[dict[str, Any]],
    done: list[dict[str, Any]],
    keep: Callable[[list[dict[str, Any]]], object],
) -> list[dict[str, Any]]:
    """Runs the cases that are not done, printing a line for each; returns all results.

    Args:
        keep: called with all results so far after each case.
    """
    widths = [max(len(name), *(len(str(value)) for value in values)) for name, values in FACTORS.items()]
    print("  ".join(name.ljust(width) for name, width in zip(FACTORS, widths)) + "  seconds  retracted  error")
    results = list(done)
    finished = [result["case"] for result in done]
    for case in cases:
        if case in finished:
            continue
        result = _run_case(forms, case)
        results.append(result)
        keep(results)
        values = "  ".join(str(case[name]).ljust(width) for name, width in zip(FACTORS, widths))
        retractions, error = result.get("retractions", "-"), result.get("largest_logprob_error")
        shown = "failed" if error is None else f"{error:.1e}"
        print(f"{values}  {result['seconds']:7.1f}  {retractions:>9}  {shown}", flush=True)
        for name in ("failure", "differences", "problems"):
            if result.get(name):
                print(f"    {name}: {result[name]}", flush=True)
    return results


def _run_case(forms: Forms, case: Case) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found = vars(forms.run(case))
    except Exception as error:  # a failing engine must not stop the other cases
        found = {"failure": f"{type(error).__name__}: {error}"}
    return {"case": dict(case), "seconds": round(time.perf_counter() - began, 2), **found}


def _is_wrong(result: dict[str, Any]) -> bool:
    return bool(result.get("failure") or result["differences"] or result["problems"])


def summary(results: list[dict[str, Any]]) -> str:
    """Agreeing cases out of all run cases, for each form by number of ranks."""
    rows = []
    for attention in FACTORS["attention"]:
        for experts in FACTORS["experts"]:
            row = [f"{attention}, experts {experts}"]
            for ranks in FACTORS["ranks"]:
                form = {"attention": attention, "experts": experts, "ranks": ranks}
                run = [result for result in results if form.items() <= result["case"].items()]
                row.append(f"{sum(not _is_wrong(result) for result in run)} of {len(run)}" if run else "-")
            rows.append(row)
    return report.table(["attention", *(f"{ranks} ranks" for ranks in FACTORS["ranks"])], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed.engine.all_forms", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--prompts", type=int, default=32, help="requests of a case (default: 32)")
    parser.add_argument("--tokens", type=int, default=48, help="most prompt tokens of a request (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="seed of checkpoints, prompts and the choice of cases")
    parser.add_argument("--only", nargs="*", default=[], metavar="FACTOR=VALUE", help="only cases with these values")
    parser.add_argument("--json", type=Path, default=Path("all_forms.json"), help="results (default: all_forms.json)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue the interrupted run that wrote this file")
    args = parser.parse_args(argv)
    wanted = dict(item.split("=", 1) for item in args.only)
    if unknown := wanted.keys() - FACTORS.keys():
        parser.error(f"no factor {', '.join(sorted(unknown))}; choose from {', '.join(FACTORS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the started processes
    cases = [
        case
        for case in whole_matrix(args.seed)
        if all(str(case[name]) == value for name, value in wanted.items())
    ]  # fmt: skip
    settings = {"prompts": args.prompts, "tokens": args.tokens, "seed": args.seed, "only": args.only}
    done: list[dict[str, Any]] = []
    if args.resume:
        before = json.loads(args.resume.read_text())
        if before["settings"] != settings:
            parser.error(f"{args.resume} is from a run with {before['settings']}")
        done = [result for result in before["cases"] if result["case"] in cases and not _is_wrong(result)]
        print(f"{len(done)} of {len(cases)} cases agreed before")
    path = args.resume or args.json

    def keep(results: list[dict[str, Any]]) -> None:
        values = {"settings": settings, "planned": len(cases), "cases": results}
        report.write_result("all_forms", values, path=path)

    keep(done)
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(Forms(Path(folder), args.prompts, args.tokens, args.seed), cases, done, keep)
    wrong = sum(map(_is_wrong, results))
    print(f"\n{summary(results)}\n\n{len(results)} cases, {wrong} with differences or failures\n{path}")
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
