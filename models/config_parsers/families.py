"""config.json of each family -> ModelConfig. Imports no torch.

A parser takes the fields and generation_config.json's object; inconsistent fields raise ConfigError.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from moe_engine.models.checkpoint.joined_rows import COLUMNS_FIRST, ROWS_FIRST
from moe_engine.models.config import GQAConfig, MLAConfig, ModelConfig, OtherLayers
from moe_engine.models.config_parsers.indexer import parse_indexer
from moe_engine.models.config_sections.fields import Fields, parse_context_length, parse_eos, parse_rope, rope_section
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.residual import ResultNorms
from moe_engine.models.config_sections.rope import RopeConfig
from moe_engine.models.formats.table import parse_format

FULL, WINDOWED = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def parse_deepseek(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """DeepSeek V2, V2-Lite, V3, R1, V3.1, and models of the same shape (Kimi K2, Moonlight, GLM-4.7-Flash)."""
    attention = MLAConfig(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer("q_lora_rank", None),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )
    moe = parse_deepseek_moe(fields)
    moe_layers = deepseek_moe_layers(fields, moe)
    interleaved = fields.flag("rope_interleave", True)
    return build_config(
        fields,
        generation,
        attention=attention,
        rope=parse_rope(fields, attention.qk_rope_head_dim, interleaved, scales_softmax=True),
        moe=moe,
        moe_layers=moe_layers,
    )


def parse_axk1(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """A.X K1: DeepSeek V3 with a norm of the experts' result, shared experts included."""
    norms = ResultNorms(of_attention="", before_feed_forward="post_attention_layernorm", of_experts_only=True)
    return dataclasses.replace(parse_deepseek(fields, generation), result_norms=norms, num_nextn_predict_layers=0)


def parse_sparse_deepseek(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """DeepSeek V3.2 and GLM-5: DeepSeek V3 with an indexer."""
    config = parse_deepseek(fields, generation)
    assert isinstance(config.attention, MLAConfig)
    return dataclasses.replace(config, attention=parse_indexer(fields, config.attention))


def parse_deepseek_moe(fields: Fields) -> MoEConfig | None:
    """Experts and router in the fields of DeepSeek; None: a dense model."""
    num_experts = fields.integer("n_routed_experts", None)
    if num_experts is None:
        return None
    method = fields.text("topk_method", None) or (
        "noaux_tc" if fields.raw.get("model_type") != "deepseek_v2" else "greedy"
    )
    scores = {"noaux_tc": "top2", "group_limited_greedy": "max", "greedy": None}
    if method not in scores:
        fields.fail("topk_method", f"{method!r} is unknown; supported: {', '.join(scores)}")
    score = fields.text("scoring_func", None) or ("sigmoid" if method == "noaux_tc" else "softmax")
    if score not in ("sigmoid", "softmax"):
        fields.fail("scoring_func", f"{score!r} is unknown; supported: sigmoid, softmax")
    is_v3 = method == "noaux_tc"
    width = fields.integer("moe_intermediate_size")
    renormalize = fields.flag("norm_topk_prob", is_v3) and (is_v3 or fields.integer("num_experts_per_tok") > 1)
    scale = fields.number("routed_scaling_factor", 1.0)
    moe = MoEConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok"),
        width=width,
        shared_width=width * fields.integer("n_shared_experts", 0, minimum=0),
        score=score,
        has_bias=is_v3,
        num_groups=1 if scores[method] is None else fields.integer("n_group", 1),
        topk_groups=1 if scores[method] is None else fields.integer("topk_group", 1),
        group_score=scores[method],
        renormalize=renormalize,
        # DeepSeek's V2 code either renormalizes or scales; V3 does both.
        scale=1.0 if renormalize and not is_v3 else scale,
    )
    check_moe(fields, moe)
    return moe


def deepseek_moe_layers(fields: Fields, moe: MoEConfig | None) -> tuple[bool, ...]:
    """Which layers are mixtures: in the fields of DeepSeek, or `mlp_layer_types`."""
    layers, known = fields.integer("num_hidden_layers"), {"dense": False, "sparse": moe is not None}
    kinds = fields.by_layer("mlp_layer_types", layers, known)
    if kinds is not None:
        return tuple(known[kind] for kind in kinds)
    first, frequency = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    return tuple(moe is not None and i >= first and i % frequency == 0 for i in range(layers))


def layer_limits(fields: Fields, name: str, moe_layers: tuple[bool, ...]) -> tuple[float, ...]:
    """`MoEConfig.layer_limits` in a field; () without limits."""
    found = fields.raw.get(name) or []
    if not isinstance(found, list):
        fields.fail(name, f"must be a list with a number for each layer, found {found!r}")
    numbers = [0 if limit is None else limit for limit in found]
    if not all(isinstance(limit, int | float) and 0 <= limit < math.inf for limit in numbers):
        fields.fail(name, f"must have numbers of at least 0, found {found!r}")
    if any(limit and not is_moe for limit, is_moe in zip(numbers, moe_layers)):
        fields.fail(name, "has a limit of a layer without experts; it is not supported")
    return tuple(map(float, numbers[: len(moe_layers)])) if any(numbers) else ()


def qwen_moe_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers are mixtures: in the fields of Qwen."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(fields.integer("num_hidden_layers")))


def check_moe(fields: Fields, moe: MoEConfig) -> None:
    """Raises ConfigError for a router that cannot choose this many experts."""
    if moe.num_experts % moe.num_groups:
        fields.fail("n_group", f"{moe.num_groups} does not divide the {moe.num_experts} experts")
    if moe.topk_groups > moe.num_groups:
        fields.fail("topk_group", f"{moe.topk_groups} is more than n_group {moe.num_groups}")
    per_group = moe.num_experts // moe.num_groups
    if moe.group_score == "top2" and moe.num_groups > 1 and per_group < 2:
        fields.fail("n_group", f"{moe.num_groups} leaves one expert a group; noaux_tc needs two")
    allowed = per_group * moe.topk_groups
    if moe.top_k > allowed:
        fields.fail("num_experts_per_tok", f"{moe.top_k} is more than the {allowed} experts the router may choose from")


def plain_experts(
    fields: Fields, count: str, width: str, *, shared_width: int = 0, score: str = "softmax", **more: Any
) -> MoEConfig:
    """Experts whose router has no groups.

    Args:
        count, width: names of the fields with the number of experts and the width of one.
        more: further fields of `MoEConfig`.

    Raises:
        ConfigError: as `check_moe`.
    """
    sizes = fields.integer(count), fields.integer("num_experts_per_tok"), fields.integer(width)
    moe = MoEConfig(*sizes, shared_width=shared_width, score=score, **more)
    check_moe(fields, moe)
    return moe


def parse_dense(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3."""
    return parse_gqa(fields, generation, None, ())


def parse_seed_oss(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Seed-OSS: Llama with biases of q, k and v."""
    biases = {"qkv_bias": fields.flag("attention_bias", True), "o_bias": fields.flag("attention_out_bias")}
    return parse_gqa(fields, generation, None, (), **biases)


def parse_glm(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """GLM-4: half of each head rotated, in pairs (2j, 2j+1), biases of q, k and v, joined matrices of gate and up; the
    models of 0414 (`glm4`) norm results."""
    check_joined(fields)
    bias = fields.flag("attention_bias", True)
    config = parse_gqa(
        fields, generation, None, (), partial_rotary=0.5, interleaved=True, qkv_bias=bias, o_bias=False
    )  # fmt: skip
    if config.model_type == "glm":
        return config
    norms = ResultNorms(of_attention="post_self_attn_layernorm", before_feed_forward="post_attention_layernorm")
    return dataclasses.replace(config, result_norms=norms)


def check_joined(fields: Fields) -> None:
    """Raises ConfigError for quantized matrices that `joined_rows` does not cut."""
    quantized = fields.section("quantization_config")
    served = *ROWS_FIRST, *COLUMNS_FIRST, "gguf"
    if quantized is not None and quantized.text("quant_method", None) not in served:
        quantized.fail("quant_method", f"is not supported with joined matrices; supported: {', '.join(served)}")


def parse_phi3(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Phi-3 and Phi-4: Llama's layers, whose files have joined matrices (`joined_rows`)."""
    fields.check_served({"attention_bias": False})
    check_joined(fields)
    section = rope_section(fields)
    if section is not None and "su" in (section.raw.get("type"), section.raw.get("rope_type")):  # an older name
        fields = Fields({**fields.raw, "rope_scaling": {**section.raw, "rope_type": "longrope"}}, fields.source)
    return parse_gqa(fields, generation, None, ())


def parse_qwen3_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3-MoE: softmax over all experts, no shared expert; some layers may be dense."""
    count = "num_local_experts" if fields.integer("num_experts", None) is None else "num_experts"
    moe = plain_experts(fields, count, "moe_intermediate_size", renormalize=fields.flag("norm_topk_prob"))
    return parse_gqa(fields, generation, moe, qwen_moe_layers(fields))


def parse_qwen2_moe(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-MoE: softmax over all experts, a gated shared expert; some layers may be dense."""
    fields.check_served({"use_sliding_window": False})
    moe = plain_experts(
        fields, "num_experts", "moe_intermediate_size", shared_width=fields.integer("shared_expert_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob"), shared_gate=True,
    )  # fmt: skip
    return parse_gqa(fields, generation, moe, qwen_moe_layers(fields), qkv_bias=fields.flag("qkv_bias", True))


def parse_mixtral(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """Mixtral: every layer MoE, softmax then renormalized over the top-k."""
    moe = plain_experts(fields, "num_local_experts", "intermediate_size", renormalize=True)
    return parse_gqa(fields, generation, moe, (True,) * fields.integer("num_hidden_layers"))


def parse_auto(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """For registered external models without a parser: MLA if the file has kv_lora_rank, else dense GQA."""
    return (parse_deepseek if fields.has("kv_lora_rank") else parse_dense)(fields, generation)


def parse_gqa(
    fields: Fields,
    generation: Mapping[str, Any],
    moe: MoEConfig | None,
    moe_layers: tuple[bool, ...],
    partial_rotary: float = 1.0,
    interleaved: bool = False,
    **attention_fields: Any,
) -> ModelConfig:
    """A model on grouped-query attention.

    Args:
        partial_rotary: the part of a head that is rotated, if the file has none. interleaved: as in `RopeConfig`.
        attention_fields: fields of its `GQAConfig` that replace those by model_type.
    """
    model_type = fields.text("model_type", "llama")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", None) or num_heads
    hidden = fields.integer("hidden_size")
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None:
        if hidden % num_heads:
            fields.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {num_heads}; give head_dim")
        head_dim = hidden // num_heads
    bias = model_type == "qwen2" or fields.flag("attention_bias")
    kinds: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias and model_type != "qwen2",
        "qk_norm": "head" if model_type in ("qwen3", "qwen3_moe") else "",
    }
    attention = GQAConfig(num_heads, num_kv_heads, head_dim, **kinds | attention_fields)
    return build_config(
        fields,
        generation,
        attention=attention,
        rope=parse_rope(fields, rotary_width(fields, head_dim, partial_rotary), interleaved, scales_softmax=False),
        moe=moe,
        moe_layers=moe_layers or (False,) * fields.integer("num_hidden_layers"),
        windows=_windows(fields, model_type),
    )


def with_window_layers(fields: Fields, every: int) -> Fields:
    """The fields of a family with windows and `layer_types`; by default every n-th layer has no window."""
    layers = fields.integer("num_hidden_layers")
    kinds = fields.raw.get("layer_types") or [WINDOWED if (i + 1) % every else FULL for i in range(layers)]
    if not isinstance(kinds, list):
        fields.fail("layer_types", f"must be a list with the kind of each layer, found {kinds!r}")
    return Fields({**fields.raw, "layer_types": kinds, "use_sliding_window": True}, fields.source)


def with_other_windows(config: ModelConfig, fields: Fields, rope: Mapping[str, Any], **heads: Any) -> ModelConfig:
    """Layers with a window that have other `heads` (fields of `GQAConfig`) and rotary settings than the others."""
    attention = config.attention
    assert isinstance(attention, GQAConfig)
    own = Fields({**fields.raw, "rope_scaling": rope}, fields.source)
    found = parse_rope(own, rotary_width(own, attention.head_dim, 1.0), interleaved=False, scales_softmax=False)
    others = OtherLayers(config.windowed_layers, dataclasses.replace(attention, **heads), found)
    return dataclasses.replace(config, other_layers=others)


def rotary_width(fields: Fields, head_dim: int, default: float) -> int:
    """Rotated channels of a head: a part of them in either dialect, or `rotary_dim`."""
    section = rope_section(fields)
    part = None if section is None else section.number("partial_rotary_factor", None, above=0)
    if part is None:
        part = fields.number("partial_rotary_factor", None, above=0)
    if part is None:
        null = 1.0 if "partial_rotary_factor" in fields.raw else default
        width = fields.integer("rotary_dim", int(head_dim * null))
    else:
        width = int(head_dim * part)
    if width > head_dim:
        fields.fail("rotary_dim", f"{width} is more than head_dim {head_dim}")
    return int(width)


def build_config(fields: Fields, generation: Mapping[str, Any], *, rope: RopeConfig, **parts: Any) -> ModelConfig:
    """The fields common to all families."""
    fields.check_served({"hidden_act": ("silu", "swish")})
    dtype = fields.text("dtype", None) or fields.text("torch_dtype", None) or "bfloat16"
    return ModelConfig(
        source=fields.source,
        architecture=(fields.raw.get("architectures") or [""])[0],
        model_type=fields.text("model_type", ""),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        intermediate_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=parse_context_length(fields, rope),
        eos_token_ids=parse_eos(fields, generation),
        weight_format=parse_format(fields),
        checkpoint_dtype=dtype.removeprefix("torch."),
        mlp_bias=fields.flag("mlp_bias"),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        raw=fields.raw,
        rope=rope,
        **parts,
    )


_WINDOW_BY_DEFAULT = ("mistral", "mixtral", "ministral", "ministral3", "phi3", "phimoe")
_FULL_BEFORE = ("qwen2", "qwen3", "dots1")
"""Families whose `sliding_window` applies from layer `max_window_layers` on; in others it applies to all layers."""
_DEFAULT_FULL_LAYERS = 28


def _windows(fields: Fields, model_type: str) -> tuple[int | None, ...]:
    """The sliding window of each layer, as transformers reads the file; () if no layer has one."""
    by_default = model_type in _WINDOW_BY_DEFAULT
    if model_type == "llama" or not fields.flag("use_sliding_window", by_default):
        return ()
    window = fields.integer("sliding_window", None)
    if window is None:
        return ()
    layers, known = fields.integer("num_hidden_layers"), {FULL: None, WINDOWED: window}
    kinds = fields.by_layer("layer_types", layers, known)
    if kinds is None:
        full = fields.integer("max_window_layers", _DEFAULT_FULL_LAYERS, minimum=0) if model_type in _FULL_BEFORE else 0
        kinds = [FULL] * min(full, layers) + [WINDOWED] * (layers - min(full, layers))
    windows = tuple(known[kind] for kind in kinds)
    return windows if any(windows) else ()
