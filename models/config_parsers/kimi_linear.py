"""config.json of Kimi Linear and Kimi K3 -> ModelConfig. Imports no torch.

Published files and those that transformers saves name fields differently: both are read. Kimi K3 has its text model in
`text_config` next to the `vision_config` of its tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.families import parse_deepseek
from moe_engine.models.config_parsers.kimi import kimi_k3_vision
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.state import DeltaConfig

PUBLISHED = {
    "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings",
    "moe_router_activation_func": "scoring_func",
}  # fmt: skip
"""Fields under DeepSeek's names."""
_RENORMALIZED = ("moe_renormalize", "norm_topk_prob")
LINEAR, FULL = "linear_attention", "full_attention"


def kimi_linear_fields(fields: Fields) -> Fields:
    """The fields under the names of DeepSeek and of Qwen3-Next, with the kind of each layer."""
    raw = renamed(fields, PUBLISHED)
    own = fields.section("linear_attn_config") or Fields({}, fields.source)
    raw |= delta_fields(fields, own, heads=32)
    raw["layer_types"] = _kinds(fields, own, fields.integer("num_hidden_layers"))
    raw["use_full_rank_gate"] = own.flag("use_full_rank_gate")
    return Fields(raw, fields.source)


def renamed(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that have a value, under other names; the flag of renormalized weights is false if it is null."""
    raw = {names.get(name, name): value for name, value in fields.present().items()}
    if any(name in fields.raw for name in _RENORMALIZED):
        raw.setdefault(_RENORMALIZED[1], False)
    return raw


def delta_fields(fields: Fields, own: Fields, heads: int) -> dict[str, Any]:
    """Fields of Kimi Delta Attention under the names of Qwen3-Next.

    Args:
        own: `linear_attn_config` of published files; files that transformers saves have `linear_*` in `fields`.
        heads: where neither has their number.
    """
    heads = own.integer("num_heads", None) or fields.integer("linear_num_heads", heads)
    width = own.integer("head_dim", None) or fields.integer("linear_head_dim", 128)
    taps = own.integer("short_conv_kernel_size", None, minimum=2)
    return {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
        "linear_conv_kernel_dim": taps or fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    }


def parse_kimi_linear(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Kimi-Linear-48B-A3B: Kimi Delta Attention, MLA without positions, a sigmoid router with a bias. Kimi K3: also an
    output gate of MLA, bounded decays, routed experts in a latent space, SiTU, attention over blocks of the residual.
    """
    if not fields.flag("mla_use_nope", True):
        fields.fail("mla_use_nope", "is false: MLA with rotated keys is not supported in this family")
    raw = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} | dict(kimi_linear_fields(fields).raw)
    beta, limit = _situ(fields)
    if beta:
        raw["hidden_act"] = "silu"
    read = Fields({**raw, "rope_scaling": None, "rope_parameters": None}, fields.source)
    if read.text("scoring_func") != "sigmoid":
        fields.fail("moe_router_activation_func", f"{raw['scoring_func']!r} is not supported; supported: sigmoid")
    config = parse_deepseek(read, generation)
    heads, width = read.integer("linear_num_key_heads"), read.integer("linear_key_head_dim")
    taps = read.integer("linear_conv_kernel_dim")
    low_rank = "f" if raw["use_full_rank_gate"] else "fg"
    bound = decay_bound(fields.section("linear_attn_config") or Fields({}, fields.source), "gate_lower_bound")
    delta = DeltaConfig(
        heads, heads, width, width, taps, joined=False, by_channel=True, low_rank=low_rank, bound=bound
    )  # fmt: skip
    assert isinstance(config.attention, MLAConfig)
    gate = config.attention.v_head_dim if fields.flag("mla_use_output_gate") else 0
    moe = config.moe
    if moe is not None:
        latent = fields.integer("routed_expert_hidden_size", None) or 0
        norm = bool(latent) and fields.flag("latent_moe_use_norm")
        moe = replace(moe, beta=beta, limit=limit, latent=latent, latent_norm=norm)
    elif beta:
        fields.fail("hidden_act", "'situ' is not supported without experts")
    section = fields.section("vision_config")
    states = tuple(i for i, kind in enumerate(raw["layer_types"]) if kind == LINEAR)
    return replace(
        config,
        attention=replace(config.attention, gate_width=gate),
        moe=moe,
        residual_block=fields.integer("attn_res_block_size", None) or 0,
        rope=replace(config.rope, kind="none"),
        delta=delta,
        vision=None if section is None else kimi_k3_vision(fields, section, config.hidden_size),
        state_groups=delta.state_groups(states),
        raw=fields.raw,
    )


def _situ(fields: Fields) -> tuple[float, float]:
    """SiTU's bounds of gate and of up; (0, 0): the activation is silu. A bound of up may be missing."""
    if fields.text("hidden_act", "silu") != "situ":
        return 0.0, 0.0
    beta = fields.number("activation_situ_beta", None, above=0)
    limit = fields.number("activation_situ_linear_beta", None, above=0)
    return float(beta or 1.0), float(limit or 0.0)


def decay_bound(fields: Fields, name: str, default: float | None = None) -> float:
    """The bound of the log decay; 0: it has none. Raises ConfigError: it is not negative."""
    bound = fields.number(name, default)
    if bound is not None and bound >= 0:
        fields.fail(name, f"must be negative, found {bound:g}")
    return float(bound or 0.0)


def _kinds(fields: Fields, own: Fields, layers: int) -> list[str]:
    """The kind of each layer: `layer_types`, or the published lists, whose first layer is 1."""
    kinds = fields.raw.get("layer_types")
    if kinds is None and own.has("full_attn_layers") and own.has("kda_layers"):
        published = dict.fromkeys(own.raw["full_attn_layers"], FULL) | dict.fromkeys(own.raw["kda_layers"], LINEAR)
        kinds = [published.get(i + 1) for i in range(layers)]
    if kinds is None:
        kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    return checked_kinds(fields, kinds, layers, "layer_types, linear_attn_config")


def checked_kinds(fields: Fields, kinds: Any, layers: int, names: str) -> list[str]:
    """The kinds of the layers. Raises ConfigError with the `names` of the fields: unknown kinds, or no layer of MLA."""
    if not isinstance(kinds, list) or len(kinds) < layers or not all(kind in (LINEAR, FULL) for kind in kinds):
        fields.fail(names, f"give {layers} layers one of {LINEAR}, {FULL}, not {kinds!r}")
    if FULL not in kinds[:layers]:
        fields.fail(names, "have no layer of MLA; a model without KV is not supported")
    return kinds[:layers]
