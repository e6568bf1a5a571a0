"""Integer formats by their definitions, in numpy, written independently of the engine's loaders.

`quantize(tensors, layout, ...)` returns the tensors of a checkpoint in that layout and the same weights dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.fp8 import is_quantized

AWQ_PACK = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Codes:
    """q [N, K] of 0 to 2^bits - 1, scales and zeros [N, G], and the group of each column."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def values(self) -> np.ndarray:
        return (self.q.astype(np.float32) - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def codes_of(
    weight: np.ndarray, bits: int, group: int, symmetric: bool, shuffled: bool, scale_dtype: torch.dtype, rng: Any
) -> Codes:
    """Round to nearest. `group` 0: a scale per row. `shuffled`: columns belong to groups in any order (act-order)."""
    n, k = weight.shape
    size = group or k
    groups = np.arange(k) // size
    if shuffled:
        groups = rng.permutation(groups)
    count, top = groups.max() + 1, 2**bits - 1
    scales, zeros = np.zeros((n, count), np.float32), np.zeros((n, count), np.float32)
    for g in range(count):
        part = weight[:, groups == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / (2 ** (bits - 1) - 1), 2 ** (bits - 1)
        else:
            scales[:, g] = (high - low) / top
        scales[:, g] = torch.tensor(scales[:, g]).clamp_min(1e-6).to(scale_dtype).float().numpy()
        if not symmetric:
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, top)
    q = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.uint8)
    return Codes(q, scales, zeros, groups)


def pack(values: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """[R, C] -> int32 [R, ceil(C * bits / 32)], the first value in the lowest bits."""
    per = 32 // bits
    padded = np.zeros((len(values), -(-values.shape[1] // per) * per), np.uint32)
    padded[:, : values.shape[1]] = values
    parts = padded.reshape(len(values), -1, per)
    if order is not None:
        parts = parts[:, :, order]
    packed = np.zeros(parts.shape[:2], np.uint32)
    for i in range(per):
        packed |= parts[:, :, i] << np.uint32(i * bits)
    return torch.from_numpy(packed.view(np.int32).copy())


def _compressed(prefix: str, codes: Codes, bits: int, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    out = {
        f"{prefix}.weight_packed": pack(codes.q, bits),
        f"{prefix}.weight_scale": torch.from_numpy(codes.scales).to(dtype),
        f"{prefix}.weight_shape": torch.tensor(codes.q.shape),
    }
    if not options["symmetric"]:
        out[f"{prefix}.weight_zero_point"] = pack(codes.zeros.T.astype(np.uint8), bits).t().contiguous()
    if options["shuffled"]:
        out[f"{prefix}.weight_g_idx"] = torch.from_numpy(codes.groups.astype(np.int32))
    return out


def _bytes(prefix: str, codes: Codes, bits: int, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    def signed(x: np.ndarray) -> Tensor:
        return torch.from_numpy((x.astype(np.int16) - 128).astype(np.int8))

    out = {f"{prefix}.weight": signed(codes.q), f"{prefix}.weight_scale": torch.from_numpy(codes.scales).to(dtype)}
    return out if options["symmetric"] else out | {f"{prefix}.weight_zero_point": signed(codes.zeros)}


def _awq(prefix: str, codes: Codes, bits: int, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        f"{prefix}.qweight": pack(codes.q.T, bits, AWQ_PACK),
        f"{prefix}.qzeros": pack(codes.zeros.T.astype(np.uint8), bits, AWQ_PACK),
        f"{prefix}.scales": torch.from_numpy(codes.scales.T.copy()).to(dtype),
    }


def _gptq(prefix: str, codes: Codes, bits: int, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    zeros = (codes.zeros - (0 if options.get("v2") else 1)).astype(np.uint8)
    return {
        f"{prefix}.qweight": pack(codes.q, bits).t().contiguous(),
        f"{prefix}.qzeros": pack(zeros.T, bits),
        f"{prefix}.scales": torch.from_numpy(codes.scales.T.copy()).to(dtype),
        f"{prefix}.g_idx": torch.from_numpy(codes.groups.astype(np.int32)),
    }


WRITERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "pack-quantized": _compressed, "int-quantized": _bytes, "w8a8_int8": _bytes, "awq": _awq, "gptq": _gptq,
}  # fmt: skip


def quantize(
    tensors: dict[str, Tensor],
    layout: str,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    shuffled: bool = False,
    seed: int = 0,
    chosen: Callable[[str], bool] = is_quantized,
    **more: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the stored tensors, plain tensors with their values)."""
    rng = np.random.default_rng(seed)
    scale_dtype = torch.float16 if layout in ("awq", "gptq") else torch.bfloat16
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    options = {"symmetric": symmetric, "shuffled": shuffled, **more}
    for name, tensor in tensors.items():
        if not chosen(name):
            stored[name] = plain[name] = tensor
            continue
        codes = codes_of(tensor.float().numpy(), bits, group, symmetric, shuffled, scale_dtype, rng)
        stored |= WRITERS[layout](name.removesuffix(".weight"), codes, bits, options, scale_dtype)
        plain[name] = torch.from_numpy(codes.values())
    return stored, plain


def section(layout: str, bits: int = 4, group: int = 32, symmetric: bool = True, shuffled: bool = False,
            ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> dict[str, Any]:  # fmt: skip
    """`quantization_config` of a checkpoint of that layout."""
    if layout == "w8a8_int8":
        return {"quant_method": "w8a8_int8"}
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    if layout == "gptq":
        found = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group or -1,
            "sym": symmetric,
            "desc_act": shuffled,
        }
        return found | ({"checkpoint_format": "gptq_v2"} if more.get("v2") else {})
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "actorder": "group" if shuffled else None, "dynamic": False,
    }  # fmt: skip
    acts = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts if bits == 8 else None}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": list(ignore),
        "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip
