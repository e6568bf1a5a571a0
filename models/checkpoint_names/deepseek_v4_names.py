"""Tensor names of DeepSeek V4: published, and as transformers saves them. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

_PARTS = {
    "attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wkv": "kv_proj", "kv_norm": "kv_layernorm",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj", "attn_sink": "sinks", "wgate": "gate_proj", "ape": "position_bias",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "bias": "e_score_correction_bias",
}  # fmt: skip
"""Published parts of the names of a layer's tensors, and the model's."""
_LAYERS = ("layers", "mtp")
_OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
_TOWER = {"vision.": "visual.", "aligner.": "visual.aligner.", "image_": "visual.image_"}
"""Prefixes of the names of V4.1's vision tower."""
_MTP_PARTS = {"norm": "shared_head.norm", "head": "shared_head.head", "emb": "embed_tokens"} | {
    f"hc_head_{part}": f"shared_head.hc_head.{part}" for part in ("fn", "base", "scale")
}
"""Parts of an MTP layer that the model's layers do not have."""
_SAVED = {
    "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm.",
    ".markov_head.embed.": ".markov_head.markov_w1.", ".markov_head.head.": ".markov_head.markov_w2.",
}  # fmt: skip
"""Where transformers' names, or those of V4.1's Markov head, differ from V4's, apart from the prefix ``model.``."""


def has_v4_names(names: Collection[str]) -> bool:
    """True if these are tensors of DeepSeek V4's layers."""
    return any(_layer_part(name) in ("attn", "ffn", "engram") for name in names)


def v4_names(names: Collection[str], num_layers: int | None) -> dict[str, str]:
    """The model's names by those of a V4 checkpoint. MTP layers, ``mtp.J.``, come after the main layers.

    Args:
        num_layers: main layers; None: as many as there are tensors of.
    """
    if num_layers is None:
        num_layers = 1 + max(_layer_index(name) for name in names)
    return {name: _inner_name(name, num_layers) for name in names}


def _inner_name(name: str, num_layers: int) -> str:
    for saved, published in _SAVED.items():
        name = name.replace(saved, published)
    name = name.removeprefix("model.")
    if not _layer_part(name):
        for published, own in _TOWER.items():
            if name.startswith(published):
                return own + name.removeprefix(published)
        first, dot, rest = name.partition(".")
        return _OUTSIDE.get(name) or f"model.{_part(first)}{dot}{rest}"
    kind, index, first, *parts = name.split(".")
    layer = int(index)
    if kind == "mtp":
        layer, first = num_layers + layer, _MTP_PARTS.get(first, first)
    return ".".join(("model.layers", str(layer), *map(_part, (first, *parts))))


def _part(part: str) -> str:
    if part.startswith("hc_"):
        return ".".join(part.rsplit("_", 1))
    return _PARTS.get(part, part)


def _layer_part(name: str) -> str:
    """The part after the layer's index; empty for a tensor of no layer."""
    parts = name.removeprefix("model.").split(".", 3)
    return parts[2] if parts[0] in _LAYERS and len(parts) > 2 and parts[1].isdigit() else ""


def _layer_index(name: str) -> int:
    """Index of a main layer; -1: another tensor."""
    parts = name.removeprefix("model.").split(".", 2)
    return int(parts[1]) if parts[0] == _LAYERS[0] and _layer_part(name) else -1
