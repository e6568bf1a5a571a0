"""config.json of Granite 3, dense and with experts -> ModelConfig. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_families import parse_gqa, plain_experts
from moe_engine.models.config_fields import Fields
from moe_engine.models.formats.fused_blocks import common_experts


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
