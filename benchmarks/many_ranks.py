"""Forms of parallelism against one rank on the same cores, and the cost of the DP sync of a step:

    python -m benchmarks.many_ranks [--shape moe-390m] [--forms one tp2 ep2 ...] [--rounds 3]

Each form runs the same greedy requests offline, interleaved; the threads of a form's ranks sum to the threads of one
rank. The DP sync is measured between schedulers in separate processes, without other load. Results are written after
each measurement, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from typing import Any

from benchmarks import checkpoints, report
from moe_engine import Engine
from moe_engine.core.dp_sync import DPSync, StepExchange
from moe_engine.tuning.stats import median
from moe_engine.types import StepFacts, StepPlan

FORMS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "ep2": {"tp_size": 2, "ep_size": 2},
    "ep2-shared-memory": {"tp_size": 2, "moe_a2a_backend": "shared_memory"},
    "ep2-all-to-all": {"tp_size": 2, "moe_a2a_backend": "all_to_all"},
    "dp2-ep2-shared-memory": {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory"},
    "dp2-ep2-overlap": {
        "tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory", "enable_two_batch_overlap": True,
    },
    "replicas2": {"dp_size": 2},
}  # fmt: skip


def throughput(form: dict[str, Any], path: str | None, requests: int, prompt: int, output: int) -> float:
    """Output tokens per second; startup is not counted."""
    options: dict[str, Any] = {} if path is None else {"model_path": path, "skip_tokenizer_init": True}
    with Engine(random_seed=0, **options, **form) as engine:
        vocab = engine.info.vocab_size
        ids = [[(i * 7919 + j * 31) % (vocab - 8) + 4 for j in range(prompt)] for i in range(requests)]
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": output}
        engine.generate(input_ids=ids[:4], sampling_params={**sampling, "max_new_tokens": 4})
        began = time.perf_counter()
        engine.generate(input_ids=ids, sampling_params=sampling)
        return requests * output / (time.perf_counter() - began)


def exchange_seconds(num_groups: int, steps: int) -> float:
    """Median seconds of one DP sync between `num_groups` schedulers."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        queue: Any = context.Queue()
        processes = [
            context.Process(target=_agree, args=(group, num_groups, steps, folder, queue))
            for group in range(num_groups)
        ]
        for process in processes:
            process.start()
        medians = [queue.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(10)
    return max(medians)


def _agree(group: int, num_groups: int, steps: int, folder: str, queue: Any) -> None:
    addresses = [f"ipc://{folder}/{i}" for i in range(num_groups)]
    mesh = StepExchange(group, num_groups, addresses[group])
    mesh.connect(addresses)
    dp_sync = DPSync(mesh, check=lambda: None)
    seconds = []
    for number in range(steps):
        began = time.perf_counter()
        dp_sync.sync_step(StepPlan(number), StepFacts(num_tokens=64, num_logits=64, num_running=64))
        seconds.append(time.perf_counter() - began)
    queue.put(median(seconds[steps // 10 :]))
    mesh.close()


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("many_ranks", __doc__)
    parser.add_argument("--shape", default="moe-390m", help="of benchmarks.checkpoints, or `demo`: the embedded model")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000, help="DP syncs measured")
    report.add_result_options(parser)
    args = parser.parse_args(argv)

    exchange = {groups: exchange_seconds(groups, args.steps) * 1e6 for groups in (2, 4)}
    for groups, microseconds in exchange.items():
        print(f"DP sync of a step, {groups} schedulers: {microseconds:.0f} us (median)")
    path = None if args.shape == "demo" else str(checkpoints.ensure_checkpoint(args.shape))
    rates: dict[str, list[float]] = {name: [] for name in args.forms}
    written = args.json or report.result_path("many_ranks", "cpu")
    for _ in range(args.rounds):
        for name in args.forms:
            rates[name].append(throughput(FORMS[name], path, args.requests, args.input_len, args.output_len))
            if not args.no_json:
                report.write_result("many_ranks", _values(args, exchange, rates), path=written)
    ratios = _ratios(rates)
    print(f"{'form':<24}{'tok/s':>10}{'ratio':>8}")
    for name in args.forms:
        print(f"{name:<24}{median(rates[name]):>10.0f}{ratios[name]:>8.2f}")
    if not args.no_json:
        print(written)
    return 0


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Ratios of the measured forms to the first."""
    base = median(next(iter(rates.values())))
    return {name: median(found) / base for name, found in rates.items() if found}


def _values(args: argparse.Namespace, exchange: dict[int, float], rates: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "shape": args.shape,
        "requests": args.requests,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "exchange_us": exchange,
        "output_tokens_per_second": rates,
        "ratio_to_first": _ratios(rates),
    }


if __name__ == "__main__":
    sys.exit(main())
