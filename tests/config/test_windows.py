"""Sliding windows in the configuration: the context is not cut, rows without windows and draft trees are refused."""

from __future__ import annotations

from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.kernels.registry import WINDOWS
from moe_engine.planning.output.explain import explain_text
from moe_engine.planning.output.launch_flags import launch_flags
from tests.config.conftest import machine
from tests.config.test_speculation import LLAMA, NGRAM, rows_of, standalone  # noqa: F401  # a fixture

MISTRAL: dict[str, Any] = {
    **LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512,
}  # fmt: skip
ALTERNATING: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 512,
    "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip

MIMO: dict[str, Any] = {
    **LLAMA, "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(("model", "windows"), [(MISTRAL, (512, 512)), (ALTERNATING, (None, 512))])
def test_the_window_does_not_cut_the_context(resolved, model, windows) -> None:
    config = resolved(model)
    assert config.context_len == 4096 and config.model.windows == windows
    assert config.kernels.model.need.windows and WINDOWS in config.kernels.model.row("attention").supports
    inside = resolved(model, context_length=512)
    assert inside.model.windows == () and not inside.kernels.model.need.windows


def test_draft_trees_need_layers_without_windows(standalone) -> None:  # noqa: F811
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    assert standalone(MISTRAL).draft_model.windows == (512, 512)
    with pytest.raises(ConfigError, match="--context-length 512"):
        standalone(MISTRAL, **tree)
    assert standalone(MISTRAL, context_length=512, **tree).draft_model.windows == ()
    with pytest.raises(ConfigError, match=r"speculative-eagle-topk 1$"):
        standalone(MIMO, context_length=128, **tree)  # whose windows stay


def test_layers_of_two_windows_are_captured(resolved) -> None:
    config = resolved(ALTERNATING, on=machine(60, 80, "cuda"))
    assert config.kernels.uncaptured is None and config.graphs.sizes


FEW = {"max_running_requests": 2, "chunked_prefill_size": 64}


@pytest.mark.parametrize("drafts", [{}, NGRAM])
@pytest.mark.parametrize("bounded", [True, False])
def test_slot_tables_of_long_contexts_bound_running_requests(resolved, bounded, drafts) -> None:
    """Those that the ledger counts: 2 % of a GPU's memory."""
    model = ALTERNATING | {"max_position_embeddings": 1 << 20}
    config = resolved(model, on=machine(60, 80, "cuda"), disable_hybrid_swa_memory=not bounded, **drafts)
    row = rows_of(config)["slot tables"]
    assert bool(config.num_window_slots) == bounded and ("window slots" in row.detail) == bounded
    most, requests = 0.02 * 80 * 2**30, config.max_running_requests
    assert most * requests / (requests + 1) < row.num_bytes <= most


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
        ({"max_running_requests": 2, "max_total_tokens": 1024}, "the KV cache has 1024 tokens (--chunked-prefill-size"),
        (FEW | {"disable_hybrid_swa_memory": True}, "--disable-hybrid-swa-memory"),
        (FEW | {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache needs a layer without a window"),
        (
            FEW | {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
            "takes the KV of all layers",
        ),
    ],
)
def test_windows_that_are_not_bounded_are_reported(resolved, flags, reason) -> None:
    config = resolved(MISTRAL, **flags)
    assert config.num_window_slots == config.window == 0
    assert any("keep the KV of the whole context" in note and reason in note for note in config.notes)


def test_the_host_tier_has_windows_of_its_own(resolved) -> None:
    """The same multiple of both pools; `--hicache-size` is divided in that proportion."""
    tier = FEW | {"enable_hierarchical_cache": True}
    config = resolved(ALTERNATING, **tier)
    assert config.num_window_slots == resolved(ALTERNATING, **FEW).num_window_slots > 0
    assert config.host_tier_tokens == 2 * config.max_total_num_tokens
    page, of_layer = config.page_size, config.model.kv_bytes_per_token(config.kv_cache_dtype) // 2
    assert 0 <= 2 * config.num_window_slots - config.host_window_slots < page
    assert config.ledger.bytes_of("host KV tier") == config.host_tier_tokens * of_layer
    assert config.ledger.bytes_of("host tier of windows") == config.host_window_slots * of_layer
    assert "host_window_slots" in explain_text(config) and "KV of windows" in explain_text(config)
    sized = resolved(ALTERNATING, **tier, hicache_size=1)
    total = (sized.host_tier_tokens + sized.host_window_slots) * of_layer
    assert total == pytest.approx(10**9, rel=0.01)
    ratio = sized.host_tier_tokens / sized.max_total_num_tokens
    assert sized.host_window_slots / sized.num_window_slots == pytest.approx(ratio, rel=0.02)


MANY = {"chunked_prefill_size": 64, "max_running_requests": 64}


def test_windows_have_a_share_of_the_memory_where_those_of_all_requests_do_not_fit(resolved) -> None:
    """`--swa-full-tokens-ratio` with layers of both kinds; all memory if every layer has a window."""
    asked = resolved(ALTERNATING, **MANY, max_total_tokens=20_000, swa_full_tokens_ratio=0.5)
    assert asked.num_window_slots == 10_000 and asked.max_total_num_tokens == 20_000
    many = {"on": machine(3, 16, "cuda"), "chunked_prefill_size": 64, "max_running_requests": 8192}
    alternating, every = (model | {"sliding_window": 2048} for model in (ALTERNATING, MISTRAL))
    whole = resolved(alternating, **many, disable_hybrid_swa_memory=True)
    assert whole.num_window_slots == 0 and whole.max_total_num_tokens < 8192 * 2048
    half = resolved(alternating, **many, swa_full_tokens_ratio=0.5)
    assert half.num_window_slots / half.max_total_num_tokens == pytest.approx(0.5, rel=0.05)
    assert half.max_total_num_tokens > 1.2 * whole.max_total_num_tokens
    numbered = resolved(every, **many)
    assert 0.7 * whole.max_total_num_tokens < numbered.num_window_slots < whole.max_total_num_tokens
    assert numbered.max_total_num_tokens > 2 * numbered.num_window_slots


@pytest.mark.parametrize("ratio", [0.0, 1.5, -0.1])
def test_ratios_out_of_range_are_refused(resolved, ratio) -> None:
    with pytest.raises(ConfigError, match=r"--swa-full-tokens-ratio .*must be above 0 and at most 1"):
        resolved(ALTERNATING, swa_full_tokens_ratio=ratio)


LONG: dict[str, Any] = {"sliding_window": 4096, "max_position_embeddings": 32768, "num_hidden_layers": 32}
REPORTED = ("max_total_tokens", "swa_full_tokens_ratio", "disable_hybrid_swa_memory")


@pytest.mark.parametrize(("model", "asked"), [(MISTRAL, {}), (ALTERNATING, {}), (MISTRAL, {"max_total_tokens": 4096})])
def test_the_reported_flags_make_the_same_pools(resolved, model, asked) -> None:
    first = resolved(model | LONG, on=machine(40, 48), **asked)
    flags = launch_flags(first)
    again = resolved(model | LONG, on=machine(40, 48), **{name: flags[name] for name in REPORTED})
    assert again.num_window_slots == first.num_window_slots
    assert again.max_total_num_tokens == first.max_total_num_tokens
    assert bool(first.num_window_slots) == (not asked)
