"""An engine of two ranks on simulated GPUs, in a separate process.

``python -m tests.simulated_cuda.engine_of_two FOLDER SEED`` prints, as JSON, the differences of its tokens from those
of one rank on the CPU, and the error after the death of a rank. FOLDER has the checkpoint, as `model`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from moe_engine import Engine
from tests.distributed.engine.forms import Answer, Wanted, serve
from tests.engine.harness import InProcessEngine, Scripted
from tests.fork_server import children

PLAIN: dict[str, Any] = {
    "max_total_tokens": 256, "context_length": 40, "max_running_requests": 4, "chunked_prefill_size": 32,
    "dtype": "float32",
}  # fmt: skip
TWO: dict[str, Any] = {
    "device": "cuda", "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all",
    "enable_two_batch_overlap": True, "enable_eplb": True, "ep_num_redundant_experts": 2,
    "eplb_rebalance_num_iterations": 2, "attention_backend": "torch", "moe_runner_backend": "torch",
    "sampling_backend": "pytorch", "linear_backend": "torch", "ops_backend": "torch",
    "cpu_threads": 1, "skip_tokenizer_init": True, "log_level": "error",
}  # fmt: skip
NUM_TOKENS = 8
MOST_ROUNDS = 10
"""Max rounds of requests until experts have moved."""


def expected(
    path: Path, folder: Path, requests: list[Wanted], flags: dict[str, Any], num_tokens: int
) -> dict[str, list[int]]:
    """Tokens of one rank on the CPU."""
    engine = InProcessEngine(path, folder / "board", device="cpu", **flags)
    answers = engine.run([Scripted(want.rid, want.prompt, num_tokens) for want in requests])
    engine.close()
    return {rid: answer.token_ids for rid, answer in answers.items()}


async def after_a_death(engine: Engine, prompt: list[int]) -> str:
    """The error of a request whose rank is killed."""
    ranks = [child for child in children(psutil.Process(), True) if "rank_main" in " ".join(child.cmdline())]
    try:
        async with asyncio.timeout(240):
            while True:  # the request during the kill may still end
                pieces: Any = await engine.async_generate(
                    input_ids=prompt, sampling_params={"max_new_tokens": 30, "ignore_eos": True}, stream=True
                )
                async for _ in pieces:
                    with suppress(psutil.NoSuchProcess):
                        ranks[-1].send_signal(signal.SIGKILL)
    except Exception as error:
        return str(error)


def run(folder: Path, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    path = folder / "model"
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS}
    requests = [Wanted(f"r{i}", [rng.randrange(250) for _ in range(3 + 4 * i)], sampling) for i in range(4)]
    right = expected(path, folder, requests, PLAIN, NUM_TOKENS)
    engine = Engine(str(path), **PLAIN, **TWO)
    differences: dict[str, Any] = {}
    for _ in range(MOST_ROUNDS):
        found: dict[str, Answer] = asyncio.run(serve(engine, requests))
        differences |= {rid: [found[rid].tokens, right[rid]] for rid in right if found[rid].tokens != right[rid]}
        if rebalances := sum(state["eplb"]["rebalances"] for state in engine.get_server_info()["internal_states"]):
            break
    problems = engine._loop.run(engine._frontend.client.call("check_integrity"))
    return {
        "differences": differences,
        "problems": [problem for part in problems for problem in part],
        "rebalances": rebalances,
        "fate": asyncio.run(after_a_death(engine, requests[0].prompt)),
    }


def main() -> None:
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # the engine has lost a rank


if __name__ == "__main__":
    main()
