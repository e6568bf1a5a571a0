"""--speculative-simulated-accept-length: steps yield the requested number of tokens, and every request still ends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint

NUM, TOKENS, LENGTH = 12, 60, 2.4


def test_steps_yield_the_length_asked_for(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", num_mtp_layers=1)
    script = [
        Scripted(
            f"r{i}", [random.randrange(250) for _ in range(20)], TOKENS, arrives=i,
            sampling={"temperature": 1.0, "ignore_eos": True}, seed=i,
        )
        for i in range(NUM)
    ]  # fmt: skip
    engine = InProcessEngine(
        path, tmp_path / "status", dtype="float32", max_total_tokens=4096, max_running_requests=8,
        speculative_algorithm="NEXTN", speculative_simulated_accept_length=LENGTH,
    )  # fmt: skip
    try:
        answers = engine.run(script)
        stats = engine.scheduler.stats()
    finally:
        engine.close()
    assert all(len(answer.token_ids) == TOKENS for answer in answers.values())
    assert stats.speculation is not None
    assert stats.speculation.accept_length == pytest.approx(LENGTH, abs=0.25)
    assert stats.num_used == 0
    assert any("answers are not the model's" in note for note in engine.config.notes)
