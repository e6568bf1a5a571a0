"""Mistral Large 3 and Small 4 as Mistral publishes them, without config.json: the fields of params.json under the names
of config.json, and the names of tensors, which are those of Mistral Large 4 too. Imports no torch.

Sources: vLLM (transformers_utils/configs/mistral.py, models/mistral_large_3.py), SGLang (models/mistral_large_3.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moe_engine.models.config_sections.fields import Fields, read_json

PARAMS_FILE = "params.json"
ARCHITECTURE, WITH_TOWER = "MistralLarge3ForCausalLM", "PixtralForConditionalGeneration"
"""As vLLM and SGLang name the model without and with its vision tower."""
NATIVE = "pixtral_native"
"""`vision_config.model_type` of a tower with Mistral's own names."""

_TEXT = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    **{
        name: name for name in (
            "vocab_size", "max_position_embeddings", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
            "qk_nope_head_dim", "v_head_dim", "dtype",
        )
    },
}  # fmt: skip
_MOE = {
    "route_every_n": "moe_layer_freq", "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok", "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size", "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts", "num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group",
}  # fmt: skip
_YARN = {
    "factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings", "beta": "beta_fast",
    "alpha": "beta_slow",
}  # fmt: skip
_TOWER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size",
    "rope_theta",
)  # fmt: skip
_END = 2
"""``</s>`` in all of Mistral's vocabularies; params.json names no token."""
_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def native_file(folder: Path) -> Path | None:
    """The folder's params.json, if it takes the place of config.json."""
    file = folder / PARAMS_FILE
    return file if file.is_file() and not (folder / "config.json").is_file() else None


def native_fields(file: Path) -> dict[str, Any]:
    """The fields of config.json. Raises ConfigError for models and settings that are not served."""
    fields = Fields(read_json(file), str(file))
    moe = fields.section("moe")
    if not fields.has("kv_lora_rank") or moe is None:
        fields.fail(
            "moe" if moe is None else "kv_lora_rank",
            "is missing: of Mistral's own files, models with MLA and experts are served (Large 3, Small 4); give the "
            "folder with the model's config.json",
        )
    moe.check_served({"use_load_balancing_bias": False, "renorm_strategy": "WEIGHTS"})
    text = {
        "model_type": "mistral_large_3", "architectures": [ARCHITECTURE], "eos_token_id": _END,
        **_renamed(fields.raw, _TEXT), **_renamed(moe.raw, _MOE), "rope_parameters": _rotary(fields),
    }  # fmt: skip
    quantization = fields.section("quantization") or fields.section("quantization_config")
    if quantization is not None:
        text["quantization_config"] = _quantization(quantization)
    outer = fields.section("multimodal")
    tower = fields.section("vision_encoder") if outer is None else outer.section("vision_encoder_args")
    return text if tower is None else _with_tower(text, tower)


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {new: raw[old] for old, new in names.items() if old in raw}


def _rotary(fields: Fields) -> dict[str, Any]:
    """`rope_parameters`; without `apply_scale` YaRN changes neither cosines nor the softmax scale."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope_theta", above=0)}
    yarn, scaling = fields.section("yarn"), fields.section("llama_4_scaling")
    if yarn is not None:
        found |= {"rope_type": "yarn", **_renamed(yarn.raw, _YARN)}
        scaled = yarn.flag("apply_scale", True)
        found |= {"mscale": 1.0, "mscale_all_dim": 1.0} if scaled else {"attention_factor": 1.0}
    if scaling is not None:
        name = "original_max_position_embeddings"
        length = scaling.integer(name)
        if found.setdefault(name, length) != length:
            scaling.fail(name, f"is {length}, that of yarn {found[name]}: different lengths are not supported")
        found["llama_4_scaling_beta"] = scaling.number("beta")
    return found


def _quantization(section: Fields) -> Mapping[str, Any]:
    if not section.has("qformat_weight"):  # compressed-tensors
        return with_model_names(section)
    section.check_served({"qformat_weight": "fp8_e4m3", "qscheme_act": ("TENSOR", "NO_SCALES")})
    return _FP8


def with_model_names(section: Fields) -> dict[str, Any]:
    """`quantization_config` of files with Mistral's names, with the model's names of modules too."""
    listed = (name for name in ("ignore", "modules_to_not_convert") if section.has(name))
    found = dict(section.raw)
    for name in listed:
        found = _with_names(found, name)
    groups = found.get("config_groups")
    if isinstance(groups, Mapping):
        found["config_groups"] = {name: _with_names(group, "targets") for name, group in groups.items()}
    return found


def _with_names(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The section whose list of modules has the names and patterns under both names."""
    listed = [target for target in section.get(name) or () if isinstance(target, str)]
    others = [_WORD.sub(lambda word: _PARTS.get(word[0], word[0]), target) for target in listed]
    return {**section, name: list(dict.fromkeys((*listed, *others)))}


def _with_tower(text: Mapping[str, Any], tower: Fields) -> dict[str, Any]:
    tower.check_served({"mm_projector_id": "patch_merge"})
    if not tower.flag("add_pre_mm_projector_layer_norm"):
        tower.fail("add_pre_mm_projector_layer_norm", "is false: a projector without a norm is not supported")
    image = tower.integer("image_token_id")
    return {
        "architectures": [WITH_TOWER], "model_type": "pixtral", "text_config": text, "image_token_index": image,
        "spatial_merge_size": tower.integer("spatial_merge_size"),
        "multimodal_projector_bias": tower.flag("adapter_bias"),
        "vision_config": {
            "model_type": NATIVE, "hidden_act": "silu", **_renamed(tower.raw, {name: name for name in _TOWER}),
            "row_ends": [tower.integer(f"image_{name}_token_id") for name in ("break", "end")],
            "image_size": tower.integer("max_image_size", None) or tower.integer("image_size"),
        },
    }  # fmt: skip


_EMBEDDING = "tok_embeddings.weight"
_OUTSIDE = {
    _EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "output.weight": "lm_head.weight",
    "lerope.alpha": "model.rotary_emb.alpha",
}  # fmt: skip
_PARTS = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention": "self_attn",
    "feed_forward": "mlp", "gate": "mlp.gate", "experts": "mlp.experts", "shared_experts": "mlp.shared_experts",
    "wq": "q_proj", "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wo": "o_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "qscale_weight": "weight_scale", "qscale_act": "input_scale",
}  # fmt: skip
_VISUAL = {
    "vision_encoder.": "visual.", "vision_language_adapter.w_in.": "visual.projector.linear_1.",
    "vision_language_adapter.w_out.": "visual.projector.linear_2.", "patch_merger.": "visual.projector.patch_merger.",
    "pre_mm_projector_norm.": "visual.projector.norm.",
}  # fmt: skip
"""Queries and keys of the tower keep their names: transformers' have another order of channels."""
_FACTORS = {".ssmax_scaling.s": ".softmax_scaling.scale", ".ssmax_scaling.b": ".softmax_scaling.bias"}
_WORD = re.compile(r"\w+")
_LATENT = re.compile(r"layers\.\d+\.attention\.wkv_a_with_mqa\.")


def has_native_names(names: Collection[str]) -> bool:
    """True if these are tensors of a model with MLA under Mistral's names."""
    return _EMBEDDING in names and any(_LATENT.match(name) for name in names)


def native_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    """The model's names by Mistral's, of any number of layers."""
    return {name: _native_name(name) for name in names}


def _native_name(name: str) -> str:
    for old, new in _VISUAL.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    if not name.startswith("layers."):
        return _OUTSIDE.get(name, name)
    outer, *inner = name.split(".indexer.")  # whose wq_b keeps its name
    renamed = ".".join(["model", *(_PARTS.get(part, part) for part in outer.split("."))])
    renamed = ".indexer.".join((renamed, *inner))
    factor = next((end for end in _FACTORS if renamed.endswith(end)), "")
    return renamed.removesuffix(factor) + _FACTORS.get(factor, "")
