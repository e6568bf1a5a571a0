"""config.json of Granite 3 (dense, with experts), of Granite with windows and sinks, and of Granite 4 (with Mamba2)
-> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import FULL, WINDOWED, parse_gqa, plain_experts
from moe_engine.models.config_parsers.nemotron_h import mamba_config
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.fused_blocks import common_experts

_STATE = "linear_attention"
_KINDS = {"mamba": _STATE, "attention": FULL, _STATE: _STATE, FULL: FULL}
"""Kinds of layers in published files, and in those that transformers saves."""


def parse_granite(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Granite 3: Llama with factors of embeddings, results, scores and logits."""
    return with_factors(fields, parse_gqa(fields, generation, None, ()))


def parse_granite_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Granite 3 with experts: a softmax over the chosen experts' logits, a shared expert in some models."""
    shared = fields.integer("shared_intermediate_size", 0, minimum=0)
    moe = plain_experts(fields, "num_local_experts", "intermediate_size", shared_width=shared, renormalize=True)
    config = parse_gqa(fields, generation, moe, (True,) * fields.integer("num_hidden_layers"))
    format = common_experts(config.weight_format, moe.num_experts)
    return with_factors(fields, replace(config, weight_format=format))


def parse_granite_swa(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Granite 3, dense or with experts, with sinks, windows in three of four layers, and a rotary base for each layer,
    of which two may differ; 0: no positions."""
    parse = parse_granite_moe if fields.has("num_local_experts") else parse_granite
    config = parse(granite_swa_fields(fields), generation)
    attention, rope = config.attention, config.rope
    assert isinstance(attention, GQAConfig)
    attention = replace(attention, sinks=True)
    config = replace(config, attention=attention, raw=fields.raw)
    thetas = fields.items("layer_rope_theta", *[rope.theta] * config.num_layers)
    bases = sorted(set(thetas), key=lambda base: (thetas.count(base), base))
    if len(thetas) != config.num_layers or not all(isinstance(base, int | float) and base >= 0 for base in bases):
        fields.fail("layer_rope_theta", f"needs {config.num_layers} numbers of at least 0, found {thetas!r}")
    if len(bases) > 2:
        fields.fail("layer_rope_theta", f"has {len(bases)} bases; more than two are not supported")
    ropes = [
        replace(rope, theta=float(base)) if base
        else replace(rope.still(attention.head_dim), softmax_factor=rope.softmax_factor)
        for base in bases
    ]  # fmt: skip
    if len(bases) == 1:
        return replace(config, rope=ropes[0])
    layers = tuple(i for i, base in enumerate(thetas) if base == bases[0])
    return replace(config, rope=ropes[1], other_layers=OtherLayers(layers, attention, ropes[0]))


def granite_swa_fields(fields: Fields) -> Fields:
    """The fields under the names of other families, with the kind of each layer."""
    layers, read = fields.integer("num_hidden_layers"), granite_facts(fields)
    kinds = fields.by_layer("layer_types", layers, (FULL, WINDOWED))
    kinds = kinds or [WINDOWED if i % 4 else FULL for i in range(layers)]
    return Fields({**read.raw, "layer_types": kinds, "use_sliding_window": True}, fields.source)


def parse_granite_hybrid(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Granite 4: Mamba2 in most layers or in none, attention without positions or with them, experts with a shared one
    or a dense MLP."""
    fields.check_served({"mamba_n_groups": 1, "mamba_proj_bias": False, "normalization_function": "rmsnorm"})
    read = granite_facts(fields)
    kinds, layers = read.raw["layer_types"], fields.integer("num_hidden_layers")
    if FULL not in kinds:
        fields.fail("layer_types", "has no layer of attention; a model without KV is not supported")
    width = fields.integer("shared_intermediate_size", 1024)
    if fields.integer("num_local_experts", 0, minimum=0):
        config = parse_granite_moe(read, generation)
    else:
        dense = Fields({**read.raw, "intermediate_size": width}, fields.source)
        config = with_factors(fields, parse_gqa(dense, generation, None, (False,) * layers))
    states = tuple(i for i, kind in enumerate(kinds) if kind == _STATE)
    delta = replace(mamba_config(read), eps=fields.number("rms_norm_eps", 1e-6))
    rotates = fields.choice("position_embedding_type", None, "rope", "nope") == "rope"
    return replace(
        config,
        rope=config.rope if rotates else replace(config.rope, kind="none", attention_factor=1.0),
        delta=delta if states else None,
        state_groups=delta.state_groups(states),
        raw=fields.raw,
    )


def granite_facts(fields: Fields) -> Fields:
    """The fields of Granite 3 and 4 under the names of other families."""
    raw, layers = dict(fields.raw), fields.integer("num_hidden_layers")
    raw["shared_expert_intermediate_size"] = fields.integer("shared_intermediate_size", 0, minimum=0)
    if fields.text("model_type", "") != "granitemoehybrid":
        return Fields(raw, fields.source)
    kinds = fields.by_layer("layer_types", layers, _KINDS) or fields.by_layer("layers_block_type", layers, _KINDS)
    inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    heads, head = fields.integer("mamba_n_heads", 128), fields.raw.get("mamba_d_head", "auto")
    raw |= {
        "layer_types": [_STATE] * layers if kinds is None else [_KINDS[kind] for kind in kinds],
        "n_groups": 1, "mamba_num_heads": heads, "ssm_state_size": fields.integer("mamba_d_state", 256),
        "mamba_head_dim": inner // heads if head == "auto" else fields.integer("mamba_d_head"),
        "conv_kernel": fields.integer("mamba_d_conv", 4, minimum=2),
        "use_conv_bias": fields.flag("mamba_conv_bias", True),
    }  # fmt: skip
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = (1, heads, raw["ssm_state_size"], raw["mamba_head_dim"])
    raw |= {f"linear_{name}": size for name, size in zip(names, sizes)} | {"linear_gates": 1}
    if not fields.integer("num_local_experts", 0, minimum=0):
        raw |= {"num_local_experts": None, "intermediate_size": fields.integer("shared_intermediate_size", 1024)}
    return Fields(raw, fields.source)


def with_factors(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The model with Granite's factors. The residual is that of the model divided by the factor of results, so that
    results are added as they are: norms read it with an epsilon divided by the factor's square."""
    attention = config.attention
    assert isinstance(attention, GQAConfig)
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, results, scores, logits = (fields.number(name, 1.0, above=0) for name in names)
    return replace(
        config,
        rope=replace(config.rope, softmax_factor=scores * attention.head_dim**0.5),
        norm_eps=config.norm_eps / results**2,
        embed_scale=embedding / results,
        residual_scale=results,
        logit_scale=1 / logits,
    )
