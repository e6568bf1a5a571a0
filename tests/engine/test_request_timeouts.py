"""Time limits in a whole core: the scheduler's clock counts its readings, so the test does not depend on real time."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import InProcessEngine, Scripted
from tests.speculation.agreeing import agreeing_checkpoint

LIMITS = [
    ({"request_waiting_timeout": 30.0, "max_rows": 1}, {"1", "2"}, "--request-waiting-timeout (30 s)"),
    ({"request_running_timeout": 60.0}, {"0"}, "--request-running-timeout (60 s)"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.randrange(2**31)
    return agreeing_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model") / "model", seed, num_mtp_layers=1)


@pytest.mark.parametrize("flags", [{}, {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}], ids=str)
def test_requests_over_a_limit_end_and_others_keep_their_tokens(
    flags: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    script = [
        Scripted(str(i), [random.randrange(250) for _ in range(9)], length, sampling=greedy)
        for i, length in enumerate((100, 4, 4))
    ]
    engine = InProcessEngine(checkpoint, tmp_path / "status", dtype="float32", max_running_requests=4, **flags)
    try:
        plain = engine.run(script)
        for limits, late, words in LIMITS:
            answers = engine.run(script, clock=map(float, count()).__next__, **limits)  # checks the pool at its end
            for rid, answer in answers.items():
                assert answer.finish is not None
                if rid in late:
                    assert answer.finish["status_code"] == 503 and words in answer.finish["message"]
                    assert answer.token_ids == plain[rid].token_ids[: len(answer.token_ids)]
                    assert len(answer.token_ids) < len(plain[rid].token_ids)
                else:
                    assert answer.token_ids == plain[rid].token_ids
    finally:
        engine.close()
