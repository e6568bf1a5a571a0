"""FP8, FP4 and bitsandbytes weights by their definitions, in numpy, written independently of the engine's loaders.

Each writer returns a matrix's tensors by the end of their names, and its values.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.fp8 import is_quantized

Written = tuple[dict[str, Tensor], Tensor]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def _fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    data = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return data, data.float() * scale


def rows_fp8(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    data, values = _fp8(weight, scale)
    return {".weight": data, ".weight_scale": scale}, values


def flat_rows_fp8(weight: Tensor) -> Written:
    stored, values = rows_fp8(weight)
    return {**stored, ".weight_scale": stored[".weight_scale"].flatten()}, values


def matrix_fp8(weight: Tensor) -> Written:
    """A matrix in FP8 with a static activation scale."""
    scale = weight.abs().amax() / 448
    data, values = _fp8(weight, scale)
    return {".weight": data, ".weight_scale": scale, ".input_scale": torch.tensor(0.1)}, values


def scalar_fp8(weight: Tensor) -> Written:
    """The same without an activation scale."""
    stored, values = matrix_fp8(weight)
    return {end: tensor for end, tensor in stored.items() if end != ".input_scale"}, values


def published_fp8(weight: Tensor) -> Written:
    """The same in transformers' names, as Ministral 3 is published."""
    scale = weight.abs().amax() / 448
    data, values = _fp8(weight, scale)
    return {".weight": data, ".weight_scale_inv": scale, ".activation_scale": torch.tensor(0.1)}, values


def fused_fp8(weight: Tensor, halves: bool) -> Written:
    """Experts of a layer [E, N, K] with a scale for each, or for gate and up of each."""
    grouped = weight.unflatten(1, (2 if halves else 1, -1))
    scale = grouped.abs().amax((2, 3), keepdim=True) / 448
    data, values = _fp8(grouped, scale)
    found = {"": data.flatten(1, 2), "_scale_inv": scale.flatten(2), "_activation_scale": torch.rand(len(weight))}
    return found, values.flatten(1, 2)


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, float, Tensor]:
    grouped = weight.numpy().reshape(len(weight), -1, 16)
    whole = float(np.abs(grouped).max()) / (6 * 448)
    scales = torch.from_numpy(np.abs(grouped).max(-1) / 6 / whole).to(torch.float8_e4m3fn)
    real = np.maximum(scales.float().numpy() * whole, 1e-12)[..., None]
    codes = _nearest(grouped / real, E2M1)
    flat = codes.reshape(len(weight), -1)
    packed = torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << 4)
    values = E2M1[codes] * (scales.float().numpy() * np.float32(whole))[..., None]
    return packed, scales, whole, torch.from_numpy(values.reshape(weight.shape).astype(np.float32))


def nvfp4(weight: Tensor) -> Written:
    packed, scales, whole, values = _nvfp4(weight)
    return {".weight": packed, ".weight_scale": scales, ".weight_scale_2": torch.tensor(whole),
            ".input_scale": torch.tensor(1.0)}, values  # fmt: skip


def nvfp4_compressed(weight: Tensor) -> Written:
    packed, scales, whole, values = _nvfp4(weight)
    divisor = torch.tensor([1 / whole])
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": divisor}, values


def mxfp4(weight: Tensor) -> Written:
    grouped = weight.numpy().reshape(len(weight), -1, 32)
    powers = np.ceil(np.log2(np.abs(grouped).max(-1) / 6)).astype(np.int32)
    codes = _nearest(grouped / np.exp2(powers)[..., None], E2M1)
    flat = codes.reshape(len(weight), -1)
    values = (E2M1[codes] * np.exp2(powers)[..., None]).reshape(weight.shape).astype(np.float32)
    packed = torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << 4)
    return {".weight_packed": packed, ".weight_scale": torch.from_numpy((powers + 127).astype(np.uint8))}, (
        torch.from_numpy(values)
    )


def mxfp8(weight: Tensor, end: str = "_inv") -> Written:
    """A power of two for 32 columns of a row; the last ones may be fewer."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    powers = (padded.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
    data, values = _fp8(weight, powers.exp2().repeat_interleave(32, 1)[:, : weight.shape[1]])
    return {".weight": data, f".weight_scale{end}": (powers + 127).to(torch.uint8)}, values


def modelopt_mxfp8(weight: Tensor) -> Written:
    return mxfp8(weight, "")


def nf4(weight: Tensor, nested: bool = False) -> Written:
    flat = weight.numpy().reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    absmax = np.abs(blocks).max(1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    more = {}
    if nested:
        offset, levels = float(absmax.mean()), np.linspace(-1, 1, 256).astype(np.float32)
        padded = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = np.abs(padded).max(1).astype(np.float32)
        codes = _nearest(padded / outer[:, None], levels)
        absmax = (levels[codes] * outer[:, None] + np.float32(offset)).reshape(-1)[: len(absmax)].astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        more = {
            ".weight.absmax": torch.from_numpy(codes.reshape(-1)[: len(absmax)].copy()),
            ".weight.nested_absmax": torch.from_numpy(outer),
            ".weight.nested_quant_map": torch.from_numpy(levels),
        }
    index = _nearest(blocks / np.maximum(absmax, 1e-12)[:, None], NF4).reshape(-1)[: len(flat)]
    values = NF4[index] * np.repeat(absmax, 64)[: len(flat)]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    stored = {".weight": torch.from_numpy(index[::2] << 4 | index[1::2]).unsqueeze(1),
              ".weight.absmax": torch.from_numpy(absmax), ".weight.quant_map": torch.from_numpy(NF4),
              ".weight.quant_state.bitsandbytes__nf4": torch.from_numpy(text)}  # fmt: skip
    return stored | more, torch.from_numpy(values.reshape(weight.shape).astype(np.float32))


def nested_nf4(weight: Tensor) -> Written:
    return nf4(weight, nested=True)


def int8_rows(weight: Tensor) -> Written:
    most = weight.abs().amax(1)
    data = (weight * (127 / most[:, None])).round().to(torch.int8)
    return {".weight": data, ".SCB": most, ".weight_format": torch.tensor([0], dtype=torch.uint8)}, (
        data.float() * most[:, None] / 127
    )


def blocks_fp8(weight: Tensor) -> Written:
    """Blocks of 128 rows and columns, smaller at the edges."""
    (rows, cols), grid = weight.shape, tuple(-(-size // 128) for size in weight.shape)
    padded = torch.zeros(grid[0] * 128, grid[1] * 128)
    padded[:rows, :cols] = weight
    blocks = padded.unflatten(0, (grid[0], 128)).unflatten(2, (grid[1], 128)).transpose(1, 2)
    scale = blocks.abs().amax((2, 3)) / 448
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    data, values = _fp8(weight, whole)
    return {".weight": data, ".weight_scale": scale.to(torch.float32)}, values


def modelopt_blocks(weight: Tensor) -> Written:
    """The same with either of ModelOpt's layouts of the scales."""
    parts, values = blocks_fp8(weight)
    scale = parts.pop(".weight_scale")
    if random.random() < 0.5:
        return parts | {".weight_scale_inv": scale}, values
    return parts | {".weight_scale": scale[:, None, :, None]}, values


def _compressed(form: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
_BNB4 = _BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fbgemm_fp8": (rows_fp8, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}),
    "w8a8_fp8": (flat_rows_fp8, {"quant_method": "w8a8_fp8"}),
    "fp8, static": (matrix_fp8, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "fp8, dynamic, no blocks": (scalar_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8, static, published": (
        published_fp8,
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
        | {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
    ),
    "modelopt": (matrix_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "mxfp8": (
        mxfp8,
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "fmt": "e4m3"}
        | {"scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]},
    ),
    "modelopt mxfp8": (modelopt_mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}),
    "modelopt blocks": (
        modelopt_blocks,
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
    ),
    "compressed mxfp8": (modelopt_mxfp8, _compressed("mxfp8-quantized", 8, "group", group_size=32)),
    "compressed fp8, rows": (rows_fp8, _compressed("float-quantized", 8, "channel")),
    "compressed fp8, matrix": (matrix_fp8, _compressed("float-quantized", 8, "tensor")),
    "compressed fp8, blocks": (blocks_fp8, _compressed("float-quantized", 8, "block", block_structure=[128, 128])),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}),
    "compressed nvfp4": (nvfp4_compressed, _compressed("nvfp4-pack-quantized", 4, "tensor_group")),
    "compressed mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", 4, "group")),
    "nf4": (nf4, _BNB4),
    "nf4, nested": (nested_nf4, _BNB4 | {"bnb_4bit_use_double_quant": True}),
    "bitsandbytes int8": (int8_rows, _BNB | {"load_in_8bit": True}),
}
"""By name: the writer of a matrix, and `quantization_config`."""


def quantize_floats(tensors: dict[str, Tensor], name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the stored tensors, plain tensors with their values)."""
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not is_quantized(key):
            stored[key] = plain[key] = tensor
            continue
        parts, plain[key] = FLOATS[name][0](tensor.float())
        stored |= {key.removesuffix(".weight") + end: part.clone() for end, part in parts.items()}
    return stored, plain
