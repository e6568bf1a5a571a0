"""gpt-oss checkpoints in MXFP4, as published: experts as `_blocks` and `_scales`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.checkpoints import write_tensors

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
EVEN_FIRST = torch.tensor([*range(0, 16, 2), *range(1, 16, 2)])
"""Codes in the order of preference between two equally near numbers (OCP Microscaling: the even one)."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, K, N] -> blocks uint8 [E, N, K / 32, 16], the first number of a byte in its low bits, and scales."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [E, N, G, 32]
    exponent = groups.abs().amax(-1).clamp(min=1e-20).log2().floor() - 2  # the largest becomes at most 8, clipped to 6
    scaled = groups / exponent.exp2().unsqueeze(-1)
    codes = EVEN_FIRST[scaled.unsqueeze(-1).sub(VALUES[EVEN_FIRST]).abs().argmin(-1)]
    pairs = codes.unflatten(-1, (16, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), (exponent + 127).to(torch.uint8)


def mxfp4_copy(source: Path, directory: Path) -> tuple[Path, Path]:
    """The checkpoint in MXFP4, and the same values unquantized, decoded by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = directory / "mxfp4", directory / "plain"
    packed: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        packed[name] = decoded[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del packed[name]
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = quantize(tensor)
            blocks, scales = packed[f"{name}_blocks"], packed[f"{name}_scales"]
            decoded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    config = json.loads((source / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for folder, tensors, fields in ((stored, packed, {"quantization_config": section}), (plain, decoded, {})):
        folder.mkdir(parents=True)
        write_tensors(folder, tensors)
        (folder / "config.json").write_text(json.dumps(config | fields))
        shutil.copy(source / "generation_config.json", folder)
    return stored, plain
