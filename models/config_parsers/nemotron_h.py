"""config.json of Nemotron-H and Nemotron-3 -> ModelConfig. Imports no torch.

Published files and those that transformers saves name fields differently: both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from moe_engine.kernels.gate_form import SQUARED
from moe_engine.models.checkpoint_names.nemotron_names import quantization_names
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_parsers.families import check_moe, parse_gqa
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.state import DeltaConfig

STATE, ATTENTION, EXPERTS, MLP = "M", "*", "E", "-"
_KINDS = {
    "linear_attention": STATE, "mamba": STATE, "full_attention": ATTENTION, "attention": ATTENTION, "moe": EXPERTS,
    "mlp": MLP,
}  # fmt: skip
"""Names of transformers, present and former, of the letters of published files."""
_PATTERN, _LIST = "hybrid_override_pattern", "layers_block_type"
_DRAFT = ATTENTION + EXPERTS
"""The kinds of an MTP layer."""
_SERVED = {
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False, "use_bias": False,
    "attention_bias": False, "mamba_proj_bias": False, "residual_in_fp32": False, "n_shared_experts": 1,
}  # fmt: skip


def nemotron_kinds(fields: Fields) -> str:
    """A letter for each layer. Raises ConfigError: no kinds, unknown ones, or an order that is not served."""
    name, kinds = _letters(fields, _LIST, _PATTERN)
    count = fields.integer("num_hidden_layers", len(kinds))
    if count > len(kinds):
        fields.fail(name, f"has {len(kinds)} layers, and num_hidden_layers is {count}")
    kinds = kinds[:count]
    for i, kind in enumerate(kinds):
        if kind in (EXPERTS, MLP) and (not i or kinds[i - 1] in (EXPERTS, MLP)):
            fields.fail(name, f"has a feed-forward at layer {i} behind no Mamba2 or attention, which is not supported")
    if ATTENTION not in kinds:
        fields.fail(name, "has no layer of attention; a model without KV is not supported")
    return kinds


def _letters(fields: Fields, as_list: str, as_pattern: str, default: str | None = None) -> tuple[str, str]:
    """A field that lists kinds of layers, and their letters."""
    listed, pattern = fields.raw.get(as_list), fields.text(as_pattern, default)
    if listed is None and pattern is None:
        fields.fail(as_pattern, f"is missing, and so is {as_list}; add one of them")
    if listed is not None:
        if not isinstance(listed, list) or not all(name in list(_KINDS) for name in listed):
            fields.fail(as_list, f"needs a list of {', '.join(_KINDS)}, not {listed!r}")
        return as_list, "".join(_KINDS[name] for name in listed)
    if unknown := set(str(pattern)) - set(_KINDS.values()):
        fields.fail(as_pattern, f"has unknown layers {', '.join(sorted(unknown))}; known: M, *, E, -")
    return as_pattern, str(pattern)


def _num_drafts(fields: Fields, kinds: str) -> int:
    """Number of MTP layers: attention and experts, in a model with these layers."""
    count = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    name, own = _letters(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern", _DRAFT)
    if count and (own != _DRAFT or EXPERTS not in kinds):
        fields.fail(name, f"is {own}: only MTP layers of attention and experts ({_DRAFT}), as in the model, are known")
    return count


def nemotron_fields(fields: Fields) -> Fields:
    """The fields under common names, with the modules of quantization_config as they are named here."""
    count = len(nemotron_kinds(fields))
    raw = {**fields.raw, "num_hidden_layers": count}
    raw["rms_norm_eps"] = fields.number("layer_norm_epsilon", None, above=0) or fields.number("rms_norm_eps", 1e-5)
    raw["head_dim"] = fields.integer("head_dim", None) or fields.integer("attention_head_dim", 128)
    raw |= {"rope_scaling": None, "rope_parameters": None, "hidden_act": "silu", "partial_rotary_factor": None}
    if (stored := fields.section("quantization_config")) is not None:
        drafts = fields.integer("num_nextn_predict_layers", 0, minimum=0)
        raw["quantization_config"] = quantization_names(stored.raw, count, drafts)
    return Fields(raw, fields.source)


def parse_nemotron_h(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Nemotron-3 (Nano, Super, Ultra) and Nemotron-H: Mamba2, attention without positions, a sigmoid router with a bias
    and a shared expert, relu2 without gates. An MTP layer is attention with experts after it."""
    fields.check_served(_SERVED)
    if fields.has("sliding_window"):
        fields.fail("sliding_window", "is not supported in this family")
    kinds, read = nemotron_kinds(fields), nemotron_fields(fields)
    moe = _experts(read) if EXPERTS in kinds else None
    config = parse_gqa(read, generation, moe, tuple(kind == EXPERTS for kind in kinds), qkv_bias=False, o_bias=False)
    states = tuple(i for i, kind in enumerate(kinds) if kind == STATE)
    delta = mamba_config(read)
    return replace(
        config,
        rope=replace(config.rope, kind="none"),
        delta=delta if states else None,
        state_groups=delta.state_groups(states),
        windows=(),
        activation=SQUARED,
        lone_feed_forwards=tuple(i for i, kind in enumerate(kinds) if kind in (EXPERTS, MLP)),
        num_nextn_predict_layers=_num_drafts(fields, kinds),
        raw=fields.raw,
    )


def _experts(fields: Fields) -> MoEConfig:
    moe = MoEConfig(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        shared_width=fields.integer("moe_shared_expert_intermediate_size"),
        score="sigmoid",
        has_bias=True,
        num_groups=fields.integer("n_group", 1),
        topk_groups=fields.integer("topk_group", 1),
        group_score="top2",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        latent=fields.integer("moe_latent_size", None) or 0,
        squared=True,
    )
    check_moe(fields, moe)
    if moe.width % 2:
        fields.fail("moe_intermediate_size", f"{moe.width} is odd; experts without a gate need an even width")
    return moe


def mamba_config(fields: Fields) -> DeltaConfig:
    """Mamba2's sizes in Nemotron's fields."""
    delta = DeltaConfig(
        key_heads=fields.integer("n_groups", None) or fields.integer("mamba_n_groups", 8),
        value_heads=fields.integer("mamba_num_heads", 128),
        key=fields.integer("ssm_state_size", 128),
        value=fields.integer("mamba_head_dim", 64),
        taps=fields.integer("conv_kernel", None, minimum=2) or fields.integer("mamba_d_conv", 4, minimum=2),
        additive=True,
        conv_bias=fields.flag("use_conv_bias", True),
        step_limits=_step_limits(fields),
    )
    if delta.value_heads % delta.key_heads:
        fields.fail("n_groups", f"{delta.key_heads} does not divide mamba_num_heads {delta.value_heads}")
    return delta


def _step_limits(fields: Fields) -> tuple[float, float] | None:
    """`time_step_limit`; None: no bounds. Infinity may be an object, as transformers saves it."""
    found = fields.raw.get("time_step_limit")
    if found is None:
        return None
    if not isinstance(found, list | tuple) or len(found) != 2:
        fields.fail("time_step_limit", f"must be a list of two numbers, found {found!r}")
    bounds = [float(part.get("__float__", "nan")) if isinstance(part, Mapping) else part for part in found]
    if not all(isinstance(bound, int | float) for bound in bounds) or not 0 <= bounds[0] <= bounds[1]:
        fields.fail("time_step_limit", f"must be a list of two ascending numbers, found {found!r}")
    return None if bounds[0] == 0 and bounds[1] == inf else (float(bounds[0]), float(bounds[1]))
