"""Flags of SGLang that are not supported yet: the error names the missing feature.

A flag with its default value (``--pp-size 1``) requests nothing and is accepted. When a feature is added, its rows move
from here into fields of a config dataclass.
"""

from __future__ import annotations

from typing import Any

from moe_engine.config.absent_flag import SWITCH, UnsupportedFlag


def _rows(feature: str, *flags: tuple[Any, ...]) -> list[UnsupportedFlag]:
    return [UnsupportedFlag(flag[0], flag[1], feature, *flag[2:]) for flag in flags]


def _switches(feature: str, *names: str) -> list[UnsupportedFlag]:
    return [UnsupportedFlag(name, SWITCH, feature) for name in names]


MANY_RANKS = "further forms and settings of parallelism"
PROMPT_GRAPHS = "CUDA graphs of prefill"

_PARALLEL = [
    *_rows(
        MANY_RANKS,
        ("pp_size", 1, ("--pipeline-parallel-size", "--pp")),
        ("attn_cp_size", 1),
        ("moe_dp_size", 1),
        ("nccl_port", None),
        ("deepep_config", None),
    ),
    *_switches(
        MANY_RANKS,
        "enable_tp_lm_head_all_to_all",
        "enable_nccl_nvls",
        "enable_symm_mem",
        "enable_mscclpp",
        "enable_p2p_check",
    ),
]

_SPECULATION = [
    *_rows("EAGLE draft heads", ("speculative_token_map", None)),
    *_rows(
        "separate backends and formats for the draft model",
        ("speculative_attention_mode", "prefill"),
        ("speculative_draft_attention_backend", None),
        ("speculative_moe_runner_backend", None),
        ("speculative_moe_a2a_backend", None),
        ("speculative_draft_model_quantization", None),
        ("speculative_draft_load_format", None),
        ("speculative_draft_model_revision", None),
    ),
    *_rows(
        "n-gram draft trees",
        ("speculative_ngram_min_bfs_breadth", 1),
        ("speculative_ngram_max_bfs_breadth", 10, (), (1,)),
        ("speculative_ngram_match_type", "BFS"),
        ("speculative_ngram_branch_length", 18),
        ("speculative_ngram_capacity", 10_000_000),
    ),
]

_MEMORY = [
    *_rows(
        "the hierarchical KV cache",
        ("hicache_ratio", None, (), (2.0,)),
        ("hicache_size", 0),
        ("hicache_write_policy", "write_through"),
        ("hicache_io_backend", "kernel"),
        ("hicache_mem_layout", "layer_first"),
        ("hicache_storage_backend", None),
        ("hicache_storage_prefetch_policy", "best_effort"),
        ("hicache_storage_backend_extra_config", None),
    ),
    UnsupportedFlag("enable_hierarchical_cache", SWITCH, "the hierarchical KV cache", ("--enable-hicache",)),
    *_rows("weights offloaded to RAM", ("cpu_offload_gb", 0)),
    *_rows("FP8 scales from a file", ("quantization_param_path", None)),
    *_rows(
        "other eviction and retraction policies",
        ("radix_eviction_policy", "lru"),
        ("retraction_policy", None, (), ("default",)),
    ),
    *_switches("releasing memory at run time", "enable_memory_saver"),
    *_switches("deleting the checkpoint after loading", "delete_ckpt_after_loading"),
]

_SPLIT = [
    *_rows(
        "prefill-decode disaggregation",
        ("disaggregation_mode", "null"),
        ("disaggregation_bootstrap_port", 8998),
        ("disaggregation_transfer_backend", "mooncake"),
        ("disaggregation_ib_device", None),
        ("num_reserved_decode_tokens", 512),
    ),
    *_switches("prefill-decode disaggregation", "disaggregation_decode_enable_offload_kvcache"),
]

_TEXT = [
    *_rows(
        "structured output",
        ("grammar_backend", "xgrammar", (), ("outlines", "none")),
        ("constrained_json_whitespace_pattern", None),
    ),
    *_rows(
        "LoRA adapters",
        ("lora_paths", None),
        ("max_loras_per_batch", 8),
        ("lora_backend", "csgmv", (), ("triton",)),
        ("max_lora_rank", None),
        ("lora_target_modules", None),
        ("max_loaded_loras", None),
    ),
    *_switches("LoRA adapters", "enable_lora"),
    *_rows("fill-in-the-middle completion templates", ("completion_template", None)),
    *_switches("embedding models", "is_embedding"),
    *_switches("multimodal models", "enable_multimodal", "enable_llama4_multimodal"),
    *_switches("custom logit processors", "enable_custom_logit_processor"),
    *_rows("further warm-ups", ("warmups", None)),
    *_rows("debugging dumps", ("debug_tensor_dump_output_folder", None), ("debug_tensor_dump_input_file", None)),
    *_rows("several tokenizer processes", ("tokenizer_worker_num", 1), ("detokenizer_worker_num", 1)),
    *_rows("the files API", ("file_storage_path", None, (), ("sglang_storage",))),
    *_rows("a watchdog that only warns", ("soft_watchdog_timeout", None)),
    *_switches("sleeping when idle", "sleep_on_idle"),
    *_switches("tracing", "enable_trace"),
]  # fmt: skip

_KERNELS = [
    *_rows(
        PROMPT_GRAPHS,
        ("cuda_graph_max_bs_prefill", None),
        ("cuda_graph_bs_prefill", None),
        ("cuda_graph_config", None),
        ("cuda_graph_backend_prefill", None, (), ("disabled",)),
    ),
    *_switches(PROMPT_GRAPHS, "enable_piecewise_cuda_graph"),
    *_switches("profiling", "enable_profile_cuda_graph"),
    *_rows("settings of individual Triton kernels", ("triton_attention_num_kv_splits", 8)),
    *_switches("settings of individual Triton kernels", "triton_attention_reduce_in_fp32"),
    *_rows(
        "separate attention backends for prefill and decode",
        ("prefill_attention_backend", None),
        ("decode_attention_backend", None),
    ),
    *_rows("separate FP8 GEMM backends", ("fp8_gemm_runner_backend", "auto", ("--fp8-gemm-backend",))),
    *_switches("shared experts fused into the routed ones", "enforce_shared_experts_fusion"),
    *_switches(
        "a choice of the form of prefill attention", "flashinfer_mla_disable_ragged", "disable_chunked_prefix_cache"
    ),
]

_MORE = [
    *_rows(
        MANY_RANKS,
        ("pp_max_micro_batch_size", None),
        ("pp_async_batch_depth", 0),
        ("nsa_prefill_cp_mode", None),
        ("disaggregation_prefill_pp", 1),
        ("disaggregation_decode_tp", None),
        ("disaggregation_decode_dp", None),
        ("elastic_ep_backend", None, (), ("none",)),
        ("mooncake_ib_device", None),
    ),
    *_switches(
        MANY_RANKS,
        "enable_flashinfer_allreduce_fusion",
        "enable_torch_symm_mem",
        "enable_nsa_prefill_context_parallel",
        "prefill_round_robin_balance",
    ),
    *_rows("sparse attention (DeepSeek V3.2)", ("nsa_prefill_backend", None), ("nsa_decode_backend", None)),
    *_rows("sliding-window and state-space models", ("swa_full_tokens_ratio", 0.8), ("max_mamba_cache_size", None)),
    *_switches("sliding-window and state-space models", "disable_hybrid_swa_memory"),
    *_rows("structured output", ("reasoning_config", None)),
    *_switches("structured output", "constrained_json_disable_any_whitespace"),
    *_rows(
        "multimodal models",
        ("mm_attention_backend", None),
        ("image_processor_backend", None),
        ("limit_mm_data_per_request", None),
    ),
    *_switches("multimodal models", "keep_mm_feature_on_device", "enable_mm_global_cache"),
    *_rows("other ways to load weights", ("model_loader_extra_config", "{}"), ("model_impl", "auto")),
    *_switches("other ways to load weights", "weight_loader_disable_mmap", "enable_weights_cpu_backup"),
    *_rows("rollouts for training", ("rl_on_policy_target", None), ("custom_weight_loader", None)),
    *_switches("rollouts for training", "enable_return_hidden_states", "enable_return_routed_experts"),
    *_rows(
        "more metrics",
        ("bucket_time_to_first_token", None),
        ("bucket_inter_token_latency", None),
        ("bucket_e2e_request_latency", None),
        ("kv_events_config", None),
        ("otlp_traces_endpoint", None, (), ("localhost:4317",)),
    ),
    *_switches(
        "more metrics",
        "enable_metrics_for_all_schedulers",
        "enable_request_time_stats_logging",
        "collect_tokens_histogram",
        "enable_layerwise_nvtx_marker",
    ),
    *_rows(
        "further settings of the HTTP server",
        ("fastapi_root_path", None, (), ("",)),
        ("ssl_keyfile", None),
        ("ssl_certfile", None),
        ("hf_chat_template_name", None),
        ("tool_server", None),
        ("crash_dump_folder", None),
    ),
    *_rows("process placement", ("numa_node", None), ("scheduler_recv_interval", 1)),
]

UNSUPPORTED_FLAGS: dict[str, UnsupportedFlag] = {
    row.name: row for group in (_PARALLEL, _SPECULATION, _MEMORY, _SPLIT, _TEXT, _KERNELS, _MORE) for row in group
}
