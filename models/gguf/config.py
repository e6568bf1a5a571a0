"""Metadata of a GGUF file -> the fields of config.json. Imports no torch.

Keys: gguf-py's constants. Fields that llama.cpp omits from the metadata are taken from the tensors: the vocabulary's
size, the tied head, and the parameters of Llama 3's rotary embedding, whose factors the file has as a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import read_container
from moe_engine.models.formats.gguf import matrix_types
from moe_engine.models.gguf.config_dense import cohere2_fields, exaone4_fields, olmo2_fields
from moe_engine.models.gguf.config_gemma import gemma2_fields, gemma3_fields, gemma4_fields
from moe_engine.models.gguf.config_mixtures import ernie_moe_fields
from moe_engine.models.gguf.config_states import delta_fields, granite_fields, nemotron_fields
from moe_engine.models.gguf.families import DELTA, GEMMA3
from moe_engine.models.gguf.keys import Keys, llama3, longrope, scaling
from moe_engine.models.gguf.names import read_gguf

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    GEMMA3: ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "granitemoe": ("GraniteMoeSharedForCausalLM", "granitemoeshared"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h"),
    "nemotron_h_moe": ("NemotronHForCausalLM", "nemotron_h"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "dots1": ("Dots1ForCausalLM", "dots1"),
}
_PARTLY_ROTATED = ("phi3", "glm4", "glm4moe", *DELTA)
"""Architectures that may rotate a part of each head."""
_MAY_HAVE_BIASES = ("llama", "granite", "granitemoe", "glm4", "glm4moe", "dots1")
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
_DEEPSEEK_V3 = ("DeepseekV3ForCausalLM", "deepseek_v3")
_SIGMOID = 2
_GROUPS = {160: "V2", 256: "V3"}
"""Number of experts of the DeepSeek models whose router has groups; files of older converters do not list the
groups."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_fields(path: Path) -> dict[str, Any]:
    """The fields of config.json of the same model.

    Raises:
        ConfigError: an architecture that is not served, or metadata that are missing or contradictory.
        CheckpointError: a damaged file, or a tensor of a type that is not served.
    """
    container = read_container(path)
    architecture = container.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture {architecture!r:.60} is not served from GGUF files; served are "
            f"{', '.join(_ARCHITECTURES)}; use the model's safetensors"
        )
    keys = Keys(container, architecture)
    files = read_gguf(path)
    fields = _common(keys, files)
    if architecture == "deepseek2":
        fields |= _deepseek(keys, fields)
    else:
        fields |= _gqa(keys, fields, files)
    if (more := _MORE.get(architecture)) is not None:
        fields |= more(keys, fields, files)
    kept = ((name, file) for name, file in files.items() if not file.has_moved_blocks(name))
    types = matrix_types({name: file.tensors[name] for name, file in kept})
    if types or architecture == "gpt-oss":
        fields["quantization_config"] = {"quant_method": "gguf", "types": types}
    return fields


def _common(keys: Keys, files: Mapping[str, Any]) -> dict[str, Any]:
    name, model_type = _ARCHITECTURES[keys.architecture]
    table = files.get("model.embed_tokens.weight")
    if table is None:
        raise ConfigError(f"{keys.path}: has no token_embd.weight: no file of a language model")
    drafts = keys.get("nextn_predict_layers", 0)
    layers = keys.need("block_count") - drafts
    ends = [keys.metadata.get(f"tokenizer.ggml.{end}") for end in _ENDS]
    output = files.get("model.layers.0.self_attn.o_proj.weight")
    stored = "" if output is None else output.tensors["model.layers.0.self_attn.o_proj.weight"].dtype
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": table.tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "intermediate_size": keys.most("feed_forward_length"),
        "num_attention_heads": keys.most("attention.head_count"),
        "num_key_value_heads": keys.most("attention.head_count_kv") if keys.has("attention.head_count_kv") else None,
        "rms_norm_eps": keys.need(f"attention.layer_norm_{'' if keys.architecture == 'cohere2' else 'rms_'}epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in files,
        "bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "torch_dtype": {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16"),
    }


def _gqa(keys: Keys, common: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"head_dim": keys.get("attention.key_length")}
    if found["head_dim"] != keys.get("attention.value_length", found["head_dim"]):
        raise ConfigError(f"{keys.path}: heads of different widths for keys and values are not supported")
    width = found["head_dim"] or common["hidden_size"] // common["num_attention_heads"]
    if keys.architecture in _PARTLY_ROTATED:
        found["partial_rotary_factor"] = keys.get("rope.dimension_count", width) / width
    elif not keys.architecture.startswith("nemotron") and keys.get("rope.dimension_count", width) != width:
        raise ConfigError(f"{keys.path}: {keys.architecture}.rope.dimension_count is not the width of a head, {width}")
    if keys.architecture in _MAY_HAVE_BIASES:
        found["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    experts = keys.get("expert_count", 0)
    if experts and keys.architecture == "llama":
        name, model_type = _MIXTRAL
        found |= {"architectures": [name], "model_type": model_type, "num_local_experts": experts}
    elif experts and keys.architecture == "gpt-oss":
        found |= {"num_local_experts": experts, "sliding_window": keys.need("attention.sliding_window")}
        found["intermediate_size"] = keys.need("expert_feed_forward_length")
    elif experts and keys.architecture in ("glm4moe", "dots1"):
        found |= _routed(keys, "noaux_tc")
        found["use_qk_norm"] = "model.layers.0.self_attn.q_norm.weight" in names
    elif experts and keys.architecture.startswith("granite"):
        found["num_local_experts"] = experts
        found["shared_intermediate_size"] = keys.get("expert_shared_feed_forward_length", 0)
    elif experts and keys.architecture not in ("nemotron_h_moe", "gemma4", "ernie4_5-moe"):
        found |= {"num_experts": experts, "norm_topk_prob": keys.architecture != "qwen2moe", "decoder_sparse_step": 1}
        found["shared_expert_intermediate_size"] = keys.get("expert_shared_feed_forward_length", 0)
        found["moe_intermediate_size"] = keys.need("expert_feed_forward_length")
        found["mlp_only_layers"] = [int(name.split(".")[2]) for name in names if name.endswith(".mlp.gate_proj.weight")]
    if experts:
        found["num_experts_per_tok"] = keys.need("expert_used_count")
    if keys.architecture == "phi3":
        found |= {"sliding_window": keys.get("attention.sliding_window") or None}
        found["rope_scaling"] = longrope(keys)
    elif keys.architecture != "gemma4":
        found["rope_scaling"] = scaling(keys) or llama3(keys, common["rope_theta"], width)
    if keys.architecture == "gpt-oss" and found.get("rope_scaling"):
        found["rope_scaling"]["truncate"] = False  # of the published model; the metadata do not contain it
    return found


def _deepseek(keys: Keys, common: Mapping[str, Any]) -> dict[str, Any]:
    rotary = keys.need("rope.dimension_count")
    key = keys.get("attention.key_length_mla") or keys.need("attention.key_length")
    value = keys.get("attention.value_length_mla") or keys.need("attention.value_length")
    found: dict[str, Any] = {
        "num_key_value_heads": common["num_attention_heads"],
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "rope_scaling": scaling(keys),
    }
    experts = keys.get("expert_count", 0)
    if not experts:
        return found
    sigmoid = keys.get("expert_gating_func") == _SIGMOID
    if sigmoid:
        name, model_type = _DEEPSEEK_V3
        found |= {"architectures": [name], "model_type": model_type}
    groups = keys.get("expert_group_count")
    if groups is None and experts in _GROUPS:
        raise ConfigError(
            f"{keys.path}: has no deepseek2.expert_group_count, and the router of DeepSeek {_GROUPS[experts]} chooses "
            "groups of experts first; convert the model again with a current llama.cpp"
        )
    method = "noaux_tc" if sigmoid else "group_limited_greedy" if (groups or 1) > 1 else "greedy"
    return found | _routed(keys, method)


def _routed(keys: Keys, method: str) -> dict[str, Any]:
    """DeepSeek's fields of experts and router."""
    sigmoid = method == "noaux_tc"
    return {
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", sigmoid)),
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": method,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
    }


_MORE = {
    "gemma2": gemma2_fields, GEMMA3: gemma3_fields, "gemma4": gemma4_fields, "olmo2": olmo2_fields,
    "exaone4": exaone4_fields, "cohere2": cohere2_fields, "ernie4_5-moe": ernie_moe_fields,
    "nemotron_h": nemotron_fields, "nemotron_h_moe": nemotron_fields,
    **dict.fromkeys(("granite", "granitemoe", "granitehybrid"), granite_fields), **dict.fromkeys(DELTA, delta_fields),
}  # fmt: skip
"""Further fields of an architecture."""
