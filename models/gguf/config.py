"""Metadata of a GGUF file -> the fields of config.json. Imports no torch.

Keys: gguf-py's constants. Fields that llama.cpp omits from the metadata are taken from the tensors: the vocabulary's
size, the tied head, and the parameters of Llama 3's rotary embedding, whose factors the file has as a tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.gguf_container import Container, read_container
from moe_engine.models.formats.gguf import matrix_types
from moe_engine.models.gguf.names import FREQUENCIES, GEMMA3, read_gguf

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    GEMMA3: ("Gemma3ForCausalLM", "gemma3_text"),
}
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
_DEEPSEEK_V3 = ("DeepseekV3ForCausalLM", "deepseek_v3")
_SIGMOID = 2
_GROUPS = {160: "V2", 256: "V3"}
"""Number of experts of the DeepSeek models whose router has groups; files of older converters do not list the
groups."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GEMMA3_27B = 62
"""Layers of the Gemma 3 whose scores are divided by the root of hidden size / heads; of others by that of a head's
width. The metadata do not contain it; llama.cpp decides so, too."""
_LOW, _HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama 3."""


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
    keys = _Keys(path, container.metadata, architecture)
    files = read_gguf(path)
    fields = _common(keys, files)
    if architecture == "deepseek2":
        fields |= _deepseek(keys, fields)
    else:
        fields |= _gqa(keys, container, fields)
    if architecture == GEMMA3:
        fields |= _gemma3(keys, fields)
    types = matrix_types({name: file.tensors[name] for name, file in files.items()})
    if types or architecture == "gpt-oss":
        fields["quantization_config"] = {"quant_method": "gguf", "types": types}
    return fields


class _Keys:
    """Metadata of the architecture, checked for presence and kind."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path, self.metadata, self.architecture = path, metadata, architecture

    def get(self, name: str, default: Any = None) -> Any:
        found = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(found, tuple):
            values = set(found)
            if len(values) != 1:
                raise ConfigError(f"{self.path}: {self.architecture}.{name} differs between layers: not supported")
            found = values.pop()
        return found

    def need(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise ConfigError(
                f"{self.path}: has no {self.architecture}.{name}; convert the model again with a current llama.cpp"
            )
        return found


def _common(keys: _Keys, files: Mapping[str, Any]) -> dict[str, Any]:
    name, model_type = _ARCHITECTURES[keys.architecture]
    table = files.get("model.embed_tokens.weight")
    if table is None:
        raise ConfigError(f"{keys.path}: has no token_embd.weight: no file of a language model")
    ends = [keys.metadata.get(f"tokenizer.ggml.{end}") for end in _ENDS]
    output = files.get("model.layers.0.self_attn.o_proj.weight")
    stored = "" if output is None else output.tensors["model.layers.0.self_attn.o_proj.weight"].dtype
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": table.tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.need("block_count"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_attention_heads": keys.need("attention.head_count"),
        "num_key_value_heads": keys.get("attention.head_count_kv"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in files,
        "bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "torch_dtype": {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16"),
    }


def _gqa(keys: _Keys, container: Container, common: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"head_dim": keys.get("attention.key_length")}
    if found["head_dim"] != keys.get("attention.value_length", found["head_dim"]):
        raise ConfigError(f"{keys.path}: heads of different widths for keys and values are not supported")
    width = found["head_dim"] or common["hidden_size"] // common["num_attention_heads"]
    if keys.get("rope.dimension_count", width) != width:
        raise ConfigError(f"{keys.path}: {keys.architecture}.rope.dimension_count is not the width of a head, {width}")
    if keys.architecture == "llama":
        biased = any(info.name == "blk.0.attn_q.bias" for info in container.tensors)
        found["attention_bias"] = biased
    experts = keys.get("expert_count", 0)
    if experts and keys.architecture == "llama":
        name, model_type = _MIXTRAL
        found |= {"architectures": [name], "model_type": model_type, "num_local_experts": experts}
    elif experts and keys.architecture == "gpt-oss":
        found |= {"num_local_experts": experts, "sliding_window": keys.need("attention.sliding_window")}
        found["intermediate_size"] = keys.need("expert_feed_forward_length")
    elif experts:
        found |= {"num_experts": experts, "norm_topk_prob": True, "decoder_sparse_step": 1}
        found["moe_intermediate_size"] = keys.need("expert_feed_forward_length")
        dense = (info.name for info in container.tensors if info.name.endswith(".ffn_gate.weight"))
        found["mlp_only_layers"] = [int(name.split(".")[1]) for name in dense]
    if experts:
        found["num_experts_per_tok"] = keys.need("expert_used_count")
    found["rope_scaling"] = _scaling(keys) or _llama3(keys, container, common["rope_theta"], width)
    if keys.architecture == "gpt-oss" and found["rope_scaling"]:
        found["rope_scaling"]["truncate"] = False  # of the published model; the metadata do not contain it
    return found


def _gemma3(keys: _Keys, common: Mapping[str, Any]) -> dict[str, Any]:
    heads, layers = common["num_attention_heads"], common["num_hidden_layers"]
    width = common["head_dim"] or common["hidden_size"] // heads
    window = keys.get("attention.sliding_window") or None
    pattern = keys.metadata.get(f"{GEMMA3}.attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int | tuple) or not pattern:
        name = f"{GEMMA3}.attention.sliding_window_pattern"
        raise ConfigError(f"{keys.path}: {name} {pattern!r:.60} is no period of layers and no list of them")
    windowed = pattern if isinstance(pattern, tuple) else [(i + 1) % pattern != 0 for i in range(layers)]
    return {
        "query_pre_attn_scalar": common["hidden_size"] // heads if layers == _GEMMA3_27B else width,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if own and window else "full_attention" for own in windowed],
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "norm_plus": 0.0,  # the converter has added 1 to the norms
    }


def _deepseek(keys: _Keys, common: Mapping[str, Any]) -> dict[str, Any]:
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
        "rope_scaling": _scaling(keys),
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
    return found | {
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", sigmoid)),
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": method,
        "n_group": groups or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
    }


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """`rope_scaling` from the metadata."""
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{keys.path}: {keys.architecture}.rope.scaling.type {kind!r} is not supported")
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.need("rope.scaling.factor")}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = keys.need("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (value := keys.get(f"rope.scaling.{theirs}")) is not None:
            found[ours] = value
    if multiplier := keys.get("rope.scaling.yarn_log_multiplier"):
        found["mscale"] = found["mscale_all_dim"] = round(10 * multiplier, 6)
    return found


def _llama3(keys: _Keys, container: Container, theta: float, width: int) -> dict[str, Any] | None:
    """Llama 3's settings from the factors by which the file's tensor divides frequencies.

    A frequency with w tokens a turn is kept for w < original / 4, divided by `factor` for w > original, and
    interpolated between them: one interpolated factor gives `original`, and all others must agree.
    """
    factors = _frequencies(container)
    if factors is None:
        return None
    factor = max(factors)
    if factor == 1.0:
        return None
    turns = [2 * math.pi * theta ** (2 * i / width) for i in range(width // 2)]
    original = None
    for found, turn in zip(factors, turns):
        if 1.0 < found < factor:
            smooth = (1 / found - 1 / factor) / (1 - 1 / factor)
            original = round(turn * (_LOW + smooth * (_HIGH - _LOW)))
            break
    if original is not None and len(factors) == len(turns):
        wanted = [_factor_of(turn, factor, original) for turn in turns]
        if all(abs(a - b) <= 2e-3 * b for a, b in zip(factors, wanted)):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ConfigError(
        f"{keys.path}: the factors in {FREQUENCIES} are not those of Llama 3's rotary embedding, the only one that is "
        "served; use the model's safetensors"
    )


def _factor_of(turn: float, factor: float, original: int) -> float:
    if turn < original / _HIGH:
        return 1.0
    if turn > original / _LOW:
        return factor
    smooth = (original / turn - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _frequencies(container: Container) -> tuple[float, ...] | None:
    info = next((info for info in container.tensors if info.name == FREQUENCIES), None)
    if info is None:
        return None
    if info.type != 0 or len(info.shape) != 1:
        raise ConfigError(f"{container.path}: {FREQUENCIES} must be a vector of type F32")
    with container.path.open("rb") as file:
        file.seek(info.start)
        data = file.read(4 * info.shape[0])
    if len(data) < 4 * info.shape[0]:
        raise ConfigError(f"{container.path}: truncated in {FREQUENCIES}; download it again")
    return struct.unpack(f"<{info.shape[0]}f", data)
