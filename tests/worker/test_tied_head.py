"""A head tied to the embedding takes memory where kernels keep it in a layout of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.models.footprint import held_bytes
from tests.engine.harness import InProcessEngine
from tests.models.checkpoints import make_checkpoint


@pytest.mark.parametrize("row", ["cpu", "torch"])
def test_the_ledger_counts_what_is_held(tmp_path: Path, row: str) -> None:
    shape = {"vocab_size": 2048, "hidden_size": 128, "tie_word_embeddings": True}
    path = make_checkpoint("qwen3", tmp_path / "model", 1, tokenizer=False, **shape)
    flags = {"dtype": "bfloat16", "max_total_tokens": 256, "max_running_requests": 2, "linear_backend": row}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    try:
        held = held_bytes(engine.worker.runner.model)
    finally:
        engine.close()
    assert held == pytest.approx(engine.config.ledger.bytes_of("weights"), rel=0.01)
