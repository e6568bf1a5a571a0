"""config.json of Mistral Large 4 -> ModelConfig. Imports no torch.

The text model is in `text_config`; the files have Mistral's own names of tensors (`mistral_native`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_engine.models.checkpoint_names.mistral_native import with_model_names
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_parsers.indexer import parse_indexer
from moe_engine.models.config_parsers.mistral import latent_mixture, tower_of
from moe_engine.models.config_sections.fields import Fields, is_whole
from moe_engine.models.config_sections.vision import PIXTRAL_NATIVE

_SERVED = {"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True, "indexer_rope_interleave": True}


def parse_mistral_large4(fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
    """DeepSeek's attention without a latent of the query, over selected tokens; layers without rotary positions, and
    with the latents of others; a softmax router without a bias; bounded logits; Pixtral's tower."""
    fields.check_served(_SERVED)
    raw = {**fields.raw, "q_lora_rank": None, "indexer_rope_interleave": True}
    if (section := fields.section("quantization_config")) is not None:
        raw["quantization_config"] = with_model_names(section)
    config, _ = latent_mixture(Fields(raw, fields.source), generation)
    assert isinstance(config.attention, MLAConfig)
    plain = _plain_layers(fields)
    attention = replace(
        parse_indexer(Fields(raw, fields.source), config.attention, from_input=True),
        latent_eps=config.norm_eps, plain_layers=plain, head_factors=True, sources=_sources(fields, plain),
    )  # fmt: skip
    tower = fields.section("vision_config")
    return replace(
        config,
        attention=attention,
        rope=replace(config.rope, stored_factors=True),
        logit_cap=fields.number("final_logit_softcapping", 30.0, above=0),
        vision=None if tower is None else replace(tower_of(fields, tower, config), tower=PIXTRAL_NATIVE),
        raw=fields.raw,
    )


def _plain_layers(fields: Fields) -> tuple[int, ...]:
    """The layers without rotary positions: zeros of `no_rope_layers`, else every fourth one."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = _by_layer(fields, "no_rope_layers", lambda i: int((i + 1) % interval != 0))
    return tuple(i for i, flag in enumerate(rotates) if not flag)


def _sources(fields: Fields, plain: tuple[int, ...]) -> tuple[int, ...]:
    """`MLAConfig.sources`."""
    found = _by_layer(fields, "kv_source_layers", lambda i: i)
    for layer, source in enumerate(found):
        if source > layer or found[source] != source:
            fields.fail("kv_source_layers", f"layer {layer} must have the latents of an earlier layer that has its own")
        if (layer in plain) != (source in plain):
            fields.fail("kv_source_layers", f"layer {layer} has rotary positions, or layer {source}, and not both")
    return () if found == [*range(len(found))] else tuple(found)


def _by_layer(fields: Fields, name: str, default: Any) -> list[int]:
    """A list of whole numbers with at least one for each layer."""
    layers, found = fields.integer("num_hidden_layers"), fields.raw.get(name)
    if found is None:
        return [default(i) for i in range(layers)]
    if not isinstance(found, list) or len(found) < layers or not all(is_whole(n) and n >= 0 for n in found):
        fields.fail(name, f"needs {layers} whole numbers, not {found!r}")
    return [int(n) for n in found[:layers]]
