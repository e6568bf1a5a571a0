"""Mixtures whose files or layers differ from those of other engine tests: the tokens of the CPU on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.models.mistral_native import make_mistral_large3_text
from tests.simulated_cuda.on_device.test_engines import FEW, GREEDY, compared, script, sometimes_warm

MADE: dict[str, Callable[[Path], Path]] = {
    "mistral_large3": lambda path: make_mistral_large3_text(path, 5, num_hidden_layers=2),
    "mistral_large4": lambda path: make_checkpoint("mistral_large4", path, 5, kv_source_layers=[0, 1, 0, 3]),
    "afmoe": lambda path: make_checkpoint("afmoe", path, 5, sliding_window=6),
    "llama4": lambda path: make_checkpoint("llama4", path, 5, attention_chunk_size=6),
    "laguna": lambda path: make_checkpoint("laguna", path, 5, sliding_window=6),
    "step3p7": lambda path: make_checkpoint("step3p7", path, 5, sliding_window=6),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", MADE)
def test_decodes_are_captured(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, a prefix of the cache, replayed decodes, no waits."""
    sometimes_warm(monkeypatch)
    path = MADE[kind](tmp_path / "model")
    more = {"cuda_graph_max_bs": 2, "chunked_prefill_size": 4, **FEW, "ops_backend": "triton"}
    found = compared(path, tmp_path, script([GREEDY, GREEDY]), {}, **more)
    assert found.num_graphs == 2 and found.waits == []
    assert any(step.cuda_graph for step in found.steps)
