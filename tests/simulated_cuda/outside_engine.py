"""Engines on a simulated GPU against the CPU, as a process: ``python -m tests.simulated_cuda.outside_engine NAME``.

Prints one JSON value: the answers there and those expected, how many steps were recorded, which kernels were launched,
and what the thread that launches steps waited for, once the engine was ready.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulated_cuda.install import install

install()

import torch  # noqa: E402

from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA  # noqa: E402
from moe_engine.worker import worker  # noqa: E402
from tests.engine.harness import InProcessEngine, Scripted  # noqa: E402
from tests.kernels.vendors import flashinfer_emulator  # noqa: E402
from tests.simulated_cuda import kernels, libraries, streams  # noqa: E402
from tests.speculation.agreeing import agreeing_checkpoint  # noqa: E402

LIMITS = {"max_total_tokens": 128, "context_length": 24, "max_running_requests": 2, "chunked_prefill_size": 8}
GREEDY: dict[str, Any] = {"temperature": 0.0}
FEW = dict.fromkeys(("linear_backend", "ops_backend", "sampling_backend"), "torch")
"""Rows whose kernels need not be interpreted for the host to do the same."""
NONE = FEW | {"moe_runner_backend": "torch", "attention_backend": "torch"}
DRAFTS = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
TREE = DRAFTS | {"speculative_num_steps": 2, "speculative_num_draft_tokens": 4, "speculative_eagle_topk": 2}
EDITS = [
    {"temperature": 0.0, "logit_bias": {"5": 3.0, "7": -100}},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.2, "sampling_seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 3},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05, "sampling_seed": 5},
]

CASES: dict[str, dict[str, Any]] = {
    # every kernel of our own, prompts in chunks, decodes recorded
    "triton": {"flags": {"cuda_graph_max_bs": 2}},
    "drafts": {
        "flags": {**FEW, "cuda_graph_max_bs": 2}, "both": {**DRAFTS, "speculative_eagle_topk": 1}, "logprob": True,
        "samplings": [GREEDY, *EDITS[1:3]],
    },
    "tree": {"flags": NONE, "both": TREE, "logprob": True, "samplings": [GREEDY, *EDITS[1:3]]},
    "edits": {"flags": NONE, "samplings": EDITS, "logprob": True},
    # a library's plans, renewed before every replay
    "flashinfer": {"flags": {**FEW, "cuda_graph_max_bs": 2}, "library": True},
}  # fmt: skip
LATENT = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}


def script(samplings: list[dict[str, Any]], logprob: bool) -> list[Scripted]:
    """Prompts of which the later ones begin as the first did: they find its pages in the cache."""
    return [
        Scripted(f"r{i}", [*range(5, 11), 20 + i, 21], 4, 4 * i, sampling=sampling, logprob=logprob)
        for i, sampling in enumerate(samplings)
    ]


def emulate_flashinfer() -> None:
    """Attention by FlashInfer's emulator, whose calls are launches."""
    libraries.install()
    choose = worker.kernels_for
    module = flashinfer_emulator.module(9)
    worker.kernels_for = lambda *args: replace(choose(*args), attention=FlashInferMLA(module, 9))  # type: ignore


def run(
    flags: dict[str, Any], both: dict[str, Any] | None = None, samplings: list[dict[str, Any]] | None = None,
    logprob: bool = False, library: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """
    Args:
        flags: of the engine on the GPU; `both` also of the one that says what is expected: on the CPU, or with a
            library, which has no CPU, the same without recordings.
    """
    torch.set_num_threads(1)
    expected: dict[str, Any] = {"device": "cpu"}
    if library:
        emulate_flashinfer()
        expected = {"device": "cuda", **flags, "disable_cuda_graph": True, "cuda_graph_max_bs": None}
    fields = LATENT if library else {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = agreeing_checkpoint(
            "deepseek_v3", Path(folder) / "model", 5, num_hidden_layers=2, num_mtp_layers=1, **fields
        )
        for name, options in (("expected", expected), ("found", {"device": "cuda", **flags})):
            engine = InProcessEngine(
                path, Path(folder) / name, dtype="bfloat16" if library else "float32", **LIMITS, **(both or {}),
                **{key: value for key, value in options.items() if value is not None},
            )  # fmt: skip
            streams.waits.clear()
            answers = engine.run(script(samplings or [GREEDY] * 3, logprob))
            found[name] = {
                rid: {
                    "tokens": answer.token_ids, "finish": answer.finish, "cached": answer.cached_tokens,
                    "logprobs": [entry[1] for entry in answer.logprobs],
                } for rid, answer in answers.items()
            }  # fmt: skip
            found["graphs"] = engine.worker.info.num_graphs
            engine.close()
    found["waits"] = [f"{w.what}: {w.where}" for w in streams.waits if w.thread.startswith("worker-steps")]
    found["kernels"] = sorted(kernels.launches)
    return found


if __name__ == "__main__":
    print(json.dumps(run(**CASES[sys.argv[1]])))
