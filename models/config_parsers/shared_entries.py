"""config.json of DeepSeek V4.1 -> ModelConfig. Imports no torch.

The published file has the language model's fields in `text_config`, the tower's in `vision_config`. What is as in
DeepSeek V4 is read by `config_compressed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from moe_engine.models.config import ModelConfig, OtherLayers
from moe_engine.models.config_parsers.compressed import (
    compressed_attention,
    parse_experts,
    parse_rope_of,
    parse_streams,
    with_expert_format,
)
from moe_engine.models.config_parsers.families import build_config
from moe_engine.models.config_sections.block import OwnBlock, own_block
from moe_engine.models.config_sections.compressed import SharedEntriesConfig
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.config_sections.fields import Fields, check_heads
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.config_sections.vision import DEEPSEEK_V41, VisionConfig

_RATES = (0, 1, 2)
_STAGES = 3
"""DSpark layers of the published model."""


def parse_deepseek_v41(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """V4.1-Flash: entries that several layers read, residual streams with late sums, experts in every layer."""
    if fields.number("gate_temp", 1.0) != 1.0:
        fields.fail("gate_temp", "is not 1: scores of experts with a temperature are not supported")
    attention, engram = shared_attention(fields), _engram(fields)
    plain = Fields({**fields.raw, "num_hash_layers": 0, "num_nextn_predict_layers": 0}, fields.source)
    moe, layers = parse_experts(plain), fields.integer("num_hidden_layers")
    config = build_config(
        Fields({"intermediate_size": moe.width} | plain.present(), fields.source),
        generation,
        attention=attention,
        rope=parse_rope_of(fields, "compress", attention.rotary_width),
        moe=moe,
        moe_layers=(True,) * layers,
        windows=(attention.window,) * layers,
        streams=replace(parse_streams(fields), late=True, engram=engram),
    )
    block = _own_block(fields, moe, layers, config.vocab_size)
    num_drafts = 0 if block is None else fields.integer("num_nextn_predict_layers", _STAGES)
    config = replace(config, num_nextn_predict_layers=num_drafts, own_block=block)
    without = tuple(i for i in range(layers + num_drafts) if not attention.rate(i))
    main = parse_rope_of(fields, "main", attention.rotary_width)
    others = OtherLayers(without, attention, main) if without else None
    section = fields.section("quantization_config")
    stored = None if section is None else section.raw.get("expert_dtype")
    format = with_expert_format(
        Fields({"expert_dtype": stored} | fields.present(), fields.source), config.weight_format
    )
    vision = _vision(fields, config.hidden_size)
    if vision is not None:
        config = replace(config, moe=replace(moe, image_bias=True), vision=vision)
    return replace(config, other_layers=others, weight_format=format, raw=fields.raw)


def _vision(fields: Fields, out_width: int) -> VisionConfig | None:
    """The tower; None: the file has none, or one without layers."""
    section = fields.section("vision_config")
    if section is None or not (layers := section.integer("num_hidden_layers", 32, minimum=0)):
        return None
    width, heads = section.integer("hidden_size", 1024), section.integer("num_attention_heads", 16)
    check_heads(section, "num_attention_heads", heads, width)
    return VisionConfig(
        tower=DEEPSEEK_V41,
        width=width,
        num_layers=layers,
        num_heads=heads,
        intermediate=section.integer("intermediate_size", 2816),
        patch_size=section.integer("patch_size", 14),
        temporal_patch_size=1,
        channels=3,
        merge=section.integer("downsample_ratio", 3),
        out_width=out_width,
        image_token=fields.integer("image_token_id", minimum=0),
        video_token=None,
        theta=section.number("rope_theta", 10000.0, above=0),
        delimited=True,
    )


def _own_block(fields: Fields, moe: MoEConfig, layers: int, vocab_size: int) -> OwnBlock | None:
    """The DSpark layers. They read the streams before layers, and have experts of their own number."""
    found = own_block(fields.source, fields.raw, layers, vocab_size, reads_inputs=True)
    if found is None:
        return None
    count = fields.integer("dspark_n_routed_experts", moe.num_experts)
    top_k = fields.integer("dspark_num_experts_per_tok", moe.top_k)
    if top_k > count:
        fields.fail("dspark_num_experts_per_tok", f"{top_k} is more than dspark_n_routed_experts {count}")
    alike = (count, top_k) == (moe.num_experts, moe.top_k)
    return found if alike else replace(found, num_experts=count, top_k=top_k)


def _engram(fields: Fields) -> EngramConfig | None:
    layers = _layers({"engram_layer_ids": [], **fields.present()}, fields, "engram_layer_ids")
    if not layers:
        return None
    rows = fields.raw.get("engram_num_embeddings")
    if not isinstance(rows, list) or len(rows) != len(layers) or not all(isinstance(count, int) for count in rows):
        fields.fail("engram_num_embeddings", f"needs {len(layers)} numbers of rows, found {rows!r}")
    pad = "engram_pad_token_id" if fields.has("engram_pad_token_id") else "engram_pad_id"
    found = EngramConfig(
        layers=layers,
        rows=tuple(rows),
        longest=fields.integer("engram_max_ngram_size", 4, minimum=2),
        heads=fields.integer("engram_n_heads", 8),
        width=fields.integer("engram_head_dim", 256),
        first_prime=fields.integer("engram_vocab_size", 16000000, minimum=2),
        num_ids=fields.integer("engram_compressed_vocab_size"),
        pad_id=fields.integer(pad, 2, minimum=0),
    )
    for layer, count, primes in zip(layers, rows, found.primes):
        if count != sum(primes):
            fields.fail("engram_num_embeddings", f"{count} of layer {layer} is not the {sum(primes)} rows of its heads")
    return found


def shared_attention(fields: Fields) -> SharedEntriesConfig:
    """Raises ConfigError."""
    layers, rates = fields.integer("num_hidden_layers"), fields.raw.get("compress_ratios")
    if not isinstance(rates, list) or len(rates) < layers or not all(rate in _RATES for rate in rates):
        fields.fail("compress_ratios", f"needs {layers} of 0, 1, 2, not {rates!r}")
    kinds = ["sliding_attention"] * layers
    base = compressed_attention(Fields({**fields.raw, "layer_types": kinds}, fields.source))
    parts = {field.name: getattr(base, field.name) for field in fields_of(base)}
    found = SharedEntriesConfig(
        **parts | {"rates": tuple(rates[:layers])},
        kv_sources=_layers(fields.raw, fields, "kv_source_layer_ids"),
        index_sources=_layers(fields.raw, fields, "index_source_layer_ids"),
        candidate_source=fields.integer("candidate_source_layer_id", -1, minimum=-1),
        candidate_blocks=fields.integer("candidate_topk_blocks", 2048),
        candidate_size=fields.integer("candidate_block_size", 8),
    )
    _check(fields, found)
    return found


def _layers(values: Mapping[str, Any], fields: Fields, name: str) -> tuple[int, ...]:
    found, layers = values.get(name), fields.integer("num_hidden_layers")
    if not isinstance(found, list) or not all(isinstance(i, int) and 0 <= i < layers for i in found):
        fields.fail(name, f"must be a list of layers from 0 to {layers - 1}, found {found!r}")
    if found != sorted(set(found)):
        fields.fail(name, f"{found} must name each layer once, in their order")
    return tuple(found)


def _check(fields: Fields, a: SharedEntriesConfig) -> None:
    """Raises ConfigError for layers whose entries no layer writes or selects."""
    for name, sources in (("kv_source_layer_ids", a.kv_sources), ("index_source_layer_ids", a.index_sources)):
        if any(not a.rate(i) for i in sources):
            fields.fail(name, f"{list(sources)} has layers with compress_ratios 0")
        missing = next((i for i, rate in enumerate(a.rates) if rate and not any(s <= i for s in sources)), None)
        if missing is not None:
            fields.fail(name, f"{list(sources)} has no layer up to layer {missing}, which reads entries")
    for source in a.kv_sources:
        group = a.group(source)
        if any(a.rate(i) != a.rate(source) for i in group):
            fields.fail("kv_source_layer_ids", f"layers {list(group)} read entries of layer {source} at other rates")
        if source not in a.index_sources:
            fields.fail("index_source_layer_ids", f"has no layer {source}, which writes entries")
    if a.candidate_source >= 0 and a.candidate_source not in a.index_sources:
        fields.fail("candidate_source_layer_id", f"{a.candidate_source} is not among index_source_layer_ids")
    least = (a.candidate_blocks - 1) * a.candidate_size + 1
    if a.candidate_source >= 0 and least < a.top_k:
        fields.fail("candidate_topk_blocks", f"{a.candidate_blocks} can have {least} entries, index_topk is {a.top_k}")
    later = [i for i in a.index_sources if i > a.candidate_source >= 0]
    if any(a.group(i) != a.group(a.candidate_source) for i in later):
        fields.fail("candidate_source_layer_id", f"{a.candidate_source}: layers {later} select among other entries")
