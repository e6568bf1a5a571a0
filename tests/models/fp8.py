"""Block FP8 by the format's definition, independent of the engine's loader."""

from __future__ import annotations

import torch
from torch import Tensor


def is_quantized(name: str) -> bool:
    """True for tensors that FP8 checkpoints quantize: every projection of the decoder layers; not the gate, norms,
    eh_proj."""
    return name.endswith(("_proj.weight", "proj_with_mqa.weight")) and "eh_proj" not in name


def quantize_fp8(tensors: dict[str, Tensor], scale_dtype: str = "float32", block: int = 128) -> dict[str, Tensor]:
    """e4m3 weights and their scale grids; blocks at the edges are shorter."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantized(name):
            out[name] = tensor
            continue
        rows, cols = tensor.shape
        grid = torch.empty(-(-rows // block), -(-cols // block))
        quantized = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                scale = tensor[part].float().abs().max().clamp(min=1e-12) / 448
                if scale_dtype != "float32":
                    scale = torch.exp2(torch.ceil(torch.log2(scale)))
                grid[i, j] = scale
                quantized[part] = (tensor[part].float() / scale).to(torch.float8_e4m3fn)
        out[name] = quantized
        if scale_dtype == "float32":
            out[name + "_scale_inv"] = grid
        else:
            bits = (grid.log2() + 127).to(torch.uint8)
            out[name + "_scale_inv"] = bits if scale_dtype == "uint8" else bits.view(torch.float8_e8m0fnu)
    return out


def dequantize_fp8(
    tensors: dict[str, Tensor], block: int = 128, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The same checkpoint in plain floats, independent of the engine's loader, as an oracle's input."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        if scale is None:
            out[name] = tensor
            continue
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.float() - 127)
        whole = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
        out[name] = (tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]).to(dtype)
    return out
