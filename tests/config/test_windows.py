"""Sliding windows in the configuration: the context is not cut, rows without windows and draft trees are refused."""

from __future__ import annotations

from typing import Any

import pytest

from moe_engine.errors import ConfigError
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
