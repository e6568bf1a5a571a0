"""Per-head products whose result is quantized as it is computed: MLA's values on their way to an FP8 o_proj.

A head's N channels are whole blocks of 128, so a tile of the product holds all values that share a scale: no bf16 copy
of [T, H, N], and one launch instead of two.

Legend: T tokens, H heads, N out-features of a head, K in-features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.quantization.protocol import BLOCK, QuantizedActivation, QuantizedRows
from moe_engine.kernels.quantization.triton_rows import quantize_tile, store_scale
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows

_BLOCK = tl.constexpr(BLOCK)

_FEW_TOKENS = 16
_LONG = 1024
"""Channels beyond which a program of few tokens has more loads in flight: it reads a large part of the weight."""


@dependent_jit(do_not_specialize=["num_tokens", "scale_stride"])
def heads_quantize_kernel(
    x, weight, out, scales, num_tokens, x_stride, x_head_stride, scale_stride,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """out e4m3 [T, HEADS N] and scales of x[t, h] @ weight[h].T, rounded to x's dtype first. Grid (HEADS N / 128,
    T / BLOCK_T); weight [HEADS, N, K] is contiguous."""
    wait_for_inputs()
    block = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    head = block // (N // _BLOCK)
    column = tl.arange(0, _BLOCK)
    lane = tl.arange(0, BLOCK_K)
    x_tile = x + row[:, None] * x_stride + head * x_head_stride + lane[None, :]
    w_tile = weight + (block * _BLOCK + column)[None, :] * K + lane[:, None]
    total = tl.zeros((BLOCK_T, _BLOCK), tl.float32)
    for begin in range(0, K, BLOCK_K):
        inside = begin + lane < K
        a = tl.load(x_tile + begin, inside[None, :], 0.0)
        b = tl.load(w_tile + begin, inside[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    rounded = total.to(x.dtype.element_ty).to(tl.float32)
    quantized, scale = quantize_tile(rounded, POWER_OF_TWO)
    place = out + row[:, None] * (HEADS * N) + block * _BLOCK + column[None, :]
    tl.store(place, quantized, live[:, None])
    store_scale(scales, block, row, scale_stride, scale, live)


def heads_fit(n: int) -> bool:
    """True if a head's out-features are whole blocks."""
    return n % BLOCK == 0


def heads_quantized(
    x: Tensor, weight: Tensor, power_of_two: bool = False, deterministic: bool = False, exponents: bool = False
) -> QuantizedActivation:
    """x [T, H, K] x weight [H, N, K] -> [T, H N], quantized.

    Args:
        deterministic: the tiling does not depend on the number of tokens (batch-invariant results).

    Raises:
        ValueError: if the widths or dtypes differ, or `heads_fit` does not hold.
    """
    count, (heads, n, k) = x.shape[0], weight.shape
    if x.shape[1:] != (heads, k) or x.dtype != weight.dtype or not heads_fit(n):
        raise ValueError(f"rows {list(x.shape)} {x.dtype} do not fit a weight {list(weight.shape)} {weight.dtype}")
    rows, x = QuantizedRows.empty(count, heads * n, x.device, exponents=exponents), with_contiguous_rows(x)
    if count:
        constants, stages = _plan(count, heads, n, k, x.dtype, power_of_two, deterministic)
        heads_quantize_kernel[(heads * n // BLOCK, triton.cdiv(count, constants["BLOCK_T"]))](
            x, weight.contiguous(), rows.data, rows.scales, count, stride_of(x, 0), stride_of(x, 1), rows.scale_stride,
            **constants, num_warps=4, num_stages=stages,
        )  # fmt: skip
    return QuantizedActivation(rows, None, x.dtype)


def _plan(
    count: int, heads: int, n: int, k: int, dtype: torch.dtype, power_of_two: bool, deterministic: bool = False
) -> tuple[dict[str, Any], int]:
    """(constants, stages) for `count` tokens."""
    few = dtype == torch.float32 or (count <= _FEW_TOKENS and not deterministic)
    wide = 32 if dtype == torch.float32 else 128 if few else 64
    constants = {
        "HEADS": heads, "N": n, "K": k, "BLOCK_T": 16 if few else 64,
        "BLOCK_K": min(wide, max(16, next_power_of_2(k))), "POWER_OF_TWO": power_of_two,
    }  # fmt: skip
    return constants, 5 if few and k > _LONG else 3


def heads_case(
    label: str, heads: int, count: int, power_of_two: bool, dtype: torch.dtype = torch.bfloat16, n: int = 128,
    k: int = 512,
) -> AotCase:  # fmt: skip
    """The specialization that `heads_quantized` launches for `count` tokens; by default for DeepSeek's values."""
    constants, stages = _plan(count, heads, n, k, dtype, power_of_two)
    kind = f"*{element(dtype)}"
    signature = {
        "x": kind, "weight": kind, "out": "*fp8e4nv", "scales": "*fp32", "num_tokens": "i32", "x_stride": "i32:16",
        "x_head_stride": "i32:16", "scale_stride": "i32",
    }  # fmt: skip
    name = f"heads_quantize_{label}_{count}_{element(dtype)}"
    return AotCase(name, heads_quantize_kernel, signature, constants, 4, stages, dtype != torch.float32)


def aot_cases() -> list[AotCase]:
    """DeepSeek-V3 with all heads, and an eighth of them, for few and many tokens; V4-Flash's groups for few."""
    cases = [heads_case(f"{heads}h", heads, count, heads == 16) for heads in (16, 128) for count in (16, 128)]
    cases.append(heads_case("v4_flash_groups", 8, 16, True, n=1024, k=4096))
    return [*cases, heads_case("16h", 16, 128, False, torch.float32)]
