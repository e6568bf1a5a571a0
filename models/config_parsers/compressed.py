"""config.json of DeepSeek V4 -> ModelConfig. Imports no torch.

The published file has `compress_ratios`, `num_hash_layers` and `rope_scaling`; transformers' has `layer_types`,
`compress_rates`, `mlp_layer_types` and two sections of `rope_parameters`. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig, OtherLayers
from moe_engine.models.config_parsers.families import build_config, check_moe
from moe_engine.models.config_sections.block import own_block
from moe_engine.models.config_sections.compressed import CompressedConfig, StreamsConfig
from moe_engine.models.config_sections.fields import Fields, parse_rope, rope_section
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.rope import RopeConfig
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.fp4_experts import with_fp4_experts
from moe_engine.models.formats.protocol import WeightFormat

_WINDOW, _SELECTED, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SELECTED: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
"""transformers' kinds of layers with entries: an older field for their rate, and its default."""
_ROTARY_PART = 64 / 512
_STAGES = 3
"""DSpark layers of the published models."""
_HASH, _CHOSEN = "hash_moe", "moe"


def parse_deepseek_v4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """V4-Flash and V4-Pro: windows and compressed entries, four residual streams, experts in every layer."""
    attention = compressed_attention(fields)
    moe = parse_experts(fields)
    layers = fields.integer("num_hidden_layers")
    config = build_config(
        Fields({"intermediate_size": moe.width} | fields.present(), fields.source),
        generation,
        attention=attention,
        rope=parse_rope_of(fields, "compress", attention.rotary_width),
        moe=moe,
        moe_layers=(True,) * layers,
        windows=(attention.window,) * layers,
        streams=parse_streams(fields),
    )
    block = own_block(fields.source, fields.raw, layers, config.vocab_size)
    num_mtp = config.num_nextn_predict_layers if block is None else _num_stages(fields, layers)
    plain = tuple(i for i in range(layers + num_mtp) if not attention.rate(i))
    others = OtherLayers(plain, attention, parse_rope_of(fields, "main", attention.rotary_width)) if plain else None
    format = with_expert_format(fields, config.weight_format)
    config = replace(config, num_nextn_predict_layers=num_mtp, own_block=block)
    return replace(config, other_layers=others, weight_format=format, raw=fields.raw)


def parse_streams(fields: Fields) -> StreamsConfig:
    """The residual streams. Raises ConfigError."""
    return StreamsConfig(
        count=fields.integer("hc_mult", 4),
        iterations=fields.integer("hc_sinkhorn_iters", 20),
        eps=fields.number("hc_eps", 1e-6, above=0),
    )


def _num_stages(fields: Fields, layers: int) -> int:
    """Number of DSpark layers, which `num_nextn_predict_layers` does not have: the ratios after those of the model's
    layers."""
    ratios = fields.raw.get("compress_ratios")
    behind = len(ratios) - layers if isinstance(ratios, list) else 0
    return behind if behind > 1 else fields.integer("n_mtp_layers", _STAGES)


def compressed_attention(fields: Fields) -> CompressedConfig:
    """Raises ConfigError."""
    head_dim = fields.integer("head_dim", 512)
    rotary = fields.integer("qk_rope_head_dim", None)
    if rotary is None:
        rotary = int(head_dim * fields.number("partial_rotary_factor", _ROTARY_PART, above=0))
    if rotary > head_dim:
        fields.fail("qk_rope_head_dim", f"{rotary} is more than head_dim {head_dim}")
    if fields.integer("num_key_value_heads", 1) != 1:
        fields.fail("num_key_value_heads", "is not 1: all heads of this architecture share one key")
    selected_rate = _rate(fields, _SELECTED)
    attention = CompressedConfig(
        num_heads=fields.integer("num_attention_heads"),
        head_dim=head_dim,
        rotary_width=rotary,
        q_lora_rank=fields.integer("q_lora_rank"),
        window=fields.integer("sliding_window", 128),
        rates=_rates(fields, selected_rate),
        selected_rate=selected_rate,
        index_heads=fields.integer("index_n_heads", 64),
        index_width=fields.integer("index_head_dim", 128),
        top_k=fields.integer("index_topk", 512),
        output_groups=fields.integer("o_groups", 8),
        output_rank=fields.integer("o_lora_rank", 1024),
    )
    _check(fields, attention)
    return attention


def _check(fields: Fields, attention: CompressedConfig) -> None:
    """Raises ConfigError for sizes that do not fit each other."""
    if attention.num_heads % attention.output_groups:
        fields.fail("o_groups", f"{attention.output_groups} does not divide the {attention.num_heads} heads")
    index, rotary = attention.index_width, attention.rotary_width
    if index < rotary:
        fields.fail("index_head_dim", f"{index} is less than the rotated width {rotary}")
    needed = max((2 * rate if rate == attention.selected_rate else rate for rate in attention.rates), default=0)
    if needed > attention.window:
        fields.fail("sliding_window", f"{attention.window} is less than the {needed} tokens that an entry reads")


def _rate(fields: Fields, kind: str) -> int:
    section = fields.section("compress_rates")
    older, default = _RATES[kind]
    found = None if section is None else section.integer(kind, None, minimum=2)
    return int(fields.integer(older, default, minimum=2) if found is None else found)


def _rates(fields: Fields, selected_rate: int) -> tuple[int, ...]:
    """Tokens of an entry by layer."""
    layers = fields.integer("num_hidden_layers")
    known = {_WINDOW: 0, _SELECTED: selected_rate, _HEAVY: _rate(fields, _HEAVY)}
    kinds = fields.by_layer("layer_types", layers, known)
    if kinds is None:
        if (ratios := fields.by_layer("compress_ratios", layers, known.values())) is not None:
            return tuple(ratios)
        kinds = [_HEAVY] * min(layers, 2) + [_SELECTED if i % 2 else _HEAVY for i in range(max(layers - 2, 0))]
    return tuple(known[kind] for kind in kinds)


def parse_rope_of(fields: Fields, kind: str, width: int) -> RopeConfig:
    """The rotary embedding of layers with entries (``compress``) or of the others (``main``)."""
    section = rope_section(fields)
    own = None if section is None else section.section(kind)
    if own is not None:
        values = dict(own.raw)
    elif kind == "main":
        values = {"rope_theta": fields.number("rope_theta", 10000.0, above=0)}
    else:
        values = {} if section is None else {key: value for key, value in section.raw.items() if key != "rope_theta"}
        values["rope_theta"] = fields.number("compress_rope_theta", 160000.0, above=0)
    if values.get("rope_type", values.get("type")) == "yarn" and values.get("attention_factor") is None:
        values["attention_factor"] = 1.0  # the reference does not scale cosines and sines
    read = Fields({**fields.raw, "rope_scaling": values}, fields.source)
    return parse_rope(read, width, interleaved=True, scales_softmax=False)


def parse_experts(fields: Fields) -> MoEConfig:
    score = fields.text("scoring_func", "sqrtsoftplus")
    if score not in ("sqrtsoftplus", "softmax", "sigmoid"):
        fields.fail("scoring_func", f"{score!r} is unknown; supported: sqrtsoftplus, softmax, sigmoid")
    if not fields.flag("norm_topk_prob", True):
        fields.fail("norm_topk_prob", "is false: weights that are not divided by their sum are not supported")
    width = fields.integer("moe_intermediate_size")
    moe = MoEConfig(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        width=width,
        shared_width=width * fields.integer("n_shared_experts", 1, minimum=0),
        score=score,
        has_bias=True,
        renormalize=True,
        scale=fields.number("routed_scaling_factor", 1.5),
        limit=fields.number("swiglu_limit", 10.0, above=0),
        hash_layers=_hash_layers(fields),
    )
    check_moe(fields, moe)
    return moe


def with_expert_format(fields: Fields, declared: WeightFormat) -> WeightFormat:
    """Block FP8 without the compressors, with experts in MXFP4 if the config says so (V4-Flash-Base has none)."""
    dtype = fields.choice("expert_dtype", None, "fp4", "fp8", "bf16")
    if not isinstance(declared, BlockFP8Format):
        return declared
    format = replace(declared, plain=replace(declared.plain, parts=(*declared.plain.parts, "compressor")))
    return with_fp4_experts(format) if dtype == "fp4" else format


def _hash_layers(fields: Fields) -> int:
    """Number of first layers whose experts a table of token ids names."""
    layers = fields.integer("num_hidden_layers")
    kinds = fields.by_layer("mlp_layer_types", layers, (_HASH, _CHOSEN))
    if kinds is None:
        return min(layers, fields.integer("num_hash_layers", 3, minimum=0))
    count = kinds.count(_HASH)
    if kinds[:count] != [_HASH] * count:
        fields.fail("mlp_layer_types", f"{_HASH} after {_CHOSEN} is not supported")
    return int(count)
