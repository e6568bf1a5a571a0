"""MTP layers, heads and draft models are read as the flags of the weight loader ask; the ledger counts what is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.executor.make_worker import worker_options
from moe_engine.models import loader, weights
from moe_engine.models.read_ahead import Prefetch
from moe_engine.planning.memory.ledger import DRAFT_WEIGHTS
from moe_engine.planning.prepare import prepare
from moe_engine.worker.startup.speculation_setup import mtp_layers
from moe_engine.worker.worker import Worker
from tests.models.checkpoints import make_checkpoint

SMALL = {"max_total_tokens": 256, "max_running_requests": 2, "context_length": 64, "random_seed": 0, "cpu_threads": 1}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Prefetch | None, bool]]:
    """(prefetch, whether the files leave the page cache) of each checkpoint that was opened to be read whole."""
    found: list[tuple[Prefetch | None, bool]] = []

    class Recorded(weights.WeightReader):
        def __init__(self, *args: Any, **more: Any) -> None:
            found.append((more.get("prefetch"), more.get("drop", False)))
            super().__init__(*args, **more)

    monkeypatch.setattr(loader, "WeightReader", Recorded)
    return found


def started(path: Path, method: str, **flags: Any) -> tuple[Worker, int]:
    """A worker, and the ledger's bytes of the drafter's weights."""
    asked = {"model_path": str(path), "device": "cpu", "speculative_algorithm": method, "skip_tokenizer_init": True}
    config = prepare(EngineArgs.from_kwargs(**asked, **flags, **SMALL))
    counted = {row.name: row.num_bytes for row in config.ledger.rows}
    return Worker.create(worker_options(config)), counted[DRAFT_WEIGHTS]


@pytest.mark.parametrize("method", ["NEXTN", "STANDALONE"])
def test_files_of_drafts(tmp_path: Path, reads: list[tuple[Prefetch | None, bool]], method: str) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path / "model", num_mtp_layers=1, tokenizer=False)
    draft = make_checkpoint("llama", tmp_path / "draft", num_hidden_layers=1, tokenizer=False)
    flags = {"speculative_draft_model_path": str(draft)} if method == "STANDALONE" else {}
    worker, _ = started(
        path, method, weight_loader_prefetch_checkpoints=True, weight_loader_drop_cache_after_load=True, **flags
    )
    worker.close()
    assert reads == [(Prefetch(4, 0, 1), True)] * 2


def test_the_ledger_counts_routers_of_mtp_layers_as_stored(tmp_path: Path) -> None:
    """Two bytes an element less in bfloat16."""
    path = make_checkpoint("deepseek_v3", tmp_path, dtype="bfloat16", num_mtp_layers=1, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    gate = tensors["model.layers.3.mlp.gate.weight"]
    found = []
    for wide in (False, True):
        if wide:
            save_file(tensors | {"model.layers.3.mlp.gate.weight": gate.float()}, path / "model.safetensors")
        worker, counted = started(path, "NEXTN")
        layers = mtp_layers(worker.runner)
        worker.close()
        assert layers is not None
        found.append((counted, layers.weight_bytes))
    assert [after - before for before, after in zip(*found)] == [2 * gate.numel()] * 2
