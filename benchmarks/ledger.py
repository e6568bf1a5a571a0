"""Predicted against allocated memory, of every rank: ``python -m benchmarks.ledger [options]``.

For each launch: the rows of the memory ledger, the storages that each rank holds once it is ready, and the largest
resident memory of the processes while a load runs.
"""

from __future__ import annotations

import threading
from typing import Any

import psutil

from benchmarks import report
from benchmarks.checkpoints import ensure_checkpoint
from moe_engine import Engine
from moe_engine.planning.memory.ledger import STATES_ROW, WEIGHT_ROWS

LAUNCHES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "embedded": (None, {}),
    "embedded, NEXTN": (None, {"speculative_algorithm": "NEXTN"}),
    "embedded, FP8 KV": (None, {"kv_cache_dtype": "fp8_e4m3"}),
    "MoE": ("moe-390m", {}),
    "MoE, page 64": ("moe-390m", {"page_size": 64, "max_total_tokens": 20_000}),
    "MoE, torch kernels": ("moe-390m", {"attention_backend": "torch_native"}),
    "MoE, TP 2": ("moe-390m", {"tp_size": 2}),
    "MoE, attention DP 2, EP 2": (
        "moe-390m", {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "allgather"},
    ),
    "MoE, EP 2, 8 redundant experts": ("moe-390m", {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 8}),
    "MoE, two replicas": ("moe-390m", {"dp_size": 2}),
    "dense": ("dense-101m", {}),
    "dense, TP 2": ("dense-101m", {"tp_size": 2}),
}  # fmt: skip
"""Checkpoint (None: the embedded one) and flags."""
PARTS = {"weights": WEIGHT_ROWS, "request_states": (STATES_ROW,)}
TARGET = 0.02


class PeakMemory:
    """Context manager: largest sum of the resident memory of this process's children."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            total = 0
            for child in psutil.Process().children(recursive=True):
                try:
                    total += child.memory_full_info().uss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def measure(name: str) -> dict[str, Any]:
    """The row of one launch."""
    shape, flags = LAUNCHES[name]
    model: dict[str, Any] = {"model_path": str(ensure_checkpoint(shape))} if shape else {}
    with PeakMemory() as memory, Engine(**model, **flags) as engine:
        ledger, ranks = engine.config.ledger, engine.get_memory_usage()
        prompts = [[1 + (17 * i + j) % 400 for j in range(300)] for i in range(64)]
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 32, "temperature": 0})
    predicted = {part: sum(ledger.bytes_of(row) for row in rows) for part, rows in PARTS.items()}
    predicted |= {"kv_cache": ledger.kv_bytes}
    errors = {part: max(abs(rank[part] - size) for rank in ranks) / size for part, size in predicted.items() if size}
    line = ", ".join(f"{part} {predicted[part]:,} bytes, off by {error:.2%}" for part, error in errors.items())
    print(
        f"{name:32} {line}; all ranks with a full load {ledger.total_bytes * len(ranks):,} bytes at most, "
        f"{memory.peak:,} used",
        flush=True,
    )
    return {
        "launch": name,
        "shape": shape,
        "flags": flags,
        "predicted": predicted,
        "ranks": ranks,
        "error": errors,
        "predicted_total": ledger.total_bytes,
        "peak_of_processes": memory.peak,
    }


def main() -> None:
    parser = report.command_parser("ledger", __doc__)
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    report.add_result_options(parser)
    args = parser.parse_args()
    rows = [measure(name) for name in args.launches]
    good = sum(all(error <= TARGET for error in row["error"].values()) for row in rows)
    print(f"within {TARGET:.0%}: {good} of {len(rows)} launches")
    report.write_if_asked(args, "ledger", {"rows": rows, "within_target": good, "target": TARGET})


if __name__ == "__main__":
    main()
