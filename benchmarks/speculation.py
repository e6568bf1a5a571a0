"""Speed-up of speculative decoding: ``python -m benchmarks.speculation [options]``.

The same greedy requests on engines that differ only in their drafts: none, automatic depth (``auto``), and fixed
depths. All engines exist at once, each with its own core process, which sleeps while another runs, and alternate in
every round; a ratio is one round's, and the median of the ratios counts. Round 0 is a short warm-up (``auto`` learns
the cost of a draft) and is not counted. Needs a quiet machine. Further options are flags of the engine.

    python -m benchmarks.speculation                        the embedded model, and the 390 M checkpoint at 0.8
    python -m benchmarks.speculation --models random        drafts that are never correct: the overhead of speculation
    python -m benchmarks.speculation --models embedded --concurrency 1 --rounds 1 --questions 1 --no-json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.checkpoints import SHAPES
from benchmarks.speculation_subjects import SUBJECTS, Subject, make_subject
from moe_engine.tuning.stats import median, spread

KV_TOKENS = 16384
"""KV pool of each engine: fits every request, small compared to the weights."""
WARMUP_PART = 4
"""Factor by which round 0 has fewer requests than the others (at the same concurrency)."""
OFF = "off"
TARGET_ONE, TARGET_FLOOR, TARGET_POINTS = 1.6, 0.98, 0.02
"""For ``auto``: gain with one request, worst ratio anywhere. For fixed depths: distance to the offline acceptance."""


@dataclass(frozen=True)
class Run:
    """One round of one engine. `steps`: verified steps. At position i, `accepted[i]` of `proposed[i]` drafts were
    accepted together with all earlier drafts."""

    seconds: float
    outputs: list[list[int]]
    steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Output tokens per second, prefill included."""
        return sum(map(len, self.outputs)) / self.seconds


Runs = dict[int, dict[str, list[Run]]]
"""Counted runs, one per round, by concurrency and drafting mode."""
Figures = dict[int, dict[str, dict[str, Any]]]
"""Metrics by the same keys."""


class EngineSide:
    """An engine with one drafting mode: ``off``, ``auto`` or a fixed number of drafts."""

    def __init__(self, model_path: Path | None, drafts: str, flags: dict[str, Any]) -> None:
        from moe_engine import Engine

        self.drafts = drafts
        path = None if model_path is None else str(model_path)
        self._engine = Engine(path, **flags, **drafting_flags(drafts, flags))

    def run(self, prompts: list[list[int]], sampling: dict[str, Any], concurrency: int) -> Run:
        """Runs all prompts, `concurrency` at a time, with an empty prefix cache."""
        self._engine.flush_cache()
        before = self._counts()
        began = time.perf_counter()
        outputs = asyncio.run(self._answer(prompts, sampling, concurrency))
        seconds = time.perf_counter() - began
        steps, proposed, accepted = (
            tuple(now - then for now, then in zip(after, old)) for after, old in zip(self._counts(), before)
        )
        return Run(seconds, outputs, sum(steps), proposed, accepted)

    async def _answer(self, prompts: list[list[int]], sampling: dict[str, Any], concurrency: int) -> list[list[int]]:
        places = asyncio.Semaphore(concurrency)

        async def ask(prompt: list[int]) -> list[int]:
            async with places:
                answer: Any = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling)
                return list(answer["output_ids"])

        return await asyncio.gather(*map(ask, prompts))

    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        """Verified steps, drafts proposed and accepted by position, since the start."""
        found = self._engine.get_server_info()["internal_states"][0].get("speculation")
        return ([found["verify_total"]], found["proposed"], found["accepted"]) if found else ([], [], [])

    def close(self) -> None:
        self._engine.shutdown()


def drafting_flags(drafts: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The engine's flags for ``off``, ``auto`` or a depth; the drafter is from `flags`, else NEXTN."""
    if drafts == OFF:
        return {"speculative_algorithm": None}
    chosen = {"speculative_algorithm": flags.get("speculative_algorithm", "NEXTN"), "speculative_num_steps": drafts}
    if drafts != "auto":
        chosen |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": int(drafts) + 1}
    return chosen


def measure(subject: Subject, args: argparse.Namespace, flags: dict[str, Any]) -> Runs:
    """Runs all rounds; returns the counted runs."""
    found: Runs = {}
    with ExitStack() as stack:
        sides = []
        for drafts in [OFF, *args.depths]:
            side = EngineSide(subject.path, drafts, flags)
            stack.callback(side.close)
            sides.append(side)
        for concurrency in args.concurrency:
            runs = found[concurrency] = {side.drafts: [] for side in sides}
            for turn in range(args.rounds + 1):
                prompts = subject.prompts(concurrency, turn)
                if not turn:
                    prompts = prompts[: max(concurrency, len(prompts) // WARMUP_PART)]
                first = turn % len(sides)  # rotates the side that runs first after a pause
                for side in sides[first:] + sides[:first]:
                    run = side.run(prompts, subject.sampling, concurrency)
                    if turn:
                        runs[side.drafts].append(run)
                print(f"{subject.name}, {concurrency} at once: round {turn} of {args.rounds}", flush=True)
    return found


# -- figures


def figures(runs: Runs) -> Figures:
    """Medians over the rounds, and draft acceptance over all of them."""
    return {n: {drafts: _side_figures(mine, sides[OFF]) for drafts, mine in sides.items()} for n, sides in runs.items()}


def _side_figures(mine: list[Run], off: list[Run]) -> dict[str, Any]:
    steps = sum(run.steps for run in mine)
    proposed, accepted = drafts_of(mine)
    ratios = [a.rate / b.rate for a, b in zip(mine, off)]
    pairs = [pair for a, b in zip(mine, off) for pair in zip(a.outputs, b.outputs)]
    return {
        "tokens_per_second": median([run.rate for run in mine]),
        "seconds": [run.seconds for run in mine],
        "ratio": median(ratios),
        "ratios": ratios,
        "ratio_spread": spread(ratios),
        "accept_length": 1 + sum(accepted) / steps if steps else None,
        "drafts_per_step": sum(proposed) / steps if steps else 0.0,
        "proposed": proposed,
        "accepted": accepted,
        "same_answers": sum(a == b for a, b in pairs) / len(pairs),
    }


def drafts_of(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Drafts proposed and accepted by position, of all runs."""
    proposed = [sum(counts) for counts in zip(*(run.proposed for run in runs))]
    return proposed, [sum(counts) for counts in zip(*(run.accepted for run in runs))]


def acceptance(subject: Subject, runs: Runs) -> dict[str, tuple[list[float], list[float]]]:
    """By fixed depth: share of drafts accepted at each position over all rounds, and the same offline.

    Offline: the chains that this depth would draft in the answers without speculation.
    """
    answers: dict[tuple[int, ...], list[int]] = {}
    mine: dict[str, list[Run]] = {}
    for concurrency, sides in runs.items():
        for turn, run in enumerate(sides[OFF], 1):
            answers |= zip(map(tuple, subject.prompts(concurrency, turn)), run.outputs)
        for drafts, some in sides.items():
            mine.setdefault(drafts, []).extend(some)
    found = {}
    for drafts in filter(str.isdecimal, mine):
        proposed, accepted = drafts_of(mine[drafts])
        offline = subject.offline(int(drafts), [list(prompt) for prompt in answers], list(answers.values()))
        found[drafts] = rates(accepted, proposed), offline
    return found


def rates(accepted: Sequence[int], proposed: Sequence[int]) -> list[float]:
    return [a / p for a, p in zip(accepted, proposed) if p]


def verdicts(values: Figures, accepted: dict[str, tuple[list[float], list[float]]], *, gains: bool) -> dict[str, bool]:
    """The targets that apply to these figures, and whether they are reached.

    Args:
        gains: a speed-up is expected from the acceptance.
    """
    held: dict[str, bool] = {}
    autos = {concurrency: sides["auto"]["ratio"] for concurrency, sides in values.items() if "auto" in sides}
    if 1 in autos and gains:
        held[f"auto gains {TARGET_ONE}x with one request"] = autos[1] >= TARGET_ONE
    if autos:
        held[f"auto is never below {TARGET_FLOOR}x"] = min(autos.values()) >= TARGET_FLOOR
    distances = [abs(a - b) for pair in accepted.values() for a, b in zip(*pair)]
    if distances:
        held[f"acceptance is within {TARGET_POINTS:.0%} of offline"] = max(distances) <= TARGET_POINTS
    return held


def result_table(values: Figures) -> str:
    header = [
        "at once",
        "drafts",
        "tok/s",
        "ratio",
        "spread",
        "accept len",
        "drafts/step",
        "accepted by position",
        "same",
    ]
    rows = []
    for concurrency, sides in values.items():
        for drafts, side in sides.items():
            length = side["accept_length"]
            rows.append(
                [
                    str(concurrency),
                    drafts,
                    f"{side['tokens_per_second']:.1f}",
                    f"{side['ratio']:.2f}x",
                    f"{side['ratio_spread']:.0%}",
                    f"{length:.2f}" if length else "",
                    f"{side['drafts_per_step']:.1f}" if length else "",
                    _percentages(rates(side["accepted"], side["proposed"])),
                    f"{side['same_answers']:.0%}",
                ]
            )
    return report.table(header, rows)


def _percentages(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.1%}" for rate in rates)


# -- command line


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own options, and the engine's flags as keywords."""
    parser = report.command_parser("speculation", __doc__, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=["embedded", "agreeing"])
    parser.add_argument("--agreement", type=float, default=0.8, help="agreeing: share of correct drafts")
    parser.add_argument("--shape", choices=sorted(s for s in SHAPES if "moe" in s), default="moe-390m")
    parser.add_argument("--depths", nargs="+", type=_depth, default=["auto", "1", "3"], metavar="auto|N")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32], help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=8, help="embedded: questions per task")
    parser.add_argument("--input-len", type=int, default=32, help="other models: random tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="other models: tokens of an answer")
    parser.add_argument("--name", default="speculation", help="part of the result file's name")
    report.add_result_options(parser)
    own, flags = report.parse_with_engine_flags(parser, argv)
    return own, {"max_total_tokens": KV_TOKENS, **flags}


def _depth(text: str) -> str:
    if text == "auto" or (text.isdecimal() and int(text) > 0):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: auto, or a number of drafts above 0")


def main(argv: list[str] | None = None) -> int:
    args, flags = parse_arguments(argv)
    report.wait_until_quiet(args)
    results: dict[str, Any] = {}
    for name in args.models:
        subject = make_subject(name, args)
        runs = measure(subject, args, flags)
        values, accepted = figures(runs), acceptance(subject, runs)
        held = verdicts(values, accepted, gains=subject.gains)
        print(f"\n{subject.name}: {subject.text}")
        print(result_table(values))
        for depth, (mine, offline) in accepted.items():
            print(f"depth {depth}: accepted by position {_percentages(mine)}; offline {_percentages(offline)}")
        for target, good in held.items():
            print(f"{'pass ' if good else 'short'}  {target}")
        print()
        by_depth = {depth: {"engine": mine, "offline": offline} for depth, (mine, offline) in accepted.items()}
        results[name] = {"text": subject.text, "concurrency": values, "acceptance": by_depth, "targets": held}
    options = {key: value for key, value in vars(args).items() if key not in ("json", "no_json", "busy", "name")}
    report.write_if_asked(args, args.name, {"options": options, "models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
