"""config.json of Step 3.5 and of Step 3.7's text model -> ModelConfig. Imports no torch.

Layers with a window have more query heads, and a rotary embedding of their own. The published file has lists by layer,
in which MTP layers may follow; transformers' has settings by kind of layer. `step_fields` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.checkpoint_names.names import renamed_modules
from moe_engine.models.checkpoint_names.step_names import inner_name
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_parsers.families import (
    deepseek_moe_layers,
    layer_limits,
    parse_deepseek_moe,
    parse_gqa,
    with_other_windows,
)
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.mtp import MTPForm
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.formats.fused_experts import FusedExpertsFormat

_FULL, _WINDOW = "full_attention", "sliding_attention"
_PUBLISHED = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
"""Published names, and transformers'."""
_DEFAULTS = {
    "use_head_wise_attn_gate": True, "max_position_embeddings": 128000, "head_dim": 128, "num_experts_per_tok": 8,
    "share_expert_dim": 1280, "rms_norm_eps": 1e-5,
}  # fmt: skip
_SERVED = {
    "att_impl_type": "GQA", "use_qk_norm": True, "use_head_wise_attn_gate": True, "gating": (True, "per-head"),
    "moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True, "mlp_bias": False,
    "use_bidirectional_attention": False,
}  # fmt: skip


def parse_step(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Step 3.5 and the text model of Step 3.7: norms of weight 1 + w, a gate for each head, a sigmoid router with a
    bias, a shared expert, activations bounded in some layers. MTP layers have a window, an MLP and a head of their own.
    The vision tower is not served."""
    fields.check_served(_SERVED)
    read = step_fields(fields)
    moe = parse_deepseek_moe(read)
    if moe is None:
        fields.fail("moe_num_experts", "is missing; add it, or pass it with --json-model-override-args")
    moe_layers = deepseek_moe_layers(read, moe)
    drafts = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    each = moe_layers + (False,) * drafts
    limits = (layer_limits(fields, name, each) for name in ("swiglu_limits", "swiglu_limits_shared"))
    routed, shared = (found[: len(moe_layers)] for found in limits)
    moe = replace(moe, shared_width=read.integer("share_expert_dim"), layer_limits=routed, shared_limits=shared)
    bias = read.flag("attention_bias")
    config = parse_gqa(read, generation, moe, moe_layers, qkv_bias=bias, o_bias=bias, qk_norm="head", gate_width=1)
    whole = config.attention
    assert isinstance(whole, GQAConfig)
    if read.number("query_pre_attn_scalar", whole.head_dim) != whole.head_dim:
        fields.fail("query_pre_attn_scalar", f"is not head_dim {whole.head_dim}: it is not supported")
    format = with_fused_experts(config.weight_format, moe.num_experts, transposed=False, joined=False)
    if not format.name:
        format = FusedExpertsFormat(moe.num_experts, alternating=False, transposed=False, optional=True, joined=False)
    config = replace(config, norm_plus=1.0, weight_format=format, raw=fields.raw, mtp=_mtp_form(fields, config, drafts))
    if not config.windows:
        return config
    heads, groups = read.integer("swa_num_attention_heads"), read.integer("swa_num_key_value_heads")
    if heads % groups:
        fields.fail("attention_other_setting", f"has {groups} KV heads, which do not divide its {heads} heads")
    return with_other_windows(config, read, read.raw["swa_rope"], num_heads=heads, num_kv_heads=groups)


def _mtp_form(fields: Fields, config: ModelConfig, count: int) -> MTPForm:
    """The kinds of MTP layers follow those of the model's layers, or have fields of their own."""
    drafts = range(config.num_layers, config.num_layers + count)
    listed = fields.raw.get("mtp_layer_types") or (fields.raw.get("layer_types") or [])[drafts.start : drafts.stop]
    mlps = fields.raw.get("mtp_mlp_layer_types") or _mixtures(fields, drafts.stop)[drafts.start :]
    if count and (not config.windows or any(kind != _WINDOW for kind in listed)):
        fields.fail("layer_types", "has MTP layers without a window: they are not supported")
    if not isinstance(mlps, list):
        fields.fail("mtp_mlp_layer_types", f"must be a list, found {mlps!r}")
    if "sparse" in mlps:
        fields.fail("moe_layers_enum", "has an MTP layer: MTP layers with experts are not supported")
    like = next(iter(config.windowed_layers), None)
    return MTPForm(like, dense=True, own_heads=True, reads_residual=True)


def step_fields(fields: Fields) -> Fields:
    """The fields of either dialect under the names of DeepSeek and of MiMo-V2-Flash, with transformers' defaults.
    `rope_scaling` has the rotary settings of layers without a window, `swa_rope` of the others."""
    raw = _DEFAULTS | {_PUBLISHED.get(key, key): value for key, value in fields.raw.items() if value is not None}
    named = Fields(raw, fields.source)
    layers = fields.integer("num_hidden_layers")
    kinds = raw.get("layer_types") or [_FULL] * layers
    raw |= {
        "layer_types": kinds[:layers] if isinstance(kinds, list) else kinds,
        "mlp_layer_types": raw.get("mlp_layer_types") or _mixtures(fields, layers),
        "use_sliding_window": True, "hidden_act": "silu", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 0,
        "routed_scaling_factor": fields.number("moe_router_scaling_factor", 1.0),
        "shared_expert_intermediate_size": named.integer("share_expert_dim"),
        "rope_scaling": _rope(named, _FULL), "swa_rope": _rope(named, _WINDOW),
    }  # fmt: skip
    raw.pop("rope_theta", None)
    raw.pop("rope_parameters", None)
    other = named.section("attention_other_setting") or Fields({}, fields.source)
    heads = fields.integer("num_sliding_attention_heads", None) or other.integer("num_attention_heads", None)
    groups = other.integer("num_attention_groups", None) or named.integer("num_key_value_heads")
    raw |= {"swa_num_attention_heads": heads or named.integer("num_attention_heads")}
    raw |= {"swa_num_key_value_heads": groups}
    if (stored := named.section("quantization_config")) is not None:
        raw["quantization_config"] = renamed_modules(stored.raw, inner_name)
    return Fields(raw, fields.source)


def _mixtures(fields: Fields, layers: int) -> list[str]:
    """`mlp_layer_types` by the numbers of `moe_layers_enum`: a list, or text with commas."""
    listed = fields.raw.get("moe_layers_enum")
    numbers = listed.split(",") if isinstance(listed, str) else range(3, layers) if listed is None else listed
    try:
        chosen = {int(number) for number in numbers if str(number).strip()}
    except (TypeError, ValueError):
        fields.fail("moe_layers_enum", f"must be numbers of layers, found {listed!r}")
    return ["sparse" if i in chosen else "dense" for i in range(layers)]


def _rope(fields: Fields, kind: str) -> dict[str, Any]:
    """Rotary settings of a kind of layers. Of lists by layer all values of a kind are the same."""
    section = fields.section("rope_parameters")
    own = None if section is None else section.section(kind)
    if own is not None:
        return dict(own.raw)
    kinds, scaled = fields.items("layer_types"), fields.items("yarn_only_types") or [_FULL]
    scaling = fields.section("rope_scaling") if kind in scaled else None
    found = {} if scaling is None else dict(scaling.raw)
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factors", 1.0)):
        values = fields.raw.get(name)
        if isinstance(values, list):
            chosen = {repr(value): value for own, value in zip(kinds, values) if own == kind}
            if len(chosen) > 1:
                fields.fail(name, f"has {len(chosen)} values for layers of {kind}: they must be the same")
            values = next(iter(chosen.values()), None)
        found[name.removesuffix("s")] = default if values is None else values
    return found
