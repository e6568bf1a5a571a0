"""A chain drafted in one call of a kernel is the chain of the separate calls, draft for draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_engine.models.demo import CHECKPOINT_DIR
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint


def _script(num_requests: int, temperature: float) -> list[Scripted]:
    generator = torch.Generator().manual_seed(11)
    return [
        Scripted(
            rid=f"r{i}-",
            prompt_ids=torch.randint(20, 250, (5 + 3 * i,), generator=generator).tolist(),
            max_new_tokens=24,
            arrives=2 * i,
            sampling={"temperature": temperature, "top_p": 0.9, "ignore_eos": True},
            seed=i,
        )
        for i in range(num_requests)
    ]


@pytest.mark.parametrize(("checkpoint", "dtype"), [("demo", "bfloat16"), ("demo", "float32"), ("two", "float32")])
def test_the_same_drafts(checkpoint: str, dtype: str, tmp_path: Path) -> None:
    path = CHECKPOINT_DIR
    if checkpoint == "two":  # MTP layers that take turns
        path = make_checkpoint("deepseek_v3", tmp_path / "model", seed=5, num_mtp_layers=2)
    engine = InProcessEngine(
        path,
        tmp_path / "board",
        dtype=dtype,
        cpu_threads=1,
        max_total_tokens=2048,
        max_running_requests=8,
        speculative_algorithm="NEXTN",
        speculative_num_steps=4,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=5,
    )
    try:
        layers = engine.worker.runner.speculation.drafter.layers
        if not layers.fuses_drafts:
            pytest.skip("no kernel here drafts whole chains (no C++ compiler)")
        fused = layers._fused
        for temperature in (0.0, 0.8):
            script = _script(5, temperature)
            found = []
            for chain in (fused, None):
                layers._fused = chain
                answers = engine.run(script)
                stats = engine.scheduler.stats().speculation
                found.append(([a.token_ids for a in answers.values()], stats.proposed, stats.accepted))
            assert found[0] == found[1]
            plain = [answer.token_ids for answer in engine.run(script, speculation=None).values()]
            assert dtype == "bfloat16" or found[0][0] == plain, "drafts changed an answer"
            assert checkpoint == "two" or found[0][2][0] > 0, "no draft was ever right: the comparison says little"
    finally:
        engine.close()
