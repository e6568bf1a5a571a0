"""config.json files of published models."""

from __future__ import annotations

from typing import Any

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 18432, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "moe_layer_freq": 1,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""Without its `rope_scaling`."""
YARN_V3: dict[str, Any] = V3 | {
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
V2_LITE: dict[str, Any] = YARN_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400, "num_nextn_predict_layers": None,
    "quantization_config": None,
    "rope_scaling": YARN_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
K_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "hidden_size": 6144, "head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 48, "vocab_size": 153600,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_shared_experts": 1, "sliding_window": 128, "sliding_window_pattern": "LLLG",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12, "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_theta": 1000000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144, "eos_token_id": 53, "torch_dtype": "bfloat16",
}  # fmt: skip
FLINT: dict[str, Any] = {
    "architectures": ["FlintForCausalLM"], "model_type": "flint", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 49, "num_attention_heads": 32, "moe_intermediate_size": 512, "vocab_size": 150144,
    "max_position_embeddings": 262144, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
AXK1: dict[str, Any] = {
    "architectures": ["AXK1ForCausalLM"], "model_type": "axk1", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 192, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "vocab_size": 163840, "eos_token_id": 163691,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Sizes of transformers' class, which are those of the published model."""
COMMAND_A_PLUS: dict[str, Any] = {
    "architectures": ["Cohere2VisionForConditionalGeneration"], "model_type": "cohere2_vision", "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "cohere2_moe", "hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 128, "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8,
        "num_shared_experts": 4, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 0, "vocab_size": 262144,
        "rope_theta": 50000, "logit_scale": 1.0, "max_position_embeddings": 200000,
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    },
}  # fmt: skip
GEMMA_TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
GEMMA_2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192, "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE_SWA: dict[str, Any] = {
    "architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa", "hidden_size": 2560,
    "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 20, "vocab_size": 100352,
    "max_position_embeddings": 8192, "eos_token_id": 100257, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "vocab_size": 65536,
    "routed_scaling_factor": 1.0, "use_expert_bias": True, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
    "rope_theta": 1000000.0, "max_position_embeddings": 128000, "eos_token_id": 7, "torch_dtype": "bfloat16",
}  # fmt: skip
LING_MINI: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4,
    "use_qkv_bias": False, "use_qk_norm": True, "use_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 600000,
    "max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "vocab_size": 157184,
    "eos_token_id": 156892, "num_nextn_predict_layers": 0, "rope_scaling": None, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
"""Ling-mini-2.0."""
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "partial_rotary_factor": 0.25, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "rope_theta": 10000000, "max_position_embeddings": 262144, "vocab_size": 151936,
    "eos_token_id": 151645, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
    "intermediate_size": 1856, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "use_conv_bias": True, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "time_step_limit": [0.0, float("inf")], "mlp_bias": False, "use_bias": False, "attention_bias": False,
    "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144, "vocab_size": 131072, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_5_2: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144, "head_dim": 192,
    "num_hidden_layers": 78, "first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
    "index_topk_pattern": None, "index_share_for_mtp_iteration": True, "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576, "vocab_size": 154880, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "moe_router_dtype": "float32",
}  # fmt: skip
"""GLM-5.3 has the same fields."""
GLM_5_3_FLASH: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "image_token_id": 154854,
    "video_token_id": 154855, "tie_word_embeddings": False, "dtype": "bfloat16",
    "text_config": {
        "model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "moe_router_dtype": "float32", "n_group": 1, "topk_group": 1, "mhc": True, "hc_mult": 4, "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20, "mla_use_nope": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 1, "swiglu_limit": 10.0,
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "attention_bias": False, "eos_token_id": [154820, 154827, 154829],
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i % 4 != 3], "full_attn_layers": list(range(3, 45, 4)),
        },
    },
    "vision_config": {
        "model_type": "glm5_next_vision", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
        "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096,
    },
}  # fmt: skip
GLM_TOWER: dict[str, Any] = {
    "hidden_size": 1536, "depth": 24, "num_heads": 12, "attention_bias": False, "intermediate_size": 13696,
    "hidden_act": "silu", "image_size": 336, "patch_size": 14, "out_hidden_size": 4096, "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
GLM_4_1V: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338, 151348], "hidden_act": "silu", "hidden_size": 4096,
    "image_token_id": 151343, "video_token_id": 151344, "intermediate_size": 13696, "max_position_embeddings": 65536,
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151552, "vision_config": GLM_TOWER,
}  # fmt: skip
GLM_4_5V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "image_token_id": 151363,
    "video_token_id": 151364, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_moe_text", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}, "max_position_embeddings": 65536,
        "eos_token_id": [151329, 151336, 151338], "hidden_act": "silu", "dtype": "bfloat16",
    },
    "vision_config": GLM_TOWER,
}  # fmt: skip
QWEN3_8: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 8192,
    "num_hidden_layers": 92, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 23, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 128, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "attn_output_gate": True, "output_gate_type": "swish", "partial_rotary_factor": 0.25, "vocab_size": 248320,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "dtype": "bfloat16", "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": None,
}  # fmt: skip
"""Qwen3.8-2.4T-A95B."""
QWEN_3_8_FLASH_NEXT: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "image_token_id": 248056,
    "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen4_exp_text", "dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 2560,
        "num_hidden_layers": 48, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "full_attention_interval": 4, "attention_bias": False, "num_attention_heads": 24, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "output_gate_type": "sigmoid", "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "mtp": {
            "hybrid": True, "layer_types": ["full_attention"], "mtp_use_hidden_state_from_layer": None,
            "num_hidden_layers": 1, "rope_theta": 10000000,
        },
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "vocab_size": 248320, "eos_token_id": 248044,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "vision_config": {
        "model_type": "qwen4_exp", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2560,
        "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
    },
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "model_max_length": 1048576, "vocab_size": 163840, "eos_token_id": 163586,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False, "dtype": "bfloat16",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip
KIMI_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "bos_token_id": 163584,
    "eos_token_id": 163586, "pad_token_id": 163839, "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 7168,
        "intermediate_size": 33792, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True, "num_hidden_layers": 93, "attn_res_block_size": 12, "num_attention_heads": 96,
        "num_key_value_heads": 96, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "num_expert_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": True, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 1048576, "vocab_size": 163840, "eos_token_id": 163586, "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "dtype": "bfloat16",
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93], "kda_layers": [i for i in range(1, 93) if i % 4],
            "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "ignore": [
                "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*routed_expert_.*", "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*",
            ],
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized", "targets": ["Linear"], "input_activations": None,
                    "weights": {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group"},
                },
            },
        },
    },
    "vision_config": {
        "patch_size": 14, "vt_hidden_size": 1024, "qkv_hidden_size": 1536, "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "init_pos_emb_time": 4, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mlp_type": "mlp2",
        "norm_type": "rmsnorm", "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False,
        "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
        "activation_func": "gelu_pytorch_tanh", "text_hidden_size": 7168,
    },
}  # fmt: skip
"""The fields of the published file; of the ignored modules of its quantization, those that the text model has."""
MISTRAL_LARGE_3: dict[str, Any] = {
    "dim": 7168, "n_layers": 61, "head_dim": 128, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "rope_theta": 10000.0, "norm_eps": 1e-6, "vocab_size": 131072, "tied_embeddings": False,
    "max_position_embeddings": 294912, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "kv_lora_rank": 512, "v_head_dim": 128, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {
        "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
        "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    },
    "vision_encoder": {
        "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13, "intermediate_size": 8192,
        "num_hidden_layers": 48, "num_attention_heads": 16, "mm_projector_id": "patch_merge", "spatial_merge_size": 2,
        "hidden_size": 1664, "num_channels": 3, "image_size": 1540, "max_image_size": 1540, "patch_size": 14,
        "rope_theta": 10000.0, "add_pre_mm_projector_layer_norm": True, "adapter_bias": False,
    },
}  # fmt: skip
"""Fields of params.json; the sizes are those of the published 675 B model."""
LING_FLASH: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 2560,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768,
    "num_hidden_layers": 42, "layer_group_size": 6, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "qk_head_dim": 192, "v_head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5, "rope_interleave": True,
    "rope_theta": 6000000, "rope_scaling": None, "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2,
    "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True,
    "use_kda_lora": False, "use_mla_nope": False, "kda_safe_gate": True, "kda_lower_bound": -5,
    "short_conv_kernel_size": 4, "group_norm_size": 1, "linear_silu": True, "mtp_use_kda": False,
    "num_kv_heads_for_linear_attn": 0, "num_nextn_predict_layers": 1, "use_bias": False, "use_qkv_bias": False,
    "use_qk_norm": True, "tie_word_embeddings": False, "max_position_embeddings": 131072, "vocab_size": 157184,
    "eos_token_id": 156895, "pad_token_id": 156892, "rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
"""Without its limits of activations."""
LING_2_6_FLASH: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 4096,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "moe_shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 32, "layer_group_size": 8, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "qk_head_dim": 192, "v_head_dim": 128, "partial_rotary_factor": 0.5, "rope_interleave": True,
    "rope_theta": 6000000, "rope_scaling": None, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "group_norm_size": 4, "linear_silu": False, "use_qk_norm": True,
    "num_kv_heads_for_linear_attn": 32, "num_nextn_predict_layers": 1, "use_bias": False, "use_qkv_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "vocab_size": 157184, "eos_token_id": 156895,
    "pad_token_id": 156892, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
"""Widths from descriptions of the published files and the published class's fields."""
RING_2_5 = LING_2_6_FLASH | {
    "hidden_size": 8192, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "moe_shared_expert_intermediate_size": 2048, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 64, "num_kv_heads_for_linear_attn": 64, "group_norm_size": 8, "first_k_dense_replace": 4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Sizes of Ring-2.5-1T and Ling-2.5-1T: the defaults of transformers' class for them."""
LONGCAT_FLASH: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "attention_bias": False,
    "vocab_size": 131072, "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
    "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "routed_scaling_factor": 6.0, "n_routed_experts": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000000.0, "attention_method": "MLA", "zero_expert_num": 256,
    "zero_expert_type": "identity", "moe_topk": 12, "router_bias": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""The FP8 release."""
LLAMA_4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
        "no_rope_layers": [], "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "use_qk_norm": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
        "eos_token_id": [200001, 200007, 200008], "router_jitter_noise": 0.0, "for_llm_compressor": False,
    },
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "patch_size": 14},
}  # fmt: skip
