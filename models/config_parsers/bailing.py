"""config.json of Ling 3.0, of Ling 2.6 and Ring 2.5 (all `bailing_hybrid`), and of Ling and Ring 2.0 -> ModelConfig.
Imports no torch.

Published files and those that transformers saves name fields differently: both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.checkpoint_names.ling_names import grouped_name, inner_name
from moe_engine.models.checkpoint_names.names import renamed_modules
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.families import (
    check_joined,
    deepseek_moe_layers,
    layer_limits,
    parse_deepseek,
    parse_deepseek_moe,
    parse_gqa,
    rotary_width,
)
from moe_engine.models.config_parsers.kimi_linear import FULL, LINEAR, PUBLISHED, checked_kinds, decay_bound, renamed
from moe_engine.models.config_sections.fields import Fields, parse_rope
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.state import DeltaConfig

_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_UNSUPPORTED = (
    "mtp_use_kda", "pregate_inference", "scale_router_input", "up_proj_norm", "use_bias", "use_kda_lora",
    "use_mla_nope", "use_nGPT", "use_qkv_bias", "value_norm",
)  # fmt: skip
"""Switches of published files that no released model sets."""
_HEAD_WISE = "head_wise"
_SCORES = {"scoring_func": "sigmoid", "score_function": "sigmoid"}
_SERVED = {"gated_attention_proj_granularity_type": _HEAD_WISE} | _SCORES
_SERVED_V2_5 = _SCORES | {
    "use_qk_norm": True, "linear_silu": False, "use_linear_silu": False, "linear_rope": True, "attention_bias": False,
    "topk_method": "noaux_tc",
}  # fmt: skip
"""Readers of Ling 2.6 differ in what `linear_silu` applies to."""
_V2_5 = "BailingMoeV2_5ForCausalLM"


_SERVED_V2 = _SCORES | {
    "use_qk_norm": True, "use_bias": False, "norm_topk_prob": True, "use_sliding_window": False,
    "topk_method": "noaux_tc", "moe_router_enable_expert_bias": True,
}  # fmt: skip


def parse_bailing_v2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Ling 2.0 and Ring 2.0: GLM-4.5's layers with DeepSeek V3's groups of experts, q, k and v joined in the files."""
    fields.check_served(_SERVED_V2)
    check_joined(fields)
    read = bailing_v2_fields(fields)
    moe = parse_deepseek_moe(read)
    layers, bias = deepseek_moe_layers(read, moe), read.flag("use_qkv_bias")
    config = parse_gqa(read, generation, moe, layers, qk_norm="head", qkv_bias=bias, o_bias=False)
    return replace(config, moe=_with_own_shared(read, moe), raw=fields.raw)


def bailing_v2_fields(fields: Fields) -> Fields:
    """The fields under DeepSeek's names."""
    raw = renamed(fields, PUBLISHED) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return Fields(_with_own_widths(fields, raw, grouped_name), fields.source)


def bailing_fields(fields: Fields) -> Fields:
    """The fields under the names of DeepSeek and of Qwen3-Next, with the kind of each layer."""
    names = PUBLISHED | {"num_mtp_layers": "num_nextn_predict_layers", "score_function": "scoring_func"}
    raw = renamed(fields, names)
    heads = fields.integer("linear_num_heads", None) or fields.integer("num_attention_heads")
    # transformers saves the rotary width as head_dim
    width = fields.integer("linear_head_dim", None) or fields.integer("head_dim", 128)
    raw |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
    raw |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width)
    if _V2_5 in (fields.raw.get("architectures") or ()):
        raw["linear_gates"] = 0
    else:
        taps = fields.integer("short_conv_kernel_size", None, minimum=2)
        raw["linear_conv_kernel_dim"] = taps or fields.integer("linear_conv_kernel_dim", 4, minimum=2)
        raw = {"no_kda_lora": True, "gated_attention_proj_granularity_type": _HEAD_WISE} | raw
    raw["layer_types"] = _kinds(fields, fields.integer("num_hidden_layers"))
    return Fields(_with_own_widths(fields, raw, inner_name), fields.source)


def _with_own_widths(fields: Fields, raw: dict[str, Any], module_name: Callable[[str], str]) -> dict[str, Any]:
    """The fields with the width of all shared experts, and with the model's names of modules."""
    if (stored := fields.section("quantization_config")) is not None:
        raw["quantization_config"] = renamed_modules(stored.raw, module_name)
    if own := fields.integer("moe_shared_expert_intermediate_size", None):
        raw["shared_expert_intermediate_size"] = own * Fields(raw, fields.source).integer("n_shared_experts", 1)
    return raw


def parse_bailing_hybrid(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Ling-3.0: Kimi Delta Attention with gates from whole matrices, MLA with an output gate for each head, a grouped
    sigmoid router with a bias, an MTP layer, activations bounded in some layers."""
    _refuse_unsupported(fields, _SERVED)
    if not fields.flag("no_kda_lora", True):
        fields.fail("no_kda_lora", "is false: gates from products of low rank are not supported in this family")
    read = bailing_fields(fields)
    config = _latent(read, generation)
    assert isinstance(config.attention, MLAConfig)
    moe = config.moe
    if moe is not None:
        routed, own = (layer_limits(fields, name, config.moe_layers) for name in _LIMITS)
        moe = replace(moe, layer_limits=routed, shared_limits=own)
    heads, width = read.integer("linear_num_key_heads"), read.integer("linear_key_head_dim")
    bound = decay_bound(fields, "kda_lower_bound", -5.0) if fields.flag("kda_safe_gate", True) else 0.0
    delta = DeltaConfig(
        heads, heads, width, width, read.integer("linear_conv_kernel_dim"), joined=False, by_channel=True,
        low_rank="", bound=bound,
    )  # fmt: skip
    config = replace(config, attention=replace(config.attention, gate_width=1), moe=moe, raw=fields.raw)
    return _with_states(config, delta, read)


def parse_bailing_v2_5(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Ling 2.5 and 2.6, Ring 2.5: lightning attention with norms and rotation of q and k and a norm of groups of heads,
    MLA, a grouped sigmoid router with a bias, an MTP layer."""
    _refuse_unsupported(fields, _SERVED_V2_5)
    read = bailing_fields(Fields({"architectures": [_V2_5], **fields.raw}, fields.source))
    heads, width = read.integer("linear_num_key_heads"), read.integer("linear_key_head_dim")
    groups = fields.integer("group_norm_size", 1)
    if heads % groups:
        fields.fail("group_norm_size", f"{groups} groups do not divide the {heads} heads")
    rope = parse_rope(fields, rotary_width(fields, width, 1.0), interleaved=False, scales_softmax=False)
    delta = DeltaConfig(
        heads, heads, width, width, 0, joined=False, additive=True, step_limits=(1.0, 1.0), rope=rope,
        norm_groups=groups,
    )  # fmt: skip
    return _with_states(replace(_latent(read, generation), raw=fields.raw), delta, read)


def _latent(read: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """The model with MLA in all layers."""
    raw = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} | dict(read.raw)
    config = parse_deepseek(Fields(raw, read.source), generation)
    return replace(config, moe=_with_own_shared(read, config.moe))


def _with_own_shared(read: Fields, moe: MoEConfig | None) -> MoEConfig | None:
    if moe is None:
        return None
    return replace(moe, shared_width=read.integer("shared_expert_intermediate_size", moe.shared_width, minimum=0))


def _with_states(config: ModelConfig, delta: DeltaConfig, read: Fields) -> ModelConfig:
    states = tuple(i for i, kind in enumerate(read.raw["layer_types"]) if kind == LINEAR)
    return replace(config, delta=delta, state_groups=delta.state_groups(states))


def _kinds(fields: Fields, layers: int) -> list[str]:
    """The kind of each layer: `layer_types`, or MLA as the last layer of each group."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        group = fields.integer("layer_group_size", 6)
        if layers % group:  # the published code has MLA in the rest, transformers has not
            fields.fail("layer_group_size", f"{group} does not divide the {layers} layers; give layer_types")
        kinds = [LINEAR if (i + 1) % group else FULL for i in range(layers)]
    return checked_kinds(fields, kinds, layers, "layer_types")


def _refuse_unsupported(fields: Fields, served: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if fields.raw.get(name):
            fields.fail(name, "is set; it is not supported in this family")
    if not fields.flag("moe_router_enable_expert_bias", True):
        fields.fail("moe_router_enable_expert_bias", "is false: a router without a bias is not supported")
    fields.check_served(served)
    keys = fields.integer("num_kv_heads_for_linear_attn", 0, minimum=0)
    if keys not in (0, fields.integer("num_attention_heads")):
        fields.fail("num_kv_heads_for_linear_attn", f"{keys} is not supported: keys need as many heads as values")
