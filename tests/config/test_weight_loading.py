"""Flags of the weight loader: what they set in a worker, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.executor.make_worker import worker_options
from moe_engine.models.read_ahead import Prefetch
from moe_engine.planning.prepare import prepare
from moe_engine.worker.startup.load_options import load_options
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
        ({"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 6}}, Prefetch(6, 1, 3), False),
        ({"model_loader_extra_config": '{"enable_multithread_load": true}'}, Prefetch(8, 1, 3), False),
        ({"model_loader_extra_config": {"num_threads": 16}}, None, False),
    ],
)  # fmt: skip
def test_the_loader_gets_the_flags(path: Path, flags: dict[str, Any], prefetch: Prefetch | None, drops: bool) -> None:
    asked = {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True} | flags
    options = worker_options(prepare(EngineArgs.from_kwargs(**asked)))
    second: Any = SimpleNamespace(node=SimpleNamespace(rank=1, size=3))
    load = load_options(options, torch.device("cpu"), second, progress=False)
    assert load.prefetch == prefetch and load.drop_cache is drops


def test_settings_of_loader_threads_without_effect(path: Path) -> None:
    flags: dict[str, Any] = {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True}
    for more, words in (
        ({"model_loader_extra_config": '{"num_threads": 4}'}, "no effect without enable_multithread_load true"),
        (
            {"model_loader_extra_config": '{"enable_multithread_load": true}', "load_format": "dummy"},
            "no effect with --load-format dummy",
        ),
    ):
        assert any(words in note for note in prepare(EngineArgs.from_kwargs(**flags, **more)).notes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"enable_multithread_load": 1}', "enable_multithread_load is true or false, not 1"),
        ('{"enable_multithread_load": true, "num_threads": 0}', "num_threads is a whole number from 1 to 256, not 0"),
        ('{"concurrency": 16}', "with concurrency: not supported yet: settings of other loaders"),
        ("[]", "must be a JSON object"),
    ],
)
def test_refused_loader_settings(path: Path, config: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--model-loader-extra-config.*{words}"):
        prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", model_loader_extra_config=config))
    flags: dict[str, Any] = {"weight_loader_prefetch_checkpoints": True}
    flags["model_loader_extra_config"] = '{"enable_multithread_load": true}'
    with pytest.raises(ConfigError, match=r"asks for 8 threads .* for 4; drop one of them"):
        prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", **flags))


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
