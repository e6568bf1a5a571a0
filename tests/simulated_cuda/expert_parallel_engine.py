"""An engine of several ranks on simulated GPUs whose tokens travel through DeepEP to DeepGEMM's experts, both emulated,
in a separate process.

``python -m tests.simulated_cuda.expert_parallel_engine FOLDER SEED CASE`` prints, as JSON, the differences of its
tokens from those of one rank on the CPU, and the library calls launched by its ranks. FOLDER has the checkpoint, as
`model`. `packages` is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from moe_engine import Engine
from tests.distributed.engine.forms import Wanted, serve
from tests.engine.harness import InProcessEngine, Scripted
from tests.logprobs import Entry
from tests.simulated_cuda.kernels import LAUNCHED

OLD_DEEP_GEMM = "EMULATED_DEEP_GEMM_OLD"
"""Read by `packages/deep_gemm`."""
NUM_TOKENS = 5
MOST_ROUNDS = 10
"""Max rounds of requests until experts have moved."""
GAP = 0.3
"""Least difference of the log-probabilities of the best two tokens; FP8 activations changed them by 0.06 at most."""
SMALL: dict[str, Any] = {
    "max_total_tokens": 256, "context_length": 24, "max_running_requests": 4, "chunked_prefill_size": 16,
}  # fmt: skip
FEW: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "ops_backend": "torch", "sampling_backend": "pytorch", "cpu_threads": 1,
    "skip_tokenizer_init": True, "log_level": "error", "moe_runner_backend": "deep_gemm", "cuda_graph_max_bs": 1,
}  # fmt: skip
DRAFTS: dict[str, Any] = {
    "sampling_backend": "triton", "speculative_algorithm": "NEXTN", "speculative_num_steps": 1,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2,
}  # fmt: skip
EPLB: dict[str, Any] = {"enable_eplb": True, "ep_num_redundant_experts": 8, "eplb_rebalance_num_iterations": 2}
TBO: dict[str, Any] = {"enable_two_batch_overlap": True}


def ranks(count: int, groups: int | None = None) -> dict[str, Any]:
    return FEW | {"tp_size": count, "attn_dp_size": groups or count, "moe_a2a_backend": "deepep"}


CASES: dict[str, dict[str, Any]] = {
    "graphs": ranks(2),
    "graphs, drafts": ranks(2) | DRAFTS,
    "two batches, moving experts": ranks(2) | TBO | EPLB,
    "bf16 sent, old DeepGEMM": ranks(2) | {"moe_dispatch_dtype": "bf16"},
    "low latency alone": ranks(2) | {"deepep_mode": "low_latency"},
    "normal alone": ranks(2) | {"deepep_mode": "normal"},
    "masked": ranks(2) | {"moe_a2a_backend": "all_to_all"},
    "four ranks, two groups, drafts": ranks(4, 2) | DRAFTS,
    "eight ranks, two batches, moving experts, drafts": ranks(8) | TBO | EPLB | DRAFTS,
}


def decisive(path: Path, folder: Path, rng: random.Random, number: int) -> list[tuple[Wanted, list[int]]]:
    """Requests, and their tokens of one rank on the CPU in float32, none of which is a near tie."""
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    engine = InProcessEngine(path, folder / "board", device="cpu", dtype="float32", **SMALL)
    found: list[tuple[Wanted, list[int]]] = []
    for batch in count():
        if len(found) >= number:
            break
        script = [
            Scripted(f"r{batch}-{i}", [rng.randrange(250) for _ in range(3 + 3 * i)], NUM_TOKENS, sampling=sampling,
                     logprob=True, more={"top_logprobs": 2})
            for i in range(4)
        ]  # fmt: skip
        for request, answer in zip(script, engine.run(script).values()):
            if all(best - second >= GAP for best, second in map(best_two, answer.logprobs)):
                found.append((Wanted(request.rid, request.prompt_ids, sampling), answer.token_ids))
    engine.close()
    return found[:number]


def best_two(entry: Entry) -> list[float]:
    return sorted((logprob for _, logprob in entry.top), reverse=True)[:2]


def run(folder: Path, seed: int, case: str) -> dict[str, Any]:
    rng = random.Random(seed)
    path, launched = folder / "model", folder / "launched"
    flags = SMALL | CASES[case]
    pairs = decisive(path, folder, rng, max(4, flags["tp_size"]))
    pairs[-1] = replace(pairs[-1][0], late=True), pairs[-1][1]  # alone: its decodes are replayed
    launched.mkdir()
    os.environ[LAUNCHED] = str(launched)
    if "old" in case:
        os.environ[OLD_DEEP_GEMM] = "1"
    engine = Engine(str(path), **flags)
    differences: dict[str, Any] = {}
    for _ in range(MOST_ROUNDS if "enable_eplb" in flags else 1):
        found = asyncio.run(serve(engine, [want for want, _ in pairs]))
        differences |= {w.rid: [found[w.rid].tokens, right] for w, right in pairs if found[w.rid].tokens != right}
        states = engine.get_server_info()["internal_states"]
        if rebalances := sum(state.get("eplb", {}).get("rebalances", 0) for state in states):
            break
    problems = engine._loop.run(engine._frontend.client.call("check_integrity"))
    engine.shutdown()
    return {
        "differences": differences,
        "problems": [problem for part in problems for problem in part],
        "launched": sorted(os.listdir(launched)),
        "rebalances": rebalances,
        "replayed": max(state["is_cuda_graph"] for state in states),
        "drafted": sum(sum(state["speculation"]["proposed"]) for state in states if state.get("speculation")),
    }


def main() -> None:
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
