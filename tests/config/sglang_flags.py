"""The fields of SGLang's ServerArgs (0.4.x, whose dumps guides print), with values that request nothing."""

from __future__ import annotations

from typing import Any

SERVER_ARGS: dict[str, Any] = {
    "tokenizer_path": "/models/x", "tokenizer_mode": "auto", "skip_tokenizer_init": False, "load_format": "auto",
    "trust_remote_code": True, "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None,
    "quantization_param_path": None, "context_length": None, "device": "cuda", "served_model_name": "x",
    "chat_template": None, "is_embedding": False, "revision": None, "host": "0.0.0.0",
    "port": 30000, "mem_fraction_static": 0.88, "max_running_requests": None, "max_total_tokens": None,
    "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0, "cpu_offload_gb": 0, "page_size": 1, "prefill_only_one_req": False, "tp_size": 1,
    "stream_interval": 1, "stream_output": False, "random_seed": 773291, "constrained_json_whitespace_pattern": None,
    "watchdog_timeout": 300, "dist_timeout": None, "download_dir": None, "base_gpu_id": 0, "gpu_id_step": 1,
    "log_level": "info", "log_level_http": None, "log_requests": False, "log_requests_level": 0,
    "show_time_cost": False, "enable_metrics": False, "decode_log_interval": 40, "api_key": None,
    "file_storage_pth": "sglang_storage", "file_storage_path": "sglang_storage", "enable_cache_report": False,
    "reasoning_parser": None, "dp_size": 1, "load_balance_method": "round_robin", "ep_size": 1, "dist_init_addr": None,
    "nnodes": 1, "node_rank": 0, "json_model_override_args": "{}", "lora_paths": None, "max_loras_per_batch": 8,
    "lora_backend": "triton", "attention_backend": None, "sampling_backend": None, "grammar_backend": "outlines",
    "speculative_algorithm": None, "speculative_draft_model_path": None, "speculative_num_steps": 5,
    "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64, "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0, "speculative_token_map": None, "enable_double_sparsity": False,
    "ds_channel_config_path": None, "ds_heavy_channel_num": 32, "ds_heavy_token_num": 256,
    "ds_heavy_channel_type": "qk", "ds_sparse_decode_threshold": 4096, "disable_radix_cache": False,
    "disable_jump_forward": False, "disable_cuda_graph": False, "disable_cuda_graph_padding": False,
    "enable_nccl_nvls": False, "disable_outlines_disk_cache": False, "disable_custom_all_reduce": False,
    "disable_mla": False, "disable_overlap_schedule": False, "enable_mixed_chunk": False, "enable_dp_attention": False,
    "enable_ep_moe": False, "enable_deepep_moe": False, "deepep_mode": "auto", "enable_torch_compile": False,
    "torch_compile_max_bs": 32, "cuda_graph_max_bs": 160, "cuda_graph_bs": None, "torchao_config": "",
    "enable_nan_detection": False, "enable_p2p_check": False, "triton_attention_reduce_in_fp32": False,
    "triton_attention_num_kv_splits": 8, "num_continuous_decode_steps": 1, "delete_ckpt_after_loading": False,
    "enable_memory_saver": False, "allow_auto_truncate": False, "enable_custom_logit_processor": False,
    "tool_call_parser": None, "enable_hierarchical_cache": False, "hicache_ratio": 2.0, "enable_flashinfer_mla": False,
    "enable_flashmla": False, "flashinfer_mla_disable_ragged": False, "enable_llama4_multimodal": None,
    "warmups": None, "n_share_experts_fusion": 0, "disable_shared_experts_fusion": False,
    "debug_tensor_dump_output_folder": None, "debug_tensor_dump_input_file": None, "debug_tensor_dump_inject": False,
    "disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998, "disaggregation_transfer_backend": "mooncake",
    "disable_fast_image_processor": False,
}  # fmt: skip

MACHINE = ("device", "tokenizer_path", "served_model_name")
"""Fields that depend on the machine and the model."""
