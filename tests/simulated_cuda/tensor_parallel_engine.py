"""An engine of several ranks on simulated GPUs, in a separate process: tensor parallelism, or tokens that travel.

``python -m tests.simulated_cuda.tensor_parallel_engine FOLDER SEED CASE`` prints, as JSON, the differences of its
tokens from those of one rank on the CPU, and the kernels launched by its ranks that wait for each other. FOLDER has the
checkpoint, as `model`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from moe_engine import Engine
from tests.distributed.engine.forms import Wanted, serve
from tests.simulated_cuda.engine_of_two import expected
from tests.simulated_cuda.kernels import LAUNCHED, WAITING

NUM_TOKENS = 5
SMALL: dict[str, Any] = {
    "max_total_tokens": 128, "context_length": 20, "max_running_requests": 2, "chunked_prefill_size": 4,
    "dtype": "float32",
}  # fmt: skip
FEW: dict[str, Any] = {
    "device": "cuda", "linear_backend": "torch", "ops_backend": "torch", "sampling_backend": "pytorch",
    "cpu_threads": 1, "skip_tokenizer_init": True, "log_level": "error",
}  # fmt: skip
GRAPHS = FEW | {"cuda_graph_max_bs": 1, "moe_runner_backend": "triton", "ops_backend": "triton"}
TORCH = FEW | {"attention_backend": "torch", "moe_runner_backend": "torch"}
DRAFTS: dict[str, Any] = {
    "sampling_backend": "triton", "speculative_algorithm": "NEXTN", "speculative_num_steps": 1,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2,
}  # fmt: skip
DISPATCH: dict[str, Any] = {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "auto"}
CASES: dict[str, dict[str, Any]] = {
    "two ranks, graphs": GRAPHS | {"tp_size": 2},
    "four ranks": TORCH | {"tp_size": 4},
    "two ranks, weights in host memory": TORCH | {"tp_size": 2, "cpu_offload_gb": 1.0},
    "two ranks, dispatch": GRAPHS
    | {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "auto"},
    "two ranks, drafts": GRAPHS | DRAFTS | {"tp_size": 2},
    "two ranks, dispatch, drafts": GRAPHS | DRAFTS | DISPATCH,
    "two ranks, dispatch, weights in host memory, drafts": GRAPHS | DRAFTS | DISPATCH | {"cpu_offload_gb": 1.0},
    "two ranks, NCCL": TORCH | {"tp_size": 2, "disable_custom_all_reduce": True},
    "eight ranks": TORCH
    | {"tp_size": 8, "attn_dp_size": 8, "moe_a2a_backend": "all_to_all"}
    | {"max_running_requests": 16, "chunked_prefill_size": 64},
}


def run(folder: Path, seed: int, case: str) -> dict[str, Any]:
    rng = random.Random(seed)
    path, launched = folder / "model", folder / "launched"
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS}
    requests = [Wanted(f"r{i}", [rng.randrange(250) for _ in range(3 + 3 * i)], sampling) for i in range(2)]
    right = expected(path, folder, requests, SMALL, NUM_TOKENS)
    launched.mkdir()
    os.environ[LAUNCHED] = str(launched)
    engine = Engine(str(path), **SMALL | CASES[case])
    found = asyncio.run(serve(engine, requests))
    offloaded = len(engine.config.offloaded_layers)
    engine.shutdown()
    return {
        "differences": {rid: [found[rid].tokens, right[rid]] for rid in right if found[rid].tokens != right[rid]},
        "launched": sorted(WAITING.intersection(os.listdir(launched))),
        "offloaded": offloaded,
    }


def main() -> None:
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
