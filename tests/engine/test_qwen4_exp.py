"""Qwen3.8-Flash-Next in a whole engine: tokens and log-probabilities equal transformers', with cached prefixes, chunks,
retractions and reused rows."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from tests.engine.harness import InProcessEngine
from tests.engine.test_qwen3_next import CACHED, FLAGS, MOST_DRAWS, RETRACTIONS, ROWS, make_script
from tests.engine.test_states import check
from tests.models import sparse
from tests.models.checkpoints import GATED_STREAMS, make_checkpoint
from tests.models.parity_families import CLEAR


def test_retracted_and_cached_requests(tmp_path: Path) -> None:
    path = make_checkpoint(GATED_STREAMS, tmp_path / "model", random.randrange(2**31))
    engine = InProcessEngine(path, tmp_path / "status", **FLAGS, page_size=4)
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
    model, clear, asked = sparse.load(path).eval(), 0, 0
    for item in script:
        got = answers[item.rid]
        assert item.aborted_at or len(got.token_ids) == item.max_new_tokens
        if not got.token_ids or not (RETRACTIONS(got) or CACHED(got)):
            continue
        ids = torch.tensor([item.prompt_ids + got.token_ids])
        with torch.inference_mode():
            _, margin = sparse.with_margin(lambda text=ids: model(text))  # type: ignore[misc]
        asked += 1
        if margin > CLEAR:  # another order of sums may select another pool
            clear += 1
            own = [entry.logprob for entry in got.logprobs]
            check(model, item.prompt_ids, got.token_ids, own, item.rid, tolerance=5e-4)
    assert clear >= asked // 4
