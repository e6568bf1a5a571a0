"""MXFP4 weights of experts in Triton: their memory, and one step of a product with them.

A number has 4 bits (e2m1), two are in a byte, the first in the low bits; 32 numbers of a row share a power of two
(e8m0). Codes are in the order of checkpoints. Scales are ordered by steps of 128 columns, so that a tile reads the
scales of its rows from consecutive addresses; missing columns of the last step have scale 2^-127.

Legend: N rows and K columns of a weight, S steps of 128 columns. Source: OCP Microscaling specification 1.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.quantization.codes import MXFP4_GROUP, CodedWeight

STEP = 128
"""Columns of a step of the products: `ExpertTiles.block_k`."""
STEP_SCALES = STEP // MXFP4_GROUP
_SCALES = tl.constexpr(STEP_SCALES)
_GROUP = tl.constexpr(MXFP4_GROUP)
_FRACTION_BITS = 7  # of bfloat16, below its exponent, which has the bias of e8m0


def empty(num_experts: int, n: int, k: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Memory for weights [N, K]: codes uint8 [E, N, K / 2], scales uint8 [E, S, N, 4]."""
    codes = torch.empty(num_experts, n, k // 2, dtype=torch.uint8, device=device)
    return codes, torch.zeros(num_experts, -(-k // STEP), n, STEP_SCALES, dtype=torch.uint8, device=device)


def store(weight: CodedWeight, codes: Tensor, scales: Tensor) -> None:
    """Writes a weight [N, K], whose scales are powers of two, to codes [N, K / 2] and scales [S, N, 4]."""
    pairs = weight.codes.unflatten(1, (-1, 2))
    codes.copy_(pairs[..., 0] | (pairs[..., 1] << 4))
    exponents = (weight.scales.view(torch.int16) >> _FRACTION_BITS).to(torch.uint8)  # [N, K / 32]
    steps = F.pad(exponents, (0, STEP_SCALES * len(scales) - exponents.shape[1])).unflatten(1, (-1, STEP_SCALES))
    scales.copy_(steps.transpose(0, 1))


@triton.jit
def scale_tile(scales, expert, rows, NUM_ROWS: tl.constexpr, STEPS: tl.constexpr):
    """Pointers [rows, 4] to the scales of the first step, of `rows` of an expert with NUM_ROWS; the next step follows
    after NUM_ROWS * 4."""
    lane = tl.arange(0, _SCALES)
    return scales + expert.to(tl.int64) * (STEPS * NUM_ROWS * _SCALES) + rows[:, None] * _SCALES + lane[None, :]


@triton.jit
def load_scales(tile, step, NUM_ROWS: tl.constexpr):
    """Scales [rows, 4] of a step."""
    return tl.load(tile + step * (NUM_ROWS * _SCALES))


@triton.jit
def add_mxfp4_product(total, x, codes, scales, SWAP_AB: tl.constexpr):
    """total + x [M, 128] @ w [N, 128].T in float32, as [M, N], or with SWAP_AB as its transpose [N, M]; codes
    [N, 64], scales [N, 4]. The compiler decodes to bfloat16, which is exact; other dtypes are decoded here."""
    if x.dtype == tl.bfloat16:
        if SWAP_AB:
            total = tl.dot_scaled(codes, scales, "e2m1", tl.trans(x), None, "bf16", total, fast_math=True)
        else:
            total = tl.dot_scaled(x, None, "bf16", tl.trans(codes), scales, "e2m1", total, fast_math=True)
    else:
        w = decoded(codes, scales).to(x.dtype)
        if SWAP_AB:
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def decoded(codes, scales):
    """codes [N, K / 2], scales [N, K / 32] -> float32 [N, K]."""
    values = tl.join(_e2m1(codes & 15), _e2m1(codes >> 4))  # [N, K / 2, 2]
    powers = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    grouped = tl.reshape(values, (scales.shape[0], scales.shape[1], _GROUP)) * powers[:, :, None]
    return tl.reshape(grouped, (codes.shape[0], codes.shape[1] * 2))


@triton.jit
def _e2m1(code):
    """The value of a code of 0 to 15 as float32: a sign, two bits of exponent (0: no leading 1), one of fraction."""
    code = code.to(tl.int32)
    exponent, fraction = (code >> 1) & 3, code & 1
    value = (((exponent + 126) << 23) | (fraction << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, fraction.to(tl.float32) * 0.5, value)
    return tl.where(code >= 8, -value, value)
