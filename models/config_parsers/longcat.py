"""config.json of LongCat-Flash -> ModelConfig. Imports no torch.

A layer of the file has two attentions, two dense MLPs and one mixture: it is two layers here (`ModelConfig.shortcut`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.checkpoint_names.longcat_names import inner_name
from moe_engine.models.checkpoint_names.names import renamed_modules
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.families import parse_deepseek
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.mtp import MTPForm

_NAMES = {
    "ffn_hidden_size": "intermediate_size", "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}  # fmt: skip
"""Fields of the file, and what DeepSeek calls them."""
_SERVED = {"zero_expert_type": "identity", "attention_method": "MLA", "router_bias": False, "norm_topk_prob": False}
_REFUSED = ("use_ngram_embedding", "ngram_vocab_size_ratio", "oe_vocab_size_ratio", "index_topk", "fa_interval")
"""Fields of LongCat models with other layers or embeddings (Lite, 2.0)."""


def longcat_fields(fields: Fields) -> Fields:
    """The fields under the names of DeepSeek, with two layers for each of the file. `num_hidden_layers`, if the file
    has it, is the number of its layers or that of their halves."""
    raw = dict(fields.raw)
    layers = fields.integer("num_layers", None) or fields.integer("num_hidden_layers")
    raw |= {new: raw[old] for old, new in _NAMES.items() if raw.get(old) is not None}
    raw |= {"num_hidden_layers": 2 * layers, "first_k_dense_replace": 0, "n_shared_experts": 0}
    raw |= {"topk_method": "noaux_tc", "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1}
    raw |= {"topk_group": 1, "num_nextn_predict_layers": fields.integer("num_nextn_predict_layers", 1, minimum=0)}
    if (stored := fields.section("quantization_config")) is not None:
        raw["quantization_config"] = renamed_modules(stored.raw, inner_name)
    return Fields(raw, fields.source)


def longcat_facts(fields: Fields) -> Fields:
    """`longcat_fields` for the planner: the first layer of a pair has experts with its MLP as a shared expert; a token
    uses those of its experts that are no zero experts, which is their part of all experts on average."""
    read = longcat_fields(fields)
    experts, zero = fields.integer("n_routed_experts"), fields.integer("zero_expert_num", 0, minimum=0)
    return Fields({
        **read.raw, "mlp_layer_types": ["sparse", "dense"] * (read.integer("num_hidden_layers") // 2),
        "shared_expert_intermediate_size": read.integer("intermediate_size"),
        "num_experts_per_tok": max(1, round(read.integer("num_experts_per_tok") * experts / (experts + zero))),
    }, fields.source)  # fmt: skip


def parse_longcat_flash(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """LongCat-Flash: MLA with scaled latents, a softmax router with a bias over routed and zero experts."""
    fields.check_served(_SERVED)
    for name in _REFUSED:
        if fields.raw.get(name):
            fields.fail(name, "is set; it is not supported: LongCat-Flash has no such layers")
    read = longcat_fields(fields)
    config = parse_deepseek(read, generation)
    attention, moe = config.attention, config.moe
    assert isinstance(attention, MLAConfig)
    if moe is None:
        fields.fail("n_routed_experts", "is missing; add it, or pass it with --json-model-override-args")
    zero = fields.integer("zero_expert_num", 0, minimum=0)
    queries = config.hidden_size / attention.q_lora_rank if attention.q_lora_rank else 1.0
    scaled = fields.flag("mla_scale_q_lora", True), fields.flag("mla_scale_kv_lora", True)
    rope = replace(config.rope, softmax_factor=config.rope.softmax_factor * (queries**0.5 if scaled[0] else 1.0))
    latent = (config.hidden_size / attention.kv_lora_rank) ** 0.5 if scaled[1] else 1.0
    return replace(
        config,
        attention=replace(attention, latent_factor=latent),
        rope=rope,
        moe=replace(moe, num_zero=zero),
        moe_layers=(True, False) * (config.num_layers // 2),
        shortcut=True,
        mtp=MTPForm(dense=True),
        raw=fields.raw,
    )
