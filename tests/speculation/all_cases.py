"""A correctness run: tokens with speculation must equal those without it: ``python -m tests.speculation.all_cases``.

Runs a pairwise cover of the factors in `tests.speculation.matrix` (drafters, depths, widths, prefix cache, chunks,
pages, retraction, aborts, penalties, log-probabilities, ...) on tiny random checkpoints: every pair of values of two
factors occurs in a case. Tokens must be equal, and log-probabilities to within 1e-4. Prints a line per case, writes
JSON on request, and exits with 1 on a difference. Run from the root of the repository, with the test extras installed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.speculation.matrix import FACTORS, Case, Matrix, Outcome, Scale, allowed
from tests.speculation.pairwise import pairwise_cover


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.speculation.all_cases", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--prompts", type=int, default=64, help="requests per case (default: 64)")
    parser.add_argument("--tokens", type=int, default=96, help="max tokens of a request (default: 96)")
    parser.add_argument("--seed", type=int, default=0, help="seed of checkpoints, prompts and the choice of cases")
    parser.add_argument("--only", nargs="*", default=[], metavar="FACTOR=VALUE", help="only cases with these values")
    parser.add_argument("--json", type=Path, help="output file of the results")
    args = parser.parse_args(argv)
    wanted = dict(item.split("=", 1) for item in args.only)
    if unknown := wanted.keys() - FACTORS.keys():
        parser.error(f"no factor {', '.join(sorted(unknown))}; choose from {', '.join(FACTORS)}")
    cases = [
        case
        for case in pairwise_cover(FACTORS, allowed, args.seed)
        if all(str(case[name]) == value for name, value in wanted.items())
    ]
    # a tiny pool barely fits the longest request
    scale = Scale(args.prompts, args.tokens, tiny_pool=-(-(args.tokens + 80) // 16) * 16)
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(Matrix(Path(folder), scale, args.seed), cases)
    if args.json:
        settings = {"prompts": args.prompts, "tokens": args.tokens, "seed": args.seed}
        args.json.write_text(json.dumps({"settings": settings, "cases": results}, indent=1) + "\n")
    wrong = sum(bool(result["differences"]) for result in results)
    print(f"{len(results)} cases, {wrong} with differences")
    return 1 if wrong or not results else 0


def run_cases(matrix: Matrix, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs cases, printing a line for each; returns them with their results."""
    widths = [max(len(name), *(len(str(value)) for value in values)) for name, values in FACTORS.items()]
    print("  ".join(name.ljust(width) for name, width in zip(FACTORS, widths)) + "  drafts  tokens/step  retracted")
    results = []
    for case in cases:
        began = time.perf_counter()
        outcome = matrix.run(case)
        results.append(_row(case, outcome, time.perf_counter() - began))
        values = "  ".join(str(value).ljust(width) for value, width in zip(case.values(), widths))
        stats = outcome.speculation
        print(f"{values}  {sum(stats.proposed):6}  {stats.accept_length:11.2f}  {outcome.retractions:9}", flush=True)
        for rid, difference in outcome.differences.items():
            print(f"    {rid} {difference}", flush=True)
    return results


def _row(case: Case, outcome: Outcome, seconds: float) -> dict[str, Any]:
    stats = outcome.speculation
    return {
        "case": dict(case),
        "seconds": round(seconds, 2),
        "accept_length": round(stats.accept_length, 3),
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "retractions": outcome.retractions,
        "differences": outcome.differences,
    }


if __name__ == "__main__":
    raise SystemExit(main())
