"""A tiny DeepSeek V3 with head widths that the vendor libraries support, and libraries that count as installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_engine.kernels.vendors import probe
from tests.models.checkpoints import make_checkpoint

SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 2, "num_experts_per_tok": 2, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "initializer_range": 0.06,
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in block FP8."""
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("v3"), seed=3, fp8=True, **SIZES)


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library counts as installed."""
    monkeypatch.setattr(probe, "_found", lambda name: True)
