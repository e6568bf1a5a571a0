"""Flags of LoRA adapters: derived values, excluded flags, and the memory of adapter slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from tests.models.checkpoints import make_checkpoint
from tests.models.lora import make_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("base") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "a", base, ("q_proj", "o_proj"), 6)


def resolved(base: Path, **flags: Any) -> ResolvedConfig:
    return prepare(EngineArgs.from_kwargs(model_path=str(base), max_total_tokens=1024, **flags))


def test_sizes_follow_from_the_adapters(base: Path, adapter: Path) -> None:
    config = resolved(base, lora_paths=[f"a={adapter}", {"lora_name": "b", "lora_path": str(adapter), "pinned": True}])
    lora = config.lora
    assert lora is not None and (lora.num_slots, lora.rank, lora.targets) == (8, 6, ("q_proj", "o_proj"))
    assert [(a.id, a.name, a.pinned) for a in lora.adapters] == [(1, "a", False), (2, "b", True)]
    flags = config.flat()
    assert flags["enable_lora"] is True and flags["max_lora_rank"] == 6
    assert json.loads(json.dumps(flags["lora_target_modules"])) == "q_proj o_proj"
    more = resolved(base, lora_paths={"a": str(adapter)}, max_lora_rank=12, lora_target_modules="all").lora
    assert more is not None and more.rank == 12 and "down_proj" in more.targets
    row = "LoRA slots"
    assert config.ledger.bytes_of(row) > 0 == resolved(base).ledger.bytes_of(row)
    twice = resolved(base, lora_paths={"a": str(adapter)}, max_lora_rank=12)
    assert twice.ledger.bytes_of(row) == 2 * config.ledger.bytes_of(row)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_lora": True}, "--enable-lora without --lora-paths needs --lora-target-modules"),
        ({"enable_lora": True, "lora_target_modules": "q_proj"}, "needs --max-lora-rank"),
        ({"enable_lora": True, "lora_target_modules": "kv_b_proj", "max_lora_rank": 4}, "has no such module"),
        ({"max_lora_rank": 3, "lora_paths": "ADAPTER"}, "an adapter of --lora-paths has rank 6"),
        ({"lora_target_modules": "q_proj", "lora_paths": "ADAPTER"}, "also have o_proj"),
        ({"max_loras_per_batch": 0, "lora_paths": "ADAPTER"}, "--max-loras-per-batch"),
        ({"max_loaded_loras": 1, "lora_paths": "ADAPTER b=ADAPTER"}, "--max-loaded-loras 1 is less than the 2"),
        ({"lora_paths": '{"lora_name": "a", "lora_path": "ADAPTER", "pinned": true}', "max_loras_per_batch": 1},
         "leave no slot for others"),
        ({"lora_paths": "ADAPTER", "lora_backend": "triton", "device": "cpu"}, "--lora-backend triton"),
        ({"lora_paths": "ADAPTER b=/no/such"}, r"--lora-paths b: /no/such.*adapter_config.json"),
        ({"lora_paths": "ADAPTER", "is_embedding": True}, "not available yet for vectors"),
        ({"lora_paths": "ADAPTER", "enable_torch_compile": True}, "--enable-torch-compile with --enable-lora"),
    ],
)  # fmt: skip
def test_refused(base: Path, adapter: Path, flags: dict[str, Any], words: str) -> None:
    given = {k: v.replace("ADAPTER", str(adapter)) if isinstance(v, str) else v for k, v in flags.items()}
    with pytest.raises(ConfigError, match=words):
        resolved(base, **given)


def test_flags_without_lora_have_no_effect(base: Path) -> None:
    config = resolved(base, max_lora_rank=8, lora_backend="triton")
    assert config.lora is None
    assert {f"--{name} has no effect without --enable-lora" for name in ("max-lora-rank", "lora-backend")} <= set(
        config.notes
    )
