"""LFM2 and LFM2-MoE in whole engines: tokens and log-probabilities equal transformers', with cached prefixes, chunks,
retractions, reused rows and drafts; the ledger has the bytes of the states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import InProcessEngine
from tests.engine.test_qwen3_next import CACHED, FLAGS, MOST_DRAWS, RETRACTIONS, ROWS, make_script
from tests.engine.test_states import check
from tests.models.checkpoints import make_checkpoint

DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
def test_retracted_and_cached_requests(kind: str, drafts: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    path = make_checkpoint(kind, tmp_path / "model", random.randrange(2**31), conv_L_cache=random.choice((2, 3, 4)))
    engine = InProcessEngine(path, tmp_path / "status", **FLAGS | drafts)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    try:
        for _ in range(MOST_DRAWS):
            script = make_script(random.Random(random.randrange(2**31)), 4 * ROWS)
            answers = engine.run(script, schedule_conservativeness=0.0, enable_mixed_chunk=random.random() < 0.5)
            if all(any(of(answer) for answer in answers.values()) for of in (RETRACTIONS, CACHED)):
                break
        else:
            raise AssertionError("no script had both a retraction and a cached prefix")
        ledger, runner = engine.config.ledger, engine.worker.runner
        assert runner.rows.states.num_bytes == ledger.bytes_of("request states") > 0
        assert runner.kv_pool.num_bytes == ledger.kv_bytes
    finally:
        engine.close()
    for item in script:
        got = answers[item.rid]
        assert item.aborted_at or len(got.token_ids) == item.max_new_tokens
        if got.token_ids:
            own = [entry.logprob for entry in got.logprobs]
            check(model.eval(), item.prompt_ids, got.token_ids, own, item.rid, tolerance=5e-4)
