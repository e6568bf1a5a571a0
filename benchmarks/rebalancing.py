"""Step stalls during EPLB rebalancing: ``python -m benchmarks.rebalancing [--models demo moe-390m]``.

Two ranks with half of the experts each serve greedy requests with `--enable-eplb`, rebalancing at a fixed interval,
independent of the balance; rank 0 measures the time of the moves between two passes, relative to the time of the passes
while experts move. Several rounds, each with a new engine: medians, and the shares of all rounds. Target: below 5 %.
"""

from __future__ import annotations

from typing import Any

from benchmarks import checkpoints, report
from moe_engine import Engine
from moe_engine.tuning.stats import median

TARGET = 0.05


def measure(model: str, backend: str, requests: int, output: int, passes: int) -> dict[str, Any]:
    """Rank 0's `BalanceStats` of one run."""
    options: dict[str, Any] = {} if model == "demo" else {"model_path": str(checkpoints.ensure_checkpoint(model))}
    with Engine(
        random_seed=0,
        skip_tokenizer_init=model != "demo",
        tp_size=2,
        ep_size=2,
        moe_a2a_backend=backend,
        enable_eplb=True,
        eplb_rebalance_num_iterations=passes,
        eplb_min_rebalancing_utilization_threshold=1.0,
        ep_num_redundant_experts=2,
        **options,
    ) as engine:
        vocab = engine.info.vocab_size
        ids = [[(i * 7919 + j * 31) % (vocab - 8) + 4 for j in range(32)] for i in range(requests)]
        engine.generate(
            input_ids=ids, sampling_params={"temperature": 0.8, "ignore_eos": True, "max_new_tokens": output}
        )
        states = engine.get_server_info()["internal_states"]
    return {"model": model, "backend": backend, **states[0]["eplb"]}


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("rebalancing", __doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "moe-390m"], help="`demo`: the embedded model")
    parser.add_argument("--moe-a2a-backend", default="shared_memory")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--passes", type=int, default=100, help="passes between two rebalances")
    parser.add_argument("--rounds", type=int, default=3)
    report.add_result_options(parser)
    args = parser.parse_args(argv)

    lines = [
        measure(model, args.moe_a2a_backend, args.requests, args.output_len, args.passes) | {"round": number}
        for model in args.models
        for number in range(args.rounds)
    ]
    names = ("round", "rebalances", "experts_received", "moving_passes", "passes_per_move")
    rows = [
        [
            line["model"],
            *(str(line[name]) for name in names),
            f"{1e3 * line['moving_seconds'] / max(line['moving_passes'], 1):.2f}",
            f"{1e3 * line['pause_seconds'] / max(line['moving_passes'], 1):.3f}",
            f"{1e3 * line['longest_pause']:.2f}",
            f"{line['pause_share']:.1%}",
        ]
        for line in lines
    ]
    header = [
        *("model", "round", "plans", "experts", "passes while moving", "passes a move", "ms a pass", "ms paused"),
        *("longest", "share"),
    ]
    print(report.table(header, rows))
    shares = {model: median([line["pause_share"] for line in lines if line["model"] == model]) for model in args.models}
    print("medians: " + ", ".join(f"{model} {share:.1%}" for model, share in shares.items()))
    print(f"target: below {TARGET:.0%} of a step")
    report.write_if_asked(args, "rebalancing", {"lines": lines, "median_share": shares, "target": TARGET})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
