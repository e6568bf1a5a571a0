"""Draft heads on a simulated GPU: steps captured whole, with the hidden states of several layers, give the same tokens
and accepted drafts as eager steps."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.attention.vendors.fa3 import FA3GQA
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.startup import build_runner
from moe_engine.worker.startup.draft_setup import why_drafts_are_not_captured
from moe_engine.worker.startup.graph_setup import capture_graphs
from tests.engine.harness import InProcessEngine, Scripted
from tests.kernels.vendors import fa3_emulator
from tests.simulated_cuda import libraries
from tests.simulated_cuda.on_device.test_engines import FEW, check_answers, watched
from tests.speculation.eagle_pairs import FORMS

DEPTH = 2
MORE = (("eagle2 of qwen3", 1), ("eagle3", 2), ("eagle2 of qwen3", 2), ("dflash", 1), ("dspark in windows", 1))


def script(starts: Path) -> list[Scripted]:
    """Requests with the beginnings of short training texts of the head, so that it predicts their answers."""
    prompts = sorted(json.loads(starts.read_text()), key=len)[:3]
    sampling = {"temperature": 0.0, "ignore_eos": True}
    return [Scripted(f"r{i}", prompt, 6 + 3 * i, sampling=sampling, logprob=True) for i, prompt in enumerate(prompts)]


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize(
    ("name", "topk"),
    [("eagle3", 1), ("dspark with a gate", 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_captured_steps_accept_the_same_drafts(
    name: str, topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees."""
    libraries.install()
    nodes = DEPTH + 1 if topk == 1 else 5
    choose = build_runner.kernels_for
    monkeypatch.setattr(
        build_runner, "kernels_for", lambda *args: replace(choose(*args), attention=FA3GQA(fa3_emulator.module()))
    )
    seed = str(random.randrange(1000))
    made = [sys.executable, "-m", "tests.speculation.eagle_pairs", name, str(tmp_path), seed]
    subprocess.run([*made, '{"head_dim": 64}'], check=True, timeout=300)  # this process cannot train
    flags: dict[str, Any] = {
        "speculative_algorithm": FORMS[name][1].algorithm,
        "speculative_draft_model_path": str(tmp_path / "head"),
        "speculative_num_steps": DEPTH, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes,
    }  # fmt: skip
    engine = InProcessEngine(
        tmp_path / "target", tmp_path / "board", device="cuda", dtype="bfloat16", page_size=1, max_total_tokens=512,
        max_running_requests=3, context_length=24, chunked_prefill_size=8, disable_cuda_graph=True, **FEW, **flags,
    )  # fmt: skip
    try:
        runner, requests = engine.worker.runner, script(tmp_path / "starts.json")
        assert why_drafts_are_not_captured(runner) is None
        expected = engine.run(requests)
        eager = engine.scheduler.stats().speculation
        settings = GraphSettings((1, 3), counts=(1, nodes), trees=topk > 1)
        assert capture_graphs(runner, settings) == settings.num_graphs
        assert runner.drafted is not None
        found = watched(engine, requests)
        captured = engine.scheduler.stats().speculation
    finally:
        engine.close()
    check_answers(found.answers, expected, tolerance=1e-4)
    assert captured is not None and eager is not None
    rates = [some.accepted[0] / some.proposed[0] for some in (captured, eager)]
    assert rates[0] == pytest.approx(rates[1], abs=0.15) and min(rates) > 0.05  # bf16: near ties
    assert sum(step.cuda_graph for step in found.steps) > 1
