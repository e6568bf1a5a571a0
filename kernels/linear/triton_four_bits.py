"""Weights in 4 bits in Triton: their memory, and one step of a product with them.

    form        number                          scale
    mxfp4       e2m1                            e8m0 of 32 columns
    nvfp4       e2m1                            e4m3 of 16 columns, and a float32 factor of the matrix or a row
    int4        code - 8                        of 32, 64 or 128 columns, in the checkpoint's dtype
    int4_zeros  code - zero point of a group    the same, each next to its zero point

Two numbers are in a byte. MXFP4 keeps the order of checkpoints, neighbors in a byte, which the compiler decodes. In
the other forms byte j of a block of 32 columns holds columns j and j + 16: all low bits of a step and all high bits are
operands of a product each, with their own columns of x, and no thread needs a number that another one has loaded.
Scales are ordered by steps of 128 columns, so that a tile reads the scales of its rows from consecutive addresses;
those of missing columns of the last step are 0.

Legend: N rows and K columns of a weight, S steps, G scales of a row and step (with zero points twice as many numbers).
Sources: OCP Microscaling specification 1.0; ModelOpt (NVFP4); compressed-tensors, AutoAWQ, GPTQModel (integers).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.linear.products import add_product
from moe_engine.kernels.quantization.codes import MXFP4_GROUP, STEP, CodedWeight, GroupCodes

HALF = 16
"""Columns between the two numbers of a byte, except in MXFP4."""
_GROUP = tl.constexpr(MXFP4_GROUP)
_HALF = tl.constexpr(HALF)
_FRACTION_BITS = 7  # of bfloat16, below its exponent, which has the bias of e8m0


def form_of(format: GroupCodes) -> str:
    """The kernels' name of a `four_bits` form."""
    if format.mxfp4:
        return "mxfp4"
    return "nvfp4" if format.nvfp4 else "int4_zeros" if format.zeros else "int4"


def scales_of_step(format: GroupCodes) -> int:
    """Numbers that a row has in addition to the codes of a step."""
    return STEP // min(format.group, STEP) * (2 if format.zeros else 1)


def scales_dtype(format: GroupCodes) -> torch.dtype:
    """Dtype of the scales in memory."""
    if format.mxfp4:
        return torch.uint8
    found: torch.dtype = torch.float8_e4m3fn if format.nvfp4 else getattr(torch, format.scales)
    return found


def constants_of(format: GroupCodes | None) -> dict[str, Any]:
    """Constants of a kernel that multiplies weights of this form; None: other weights."""
    if format is None:
        return {"FORM": "", "SCALES": 0}
    return {"FORM": form_of(format), "SCALES": scales_of_step(format)}


def options_of(format: GroupCodes | None) -> dict[str, int]:
    """Options of the compiler. Without a limit it spills some registers of operands in two halves for more programs on
    an SM (sm_100)."""
    return {} if format is None or format.mxfp4 else {"maxnreg": 255}


def empty(format: GroupCodes, num_experts: int, n: int, k: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Memory for weights [N, K]: codes uint8 [E, N, K / 2], scales [E, S, N, `scales_of_step`]."""
    codes = torch.empty(num_experts, n, k // 2, dtype=torch.uint8, device=device)
    steps = num_experts, -(-k // STEP), n, scales_of_step(format)
    return codes, torch.zeros(steps, dtype=scales_dtype(format), device=device)


def store(weight: CodedWeight, codes: Tensor, scales: Tensor) -> None:
    """Writes a weight [N, K] to codes [N, K / 2] and scales [S, N, `scales_of_step`]; those of NVFP4 without
    `weight.whole`."""
    if weight.format.mxfp4:
        low, high = weight.codes.unflatten(1, (-1, 2)).unbind(2)
    else:
        low, high = (half.flatten(1) for half in weight.codes.unflatten(1, (-1, 2, HALF)).unbind(2))
    codes.copy_(low | (high << 4))
    numbers = _numbers(weight)
    missing = len(scales) * scales.shape[2] - numbers.shape[1]
    steps = F.pad(numbers, (0, missing)).unflatten(1, (len(scales), -1)).transpose(0, 1)
    (scales.view(torch.uint8) if weight.format.nvfp4 else scales).copy_(steps)


def _numbers(weight: CodedWeight) -> Tensor:
    """Scales of rows as they are stored, [N, .]; of NVFP4 their bytes."""
    format, scales = weight.format, weight.scales
    if format.mxfp4:
        return (scales.view(torch.int16) >> _FRACTION_BITS).to(torch.uint8)
    if format.nvfp4:
        assert weight.whole is not None
        factor = torch.where(weight.whole == 0, 1.0, weight.whole)  # of a matrix of zeros
        return (scales.float() / factor[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    if weight.zeros is not None:
        scales = torch.stack((scales, weight.zeros.to(scales.dtype)), -1)
    repeats = max(1, format.group // STEP)
    return scales.repeat_interleave(repeats, 1).flatten(1) if repeats > 1 else scales.flatten(1)


@triton.jit
def first_columns(FORM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of a step that `x` of `add_four_bits` holds: all, or those of the low bits; high bits are `HALF` on."""
    if FORM == "" or FORM == "mxfp4":
        columns = tl.arange(0, BLOCK_K)
    else:
        number = tl.arange(0, BLOCK_K // 2)
        columns = number // _HALF * (2 * _HALF) + number % _HALF
    return columns


@triton.jit
def scale_tile(scales, rows, SCALES: tl.constexpr, FORM: tl.constexpr):
    """Pointers [rows, G] to the scales of the first step, of `rows` of a matrix; SCALES numbers a row and step. Of
    NVFP4 the scale of high bits follows that of low bits, as a zero point follows its scale."""
    PAIR: tl.constexpr = 2 if FORM == "nvfp4" or FORM == "int4_zeros" else 1
    lane = tl.arange(0, SCALES // PAIR) * PAIR
    return scales + rows[:, None] * SCALES + lane[None, :]


@triton.jit
def add_four_bits(
    total, x, high, codes, scales, step, NUM_ROWS: tl.constexpr, SCALES: tl.constexpr, FORM: tl.constexpr,
    SWAP_AB: tl.constexpr,
):  # fmt: skip
    """total + x [M, 128] @ w [N, 128].T in float32, as [M, N], or with SWAP_AB as its transpose [N, M]; codes
    [N, 64]. Except in MXFP4 x and `high` [M, 64] are the columns of the low and of the high bits. NVFP4: without
    `whole_factor`.

    Args:
        scales: of `scale_tile`.
    """
    place = scales + step * (NUM_ROWS * SCALES)
    scale = tl.load(place)
    if FORM == "mxfp4":
        total = _add_mxfp4(total, x, codes, scale, SWAP_AB)
    elif FORM == "nvfp4":
        total = add_product(total, x, _fp4_half(codes & 15, scale, x), 1.0, 1.0, SWAP_AB, False)
        total = add_product(total, high, _fp4_half(codes >> 4, tl.load(place + 1), x), 1.0, 1.0, SWAP_AB, False)
    else:
        if FORM == "int4_zeros":
            zero = tl.load(place + 1)
        else:
            zero = tl.full(scale.shape, 8.0, scale.dtype)
        total = add_product(total, x, _int4_half(codes & 15, scale, zero, x), 1.0, 1.0, SWAP_AB, False)
        total = add_product(total, high, _int4_half(codes >> 4, scale, zero, x), 1.0, 1.0, SWAP_AB, False)
    return total


@triton.jit
def whole_factor(place, x):
    """The factor of a finished sum of NVFP4: that of the matrix or the rows at `place`, without the power of two of
    `_fp4_half`. x: pointer to the rows."""
    factor = tl.load(place)
    if x.dtype.element_ty == tl.bfloat16:
        factor *= 67108864.0  # 2^26
    elif x.dtype.element_ty == tl.float16:
        factor *= 128.0
    return factor


@triton.jit
def _int4_half(codes, scale, zero, like):
    """(code - zero) * scale [N, 64] in the dtype of `like`: codes [N, 64], scale and zero [N, G]. With 16 bits, a code
    in the last bits of a power of two is that power and the code: no conversion, and the difference is exact."""
    if like.dtype == tl.bfloat16:
        numbers = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)  # 128 + code
        offset = (zero.to(tl.float32) + 128.0).to(tl.bfloat16)
    elif like.dtype == tl.float16:
        numbers = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)  # 1024 + code
        offset = (zero.to(tl.float32) + 1024.0).to(tl.float16)
    else:
        numbers = codes.to(tl.float32)
        offset = zero.to(tl.float32)
    groups = tl.reshape(numbers, (codes.shape[0], scale.shape[1], codes.shape[1] // scale.shape[1]))
    groups = groups - offset[:, :, None]
    if scale.dtype == like.dtype:
        groups = groups * scale[:, :, None]
    else:  # one rounding, of the exact product
        groups = (groups.to(tl.float32) * scale.to(tl.float32)[:, :, None]).to(like.dtype)
    return tl.reshape(groups, (codes.shape[0], codes.shape[1]))


@triton.jit
def _fp4_half(codes, scale, like):
    """Number times scale [N, 64], exact, in the dtype of `like`: codes [N, 64], scale e4m3 [N, G]. With 16 bits, the
    three bits of a magnitude are the last of an exponent and the first of a fraction, so that codes are the numbers
    times a power of two, also that of 0.5, which is subnormal. bfloat16: times 2^-26 in all, float16: 2^-7."""
    if like.dtype == tl.bfloat16:
        bits = ((codes & 7).to(tl.uint16) << 6) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.bfloat16, bitcast=True)  # times 2^-126
        factor = (scale.to(tl.float32) * 1.2676506002282294e30).to(tl.bfloat16)  # 2^100
    elif like.dtype == tl.float16:
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.float16, bitcast=True)  # times 2^-14
        factor = (scale.to(tl.float32) * 128.0).to(tl.float16)
    else:
        numbers = _e2m1(codes)
        factor = scale.to(tl.float32)
    groups = tl.reshape(numbers, (codes.shape[0], scale.shape[1], codes.shape[1] // scale.shape[1]))
    return tl.reshape(groups * factor[:, :, None], (codes.shape[0], codes.shape[1]))


@triton.jit
def _add_mxfp4(total, x, codes, scales, SWAP_AB: tl.constexpr):
    """`add_four_bits` of MXFP4. The compiler decodes to bfloat16, which is exact; other dtypes are decoded here."""
    if x.dtype == tl.bfloat16:
        if SWAP_AB:
            total = tl.dot_scaled(codes, scales, "e2m1", tl.trans(x), None, "bf16", total, fast_math=True)
        else:
            total = tl.dot_scaled(x, None, "bf16", tl.trans(codes), scales, "e2m1", total, fast_math=True)
    else:
        total = add_product(total, x, _decoded(codes, scales).to(x.dtype), 1.0, 1.0, SWAP_AB, False)
    return total


@triton.jit
def _decoded(codes, scales):
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
