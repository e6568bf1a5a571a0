"""The `quantization_config` of a quantized copy: how its matrices are stored, and which are plain.

Names are those of the files; transformers and vLLM put other names before ``layers`` for models with images.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moe_engine.models.checkpoint.tensor_header import TensorHeader
from moe_engine.models.quantized_copy.target import Target, joined_names

_TOWERS = ("visual", "vision_tower", "vision_model", "mm_projector", "multi_modal_projector", "patch_merge_mlp")
"""Modules of images, in checkpoints and in transformers, whose names inside them are not always the same."""
_WEIGHT = ".weight"
_COMMON = (".experts.gate_up_proj", ".experts.down_proj")
"""Tensors of all experts of a layer."""
_PACKED = ".weight_packed"
_EXPERT = re.compile(r"(\.experts)\..*")


def quantization_config(target: Target, written: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """The section of config.json for a copy with these tensors."""
    if target.format == "mxfp4":  # as gpt-oss is published
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    left_out = plain_modules(written)
    left_out = sorted({*left_out, *joined_names(left_out)})
    if target.codes is None:
        named = [prefix + tower for tower in _towers(left_out) for prefix in ("", "model.")]
        plain = ["lm_head", *named, *(_EXPERT.sub(r"\1", name) for name in left_out)]
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": list(dict.fromkeys(plain)),
        }  # fmt: skip
    weights = {
        "num_bits": target.codes.bits, "type": "int", "symmetric": True, "dynamic": False, "actorder": None,
        "strategy": "group" if target.codes.group else "channel", "group_size": target.codes.group or None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    packed = [name.removesuffix(_PACKED) for name in written if name.endswith(_PACKED)]
    quantized = {_numberless(name) for name in (*packed, *joined_names(packed))}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head", *_patterns(left_out, quantized)],
        "kv_cache_scheme": None,
    }  # fmt: skip


def plain_modules(written: Mapping[str, TensorHeader]) -> list[str]:
    """Modules of a copy with matrices that are not quantized; without the embedding."""
    return sorted(
        name.removesuffix(_WEIGHT)
        for name, header in written.items()
        if (name.endswith(_WEIGHT) and len(header.shape) == 2) or name.endswith(_COMMON)
        if f"{name}_scale_inv" not in written and not name.endswith(".embed_tokens.weight")
    )


def _patterns(left_out: Sequence[str], quantized: Collection[str]) -> list[str]:
    """compressed-tensors' spelling of plain modules, whatever precedes ``layers``: one pattern for a module of all
    layers, unless it is quantized in some."""
    towers = _towers(left_out)
    found = [rf"re:(.*\.)?{tower}\..*" for tower in towers]
    for name in left_out:
        if name.startswith("lm_head") or _inside(name, towers):
            continue
        spelled = re.escape(name[max(name.find("layers."), 0) :])
        if _numberless(name) not in quantized:
            spelled = re.sub(r"\.\d+\\\.", r".\\d+\\.", spelled)
        found.append(f"re:.*{spelled}$")
    return list(dict.fromkeys(found))


def _towers(left_out: Sequence[str]) -> list[str]:
    return [tower for tower in _TOWERS if any(_inside(name, (tower,)) for name in left_out)]


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _inside(name: str, towers: Sequence[str]) -> list[str]:
    """The towers that have the module."""
    return [tower for tower in towers if f".{tower}." in f".{name}."]
