"""Sliding windows in the configuration: the context is not cut, rows without windows and draft trees are refused."""

from __future__ import annotations

from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.planning.explain import explain_text
from tests.config.conftest import machine
from tests.config.test_speculation import LLAMA, standalone  # noqa: F401  # a fixture

MISTRAL: dict[str, Any] = {
    **LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512,
}  # fmt: skip
ALTERNATING: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 512,
    "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(("model", "windows"), [(MISTRAL, (512, 512)), (ALTERNATING, (None, 512))])
def test_the_window_does_not_cut_the_context(resolved, model, windows) -> None:
    config = resolved(model)
    assert config.context_len == 4096 and config.model.windows == windows
    assert config.kernels.model.need.windows and config.kernels.model.row("attention").windows
    inside = resolved(model, context_length=512)
    assert inside.model.windows == () and not inside.kernels.model.need.windows


def test_draft_trees_need_layers_without_windows(standalone) -> None:  # noqa: F811
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    assert standalone(MISTRAL).draft_model.windows == (512, 512)
    with pytest.raises(ConfigError, match="--context-length 512"):
        standalone(MISTRAL, **tree)
    assert standalone(MISTRAL, context_length=512, **tree).draft_model.windows == ()


def test_layers_of_two_windows_are_not_captured(resolved) -> None:
    gpu = machine(60, 80, "cuda")
    assert resolved(ALTERNATING, on=gpu).kernels.uncaptured.startswith("layers with different attention")
    assert resolved(MISTRAL, on=gpu).kernels.uncaptured is None


FEW = {"max_running_requests": 2, "chunked_prefill_size": 64}


@pytest.mark.parametrize(("model", "windowed"), [(MISTRAL, 2), (ALTERNATING, 1)])
def test_the_ledger_bounds_windowed_layers(resolved, model, windowed) -> None:
    short, long = (resolved(model, context_length=context, **FEW) for context in (2048, 4096))
    assert short.num_window_slots == long.num_window_slots < 2 * (512 + 3) + 3 * 80
    assert short.window == 512
    rows = [config.ledger.bytes_of("KV of windows") for config in (short, long)]
    whole = short.model.kv_bytes_per_token(short.kv_cache_dtype)
    assert rows[0] == rows[1] == (short.num_window_slots + short.page_size) * whole // 2 * windowed
    assert short.ledger.bytes_per_token == whole // 2 * (2 - windowed)
    assert long.max_total_num_tokens == 2 * 4096
    assert "swa_max_total_num_tokens" in explain_text(long) and "KV of windows" in explain_text(long)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max_running_requests": 2, "max_total_tokens": 1024}, "the KV cache has 1024 tokens (--max-running-requests"),
        (FEW | {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache copies the KV of all layers"),
    ],
)
def test_windows_that_are_not_bounded_are_reported(resolved, flags, reason) -> None:
    config = resolved(MISTRAL, **flags)
    assert config.num_window_slots == config.window == 0
    assert any("keep the KV of the whole context" in note and reason in note for note in config.notes)
