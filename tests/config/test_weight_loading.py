"""Flags of the weight loader: what they set in a worker, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.executor.make_worker import worker_options
from moe_engine.models import loader
from moe_engine.models.read_ahead import Prefetch
from moe_engine.planning.prepare import prepare
from moe_engine.worker import worker
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("x"), num_hidden_layers=1, tokenizer=False)


@pytest.mark.parametrize(
    ("flags", "prefetch", "drops"),
    [
        ({}, None, False),
        ({"weight_loader_prefetch_checkpoints": True}, Prefetch(4, 1, 3), False),
        (
            {
                "weight_loader_prefetch_checkpoints": True, "weight_loader_prefetch_num_threads": 9,
                "weight_loader_drop_cache_after_load": True, "weight_loader_disable_mmap": True,
            },
            Prefetch(9, 1, 3),
            True,
        ),
    ],
)  # fmt: skip
def test_the_loader_gets_the_flags(
    path: Path, flags: dict[str, Any], prefetch: Prefetch | None, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True} | flags
    options = worker_options(prepare(EngineArgs.from_kwargs(**asked)))
    given: dict[str, Any] = {}
    monkeypatch.setattr(loader, "load_model", lambda path, config, **more: given.update(more))
    second: Any = SimpleNamespace(node=SimpleNamespace(rank=1, size=3))
    stream, rows, backends = SimpleNamespace(device="cpu"), SimpleNamespace(width=8), None
    worker._load(options, cast(Any, stream), cast(Any, backends), second, False, cast(Any, rows))
    assert given["prefetch"] == prefetch and given["drop_cache"] is drops


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"weight_loader_prefetch_num_threads": 8}, "num-threads 8: only with --weight-loader-prefetch-checkpoints"),
        ({"weight_loader_prefetch_num_threads": 0}, "num-threads 0: must be at least 1"),
        ({"weight_loader_prefetch_checkpoints": True, "load_format": "dummy"}, "checkpoints with --load-format"),
        ({"weight_loader_drop_cache_after_load": True, "load_format": "dummy"}, "no files are loaded; drop one"),
    ],
)
def test_refusals(path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--weight-loader.*{words}"):
        prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", **flags))
