"""A worker's memory over a whole run: no leaks, and no step takes more than its bytes in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.sampling import reference
from moe_engine.models import step_memory
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.worker.sampling import logits_processors as logit_edits
from moe_engine.worker.sampling import penalties
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from tests.engine.harness import InProcessEngine
from tests.memory_meter import MemoryMeter
from tests.speculation import test_logits_passes as passes
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = pytest.mark.drawn(1)

VOCAB, ROWS_AT_ONCE = 16000, 16
SCRATCH = 1 << 20
STAYS = 4096
"""Bytes of small state that may differ between runs, such as the last decoded rows."""


def _transient(config: ResolvedConfig) -> int:
    """The ledger's memory that steps allocate and free. The constants of sampling are those of this test."""
    rows = {row.name: row.num_bytes for row in config.ledger.rows}
    sampling = step_memory.sampling_bytes(VOCAB, ROWS_AT_ONCE, SCRATCH, 0) - step_memory.EDIT_BYTES + SCRATCH
    return rows["activations"] + rows.get("n-gram search", 0) + sampling


REPRESENTATIVE = ("none", "standalone tree, lossy", "ngram")


@pytest.mark.parametrize(
    ("drafter", "kernels"),
    [
        *(
            pytest.param(name, "torch", marks=() if name in REPRESENTATIVE else pytest.mark.exhaustive)
            for name in passes.DRAFTERS
        ),
        ("none", "auto"),
        ("nextn chain", "auto"),
    ],
)
def test_a_whole_run_takes_what_the_ledger_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drafter: str, kernels: str
) -> None:
    """Penalties, biases, min_new_tokens, log-probabilities of prompts and answers, every kind of sampling. The
    vocabulary is large compared with the tiny model, so that every superfluous row of logits is visible."""
    for module in (penalties, logit_edits):
        monkeypatch.setattr(module, "EDIT_BYTES", SCRATCH)
    monkeypatch.setattr(reference, "CACHED_ELEMENTS", SCRATCH // 40)
    flags: dict[str, Any] = dict(passes.DRAFTERS[drafter])
    if flags.get("speculative_algorithm") == "STANDALONE":
        draft = agreeing_checkpoint("deepseek_v2", tmp_path / "draft", 4, vocab_size=VOCAB)
        flags["speculative_draft_model_path"] = str(draft)
    path = agreeing_checkpoint("deepseek_v3", tmp_path / "model", 4, num_mtp_layers=1, vocab_size=VOCAB)
    engine = InProcessEngine(
        path, tmp_path / "board", dtype="float32", cpu_threads=1, page_size=1, max_total_tokens=2048,
        max_running_requests=16, chunked_prefill_size=64, **(passes.TORCH if kernels == "torch" else {}), **flags,
    )  # fmt: skip
    worker, meter = engine.worker, MemoryMeter()
    worker.runner.sampler.passes = LogitsPasses(ROWS_AT_ONCE)
    try:
        engine.run(passes.script(1))
        worker.call(meter.__enter__).result()
        before = meter.live
        engine.run(passes.script(2))
        assert meter.calls > 1000 and meter.live - before <= STAYS
        assert ROWS_AT_ONCE * VOCAB * 8 < meter.peak - before <= _transient(engine.config)
    finally:
        worker.call(meter.__exit__, None, None, None).result()
        engine.close()
