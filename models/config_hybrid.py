"""config.json of the families with a state for each request beside attention -> ModelConfig. Imports no torch.

Parsers as in `config_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import DeltaConfig, ModelConfig, MoEConfig, StateGroup
from moe_engine.models.config_families import check_moe, parse_gqa
from moe_engine.models.config_fields import Fields

_LINEAR, _FULL = "linear_attention", "full_attention"


def parse_qwen3_next(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3-Next: three gated delta nets for each layer of gated attention, a shared expert with a gate, norms whose
    weights are stored minus 1, an MTP layer."""
    moe = MoEConfig(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        shared_width=fields.integer("shared_expert_intermediate_size", 0, minimum=0),
        score="softmax",
        renormalize=fields.flag("norm_topk_prob", True),
        shared_gate=True,
    )
    check_moe(fields, moe)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
    layers = fields.integer("num_hidden_layers")
    moe_layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    raw = {"head_dim": 256} | {key: value for key, value in fields.raw.items() if value is not None}
    read = Fields(raw, fields.source)
    config = parse_gqa(read, generation, moe, moe_layers, partial_rotary=0.25, qk_norm="head", output_gate=True)
    delta, states = _delta(fields), tuple(i for i, kind in enumerate(_kinds(fields, layers)) if kind == _LINEAR)
    return replace(
        config,
        delta=delta,
        state_groups=(StateGroup(states, delta.state_parts, stores_any=True),) if states else (),
        norm_plus=1.0,
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
        raw=fields.raw,
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """The kind of each layer."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        return [_FULL if (i + 1) % interval == 0 else _LINEAR for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (_LINEAR, _FULL) for kind in kinds):
        fields.fail("layer_types", f"needs {layers} of {_LINEAR}, {_FULL}, not {kinds!r}")
    return kinds[:layers]


def _delta(fields: Fields) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key=fields.integer("linear_key_head_dim"),
        value=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", minimum=2),
    )
    if delta.value_heads % delta.key_heads:
        fields.fail(
            "linear_num_value_heads", f"{delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    return delta
