"""config.json of the mixture-of-experts families on grouped-query attention -> ModelConfig. Imports no torch.

Parsers as in `config_families`, which has Qwen3-MoE and Mixtral; Hunyuan's are in `config_hunyuan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.dense import AFTER
from moe_engine.models.config_parsers.families import (
    check_moe,
    deepseek_moe_layers,
    parse_deepseek_moe,
    parse_gqa,
    plain_experts,
)
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.mtp import MTPForm
from moe_engine.models.formats.fused_experts import MXFP4, FusedExpertsFormat
from moe_engine.models.formats.gguf import METHOD as GGUF


def parse_minimax_m2(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """MiniMax-M2, M2.1, M2.5: q and k are normed over the whole projection, every layer is a mixture, the router has a
    bias that affects the choice only."""
    _refuse_other_minimax(fields)
    moe = plain_experts(
        fields, "num_local_experts", "intermediate_size", score="sigmoid",
        has_bias=fields.flag("use_routing_bias", True), renormalize=True,
    )  # fmt: skip
    layers = (True,) * fields.integer("num_hidden_layers")
    return parse_gqa(fields, generation, moe, layers, qk_norm="projection" if fields.flag("use_qk_norm", True) else "")


def _refuse_other_minimax(fields: Fields) -> None:
    """Raises ConfigError for settings of other MiniMax models."""
    fields.check_served({"qk_norm_type": "per_layer", "scoring_func": "sigmoid"})
    if any(kind != 1 for kind in fields.raw.get("attn_type_list") or ()):
        m1 = "those of MiniMax-M1 are served as MiniMaxM1ForCausalLM"
        fields.fail("attn_type_list", f"has layers of linear attention, which this architecture has not; {m1}")
    if fields.integer("shared_intermediate_size", 0, minimum=0):
        fields.fail("shared_intermediate_size", "is not 0: shared experts of MiniMax-Text-01 are not supported")


def parse_olmoe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """OLMoE: Qwen3-MoE with norms of q and k over the whole projection; every layer is a mixture."""
    fields.check_served({"clip_qkv": None})
    moe = plain_experts(fields, "num_experts", "intermediate_size", renormalize=fields.flag("norm_topk_prob"))
    return parse_gqa(fields, generation, moe, (True,) * fields.integer("num_hidden_layers"), qk_norm="projection")


def parse_flex_olmo(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """FlexOlmo: OLMoE with norms of results instead of norms of the residual."""
    return replace(parse_olmoe(fields, generation), result_norms=AFTER)


def parse_phi_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Phi-3.5-MoE: Mixtral with LayerNorms, biases, and the router SparseMixer, which chooses two experts."""
    fields.check_served({"num_experts_per_tok": 2})
    jitter = fields.number("router_jitter_noise", 0.01)
    moe = plain_experts(fields, "num_local_experts", "intermediate_size", score="sparsemixer", jitter=jitter)
    config = parse_gqa(fields, generation, moe, (True,) * fields.integer("num_hidden_layers"))
    return replace(config, layer_norm=True, head_bias=fields.flag("lm_head_bias"))


def parse_gpt_oss(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """gpt-oss: sinks, windows in every second layer, biases everywhere, a softmax over the chosen experts' logits."""
    moe = plain_experts(
        fields, "num_local_experts", "intermediate_size", has_bias=True, renormalize=True, bias_on_logits=True,
        biased=True, alpha=fields.number("swiglu_alpha", 1.702, above=0),
        limit=fields.number("swiglu_limit", 7.0, above=0),
    )  # fmt: skip
    raw = {"attention_bias": True, "use_sliding_window": True} | dict(gpt_oss_fields(fields).raw)
    quantization = fields.section("quantization_config")
    method = "" if quantization is None else quantization.text("quant_method")
    if method == MXFP4:
        raw.pop("quantization_config")
    elif quantization is not None and method != GGUF:
        quantization.fail(
            "quant_method",
            f"{method!r} is not served for gpt-oss; use its MXFP4 or bfloat16 checkpoint, or a GGUF file",
        )
    read = Fields(raw, fields.source)
    layers = (True,) * fields.integer("num_hidden_layers")
    config = parse_gqa(read, generation, moe, layers, sinks=True)
    if method == GGUF:
        return config
    return replace(config, weight_format=FusedExpertsFormat(moe.num_experts, method), raw=fields.raw)


def gpt_oss_fields(fields: Fields) -> Fields:
    """The fields with the default of transformers for `layer_types`."""
    kinds = ["sliding_attention", "full_attention"] * (layers := fields.integer("num_hidden_layers"))
    return Fields({**fields.raw, "layer_types": fields.raw.get("layer_types") or kinds[:layers]}, fields.source)


def parse_glm4_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: DeepSeek's router and shared expert, biases of q, k and v, half of
    each head rotated, and norms of q and k in the large models."""
    moe = parse_deepseek_moe(fields)
    return parse_gqa(
        fields,
        generation,
        moe,
        deepseek_moe_layers(fields, moe),
        partial_rotary=0.5,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=False,
        qk_norm="head" if fields.flag("use_qk_norm") else "",
    )


def parse_solar_open(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Solar Open: GLM-4.5's mixture in every layer, whole heads rotated."""
    if (moe := parse_deepseek_moe(fields)) is None:
        fields.fail("n_routed_experts", "is missing; add it, or pass it with --json-model-override-args")
    layers, bias = (True,) * fields.integer("num_hidden_layers"), fields.flag("attention_bias")
    return parse_gqa(fields, generation, moe, layers, qkv_bias=bias, o_bias=False)


def parse_dots1(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """dots.llm1: Qwen3's attention, DeepSeek V3's router and shared experts."""
    raw = {"use_sliding_window": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    read = Fields({**fields.raw, **raw}, fields.source)
    moe = parse_deepseek_moe(read)
    config = parse_gqa(read, generation, moe, deepseek_moe_layers(read, moe), qk_norm="head")
    return replace(config, raw=fields.raw)


def parse_ernie(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """ERNIE 4.5: rotary pairs (2j, 2j+1), a tied head unless the file says otherwise."""
    return _ernie(fields, generation, None, ())


def ernie_moe_fields(fields: Fields) -> Fields:
    """The fields with those of the mixture under the names of Qwen's and DeepSeek's mixtures."""
    shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    mixture = {
        "num_experts": fields.integer("moe_num_experts"),
        "num_experts_per_tok": fields.integer("moe_k"),
        "shared_expert_intermediate_size": fields.integer("moe_intermediate_size") * shared,
        "first_k_dense_replace": fields.integer("moe_layer_start_index", 1, minimum=0),
    }
    return Fields({**fields.raw, **mixture}, fields.source)


def parse_ernie_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """ERNIE 4.5 with experts: a softmax over all experts, whose bias affects the choice only; an MTP layer with
    a dense MLP."""
    mixture, layers = ernie_moe_fields(fields), fields.integer("num_hidden_layers")
    moe = MoEConfig(
        num_experts=mixture.integer("num_experts"),
        top_k=mixture.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        shared_width=mixture.integer("shared_expert_intermediate_size", minimum=0),
        score="softmax",
        has_bias=fields.flag("moe_use_aux_free", True),
        renormalize=True,
    )
    check_moe(fields, moe)
    first, step = mixture.integer("first_k_dense_replace", minimum=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = layers - 1 if last == -1 else last
    return _ernie(fields, generation, moe, tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)))


def _ernie(
    fields: Fields, generation: Mapping[str, Any], moe: MoEConfig | None, moe_layers: tuple[bool, ...]
) -> ModelConfig:
    if fields.flag("use_bias"):
        fields.fail("use_bias", "is true: biases are not supported for this model")
    config = parse_gqa(fields, generation, moe, moe_layers, interleaved=True)
    return replace(config, mtp=MTPForm(dense=moe is not None and not moe_layers[0]))
