"""A whole engine on vendor attention (emulated) with recorded decodes: the tokens of one that records nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.types import GraphSettings
from moe_engine.worker import worker
from moe_engine.worker.graphs.graph_setup import capture_graphs
from tests.engine.harness import InProcessEngine, Scripted
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.tape import TapeGraphs, launched
from tests.speculation.agreeing import agreeing_checkpoint

DRAFTS = 2
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
HEADS = {"head_dim": 64}
CASES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "flashinfer": ("deepseek_v3", lambda: FlashInferMLA(flashinfer_emulator.module(10), 10), 4),
    "flashinfer, drafts": ("deepseek_v3", lambda: FlashInferMLA(flashinfer_emulator.module(9), 9), 1),
    "fa3, drafts": ("deepseek_v3", lambda: FA3MLA(fa3_emulator.module()), 16),
    "flashmla, drafts": ("deepseek_v3", lambda: FlashMLA(flash_mla_emulator.module(), expanded=TorchMLA()), 64),
    "flashinfer, GQA": ("qwen3_moe", lambda: FlashInferGQA(flashinfer_emulator.module()), 4),
    "fa3, GQA": ("qwen3_moe", lambda: FA3GQA(fa3_emulator.module()), 1),
}


def script(page_size: int) -> list[Scripted]:
    pick = random.Random(page_size)
    return [
        Scripted(
            f"r{i}",
            [pick.randrange(250) for _ in range(pick.randint(1, 20))],
            pick.randint(3, 9),
            pick.randrange(5),
            sampling={"temperature": 0.0 if i % 2 else 0.8},
            seed=i,
        )
        for i in range(5)
    ]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_without_graphs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, make, page_size = CASES[name]
    drafts = name.endswith("drafts")
    choose = worker.kernels_for
    monkeypatch.setattr(worker, "kernels_for", lambda *args: replace(choose(*args), attention=make()))
    monkeypatch.setattr(TorchExperts, "run", launched(TorchExperts.run))  # reads counts, as no GPU kernel does
    fields = LATENT if kind == "deepseek_v3" else HEADS
    path = agreeing_checkpoint(kind, tmp_path / "model", 3, num_mtp_layers=int(drafts), **fields)
    flags: dict[str, Any] = {}
    if drafts:
        flags = {"speculative_num_steps": DRAFTS, "speculative_num_draft_tokens": DRAFTS + 1}
        flags |= {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}
    rows = dict.fromkeys(("moe_runner_backend", "linear_backend", "ops_backend", "sampling_backend"), "torch")
    engine = InProcessEngine(
        path, tmp_path / "board", dtype="bfloat16", cpu_threads=1, page_size=page_size, max_total_tokens=1024,
        max_running_requests=4, context_length=128, **rows, **flags,
    )  # fmt: skip
    try:
        runner, requests = engine.worker.runner, script(page_size)
        expected = engine.run(requests)
        settings = GraphSettings((1, 3, 4), (1, DRAFTS + 1) if drafts else (1,))
        backend = TapeGraphs()
        assert capture_graphs(runner, settings, backend=backend) == settings.num_graphs
        found = engine.run(requests)
        assert backend.num_replays > 3 and sum(tape.count > 0 for tape in backend.recordings) > 1
        for rid, answer in expected.items():
            assert found[rid].token_ids == answer.token_ids, rid
    finally:
        engine.close()
