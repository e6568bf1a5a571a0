"""Flags that sparse attention excludes are refused before a weight is read; the ledger has the index keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from moe_engine.models.needs import need_of_model
from moe_engine.planning.model.sparse_attention import with_index_keys
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolution_log import Record
from tests.models.checkpoints import make_checkpoint

SMALL: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("glm_moe_dsa", tmp_path_factory.mktemp("model") / "model"))


def resolved(path: str | Path, **flags: Any) -> Any:
    return prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", **SMALL | flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: index keys .* need a scale; use fp8_e4m3"),
        ({"enable_torch_compile": True}, "--enable-torch-compile: not available yet"),
    ],
)
def test_refused(path: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(path, **flags)


@pytest.mark.parametrize(
    ("device", "asked", "dtype", "width"),
    [("cuda", "auto", "bfloat16", 10), ("cuda", "bfloat16", "bfloat16", 16), ("cuda", "auto", "float32", 16),
     ("cpu", "auto", "bfloat16", 16)],
)  # fmt: skip
def test_index_keys_are_in_fp8_on_a_gpu(path: str, device: str, asked: str, dtype: str, width: int) -> None:
    """An e4m3 record of 16 channels has 20 bytes, 10 numbers of the cache's type."""
    args, record = EngineArgs.from_kwargs(model_path=path, kv_cache_dtype=asked), Record()
    model = with_index_keys(args, load_model_config(Path(path)), device, dtype, record)
    assert model.attention.kv_parts(dtype) == ((40,), (1, width))
    assert model.attention.kv_parts("fp8_e4m3")[1] == (1, 20)
    assert bool(record.remarks) == (width == 10)
    need = need_of_model(model, dtype, dtype)
    assert need.index is not None and need.index.fp8_keys == (width == 10)


def test_the_plan_has_an_indexer(path: str) -> None:
    config = resolved(path, dtype="float32")
    assert {"cpu", "torch"} >= {config.kernels.model.row("indexer").name}
    assert config.kernels.model.need.index.top_k == 8
    assert config.ledger.bytes_per_token == 4 * (4 * 40 + 3 * 16)
    assert resolved(path, kv_cache_dtype="fp8_e4m3").ledger.bytes_per_token == 4 * 64 + 3 * 20
