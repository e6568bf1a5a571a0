"""Blocks of GGUF files: their values, and their codes for kernels.

Legend: R rows, B blocks of a row, S bytes of a block, n numbers of a block. Layouts: ggml's ggml-common.h.

Q4_0: scale float16, 16 bytes: number j in the low half of byte j, number j + 16 in the high half; value
(code - 8) * scale. Q4_1: scale and least value float16, the same codes; value code * scale + least. Q5_0: as Q4_0 with
4 bytes before the codes, bit j the fifth bit of number j; value (code - 16) * scale. Q8_0: scale float16, 32 int8.
Q4_K: scale and offset float16, 8 pairs of 6 bits (a factor for each of them) in 12 bytes, 128 bytes of codes: value
scale * factor * code - offset * factor'. Q5_K: as Q4_K with 32 bytes before the codes, bit r of byte j the fifth bit of
number j of run r. Q6_K: 128 bytes with the low four bits, 64 with the high two, 16 factors int8, scale float16; value
scale * factor * (code - 32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.quantization.codes import CodedWeight


def values_of(type: str, blocks: Tensor) -> Tensor:
    """blocks uint8 [R, B, S] -> float32 [R, B * n]."""
    if type in _OFFSETS:
        shifted, pairs, factors = _OFFSETS[type](blocks)
        repeat = factors.shape[1] // pairs.shape[1]
        both = pairs.float().repeat_interleave(repeat, 1) * factors.float()  # [R, groups, 2]
        return (shifted.float() * both[..., :1] - both[..., 1:]).flatten(1)
    codes, scales, middle = _codes_of(type, blocks)
    return ((codes.float() - middle) * scales.float().unsqueeze(-1)).flatten(1)


def codes_into(type: str, blocks: Tensor, out: CodedWeight) -> None:
    """The same values as codes with a scale for each group."""
    if type in _OFFSETS:
        assert out.factors is not None
        codes, pairs, factors = _OFFSETS[type](blocks)
        out.codes.copy_((codes if out.format.bits == 4 else codes + out.format.middle).flatten(1))
        out.scales.copy_(pairs)
        out.factors.copy_(factors)
        return
    codes, scales, middle = _codes_of(type, blocks)
    shift = out.format.middle - middle
    out.codes.copy_((codes + shift if shift else codes).flatten(1))
    out.scales.copy_(scales.flatten(1))


def wide_codes_into(type: str, blocks: Tensor, out: CodedWeight) -> None:
    """The same values as codes of 8 bits in groups of 16 columns, with a scale and an offset for two groups."""
    assert out.factors is not None
    middle = out.format.middle
    if type in _OFFSETS:
        codes, pairs, factors = _OFFSETS[type](blocks)
        out.codes.copy_((codes + middle).flatten(1))
        out.scales.copy_(pairs.repeat_interleave(out.scales.shape[1] // pairs.shape[1], 1))
        out.factors.copy_(factors.repeat_interleave(2, 1))
        return
    out.scales[..., 1], out.factors[..., 1] = 0, 0
    if type == "Q6_K":  # a factor's sign moves to its codes
        codes, _, own = _q6_k(blocks)
        signed = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).short()  # [R, groups]
        out.codes.copy_(((codes.short() - own) * signed.sign().unsqueeze(-1) + middle).flatten(1))
        out.factors[..., 0] = signed.abs()
        out.scales[..., 0] = _half(blocks, 208).flatten(1).repeat_interleave(8, 1)
        return
    codes, scales, own = _codes_of(type, blocks)
    out.codes.copy_((codes + (middle - own)).flatten(1))
    out.scales[..., 0], out.factors[..., 0] = scales, 1


def _codes_of(type: str, blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes uint8 [R, groups, n], scales [R, groups] in the dtype that represents them exactly, and the code of 0."""
    if type == "Q4_0":
        packed = blocks[..., 2:]
        return torch.cat((packed & 15, packed >> 4), -1), _half(blocks, 0).flatten(1), 8
    if type == "Q5_0":
        packed = blocks[..., 6:]
        low = torch.cat((packed & 15, packed >> 4), -1)
        bits = blocks[..., 2:6].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
        return low | bits.flatten(-2) << 4, _half(blocks, 0).flatten(1), 16
    if type == "Q8_0":
        return blocks[..., 2:] ^ 128, _half(blocks, 0).flatten(1), 128
    return _q6_k(blocks)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block, [R, B, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    rows, count, _ = blocks.shape
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    low = torch.cat((low & 15, low >> 4), -1)  # for each half of a block: 128 numbers in runs of 32
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).view(rows, count * 16, 16)
    factors = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = factors * _half(blocks, 208).float()
    return codes, scales.flatten(1), 32


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of each block, float16 [R, B, 2], and the factors of its 8 runs, uint8 [R, 8 B, 2]."""
    packed = blocks[..., 4:16]
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    offsets = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    return torch.cat((_half(blocks, 0), _half(blocks, 2)), -1), torch.stack((factors, offsets), -1).flatten(1, 2)


def _runs(packed: Tensor) -> Tensor:
    """128 bytes -> 8 runs of 32 codes of 4 bits, [R, B, 8, 32]."""
    halves = packed.unflatten(-1, (4, 1, 32))
    return torch.cat((halves & 15, halves >> 4), -2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _runs(blocks[..., 16:]).flatten(1, 2), *_pairs(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1  # [R, B, 8, 32]
    return (_runs(blocks[..., 48:]) | high << 4).flatten(1, 2), *_pairs(blocks)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    packed = blocks[..., 4:]
    pairs = torch.cat((_half(blocks, 0), -_half(blocks, 2)), -1)
    return torch.cat((packed & 15, packed >> 4), -1), pairs, torch.ones_like(pairs, dtype=torch.uint8)


_OFFSETS = {"Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_K": _q5_k}
"""Types with offsets: blocks -> codes uint8 [R, groups, 32], scales and offsets float16 [R, B, 2], their factors uint8
[R, groups, 2]."""
