"""Blocks of GGUF files: their values, and their codes for kernels.

Legend: R rows, B blocks of a row, S bytes of a block, n numbers of a block, r a run of 32 numbers. Layouts: ggml's
ggml-common.h.

Q4_0: scale float16, 16 bytes: number j in the low half of byte j, number j + 16 in the high half; value
(code - 8) * scale. Q4_1: scale and least value float16, the same codes; value code * scale + least. Q5_0, Q5_1: as Q4_0
and Q4_1 with 4 bytes before the codes, bit j the fifth bit of number j; the code of 0 in Q5_0 is 16. Q8_0: scale
float16, 32 int8. IQ4_NL: as Q4_0; value table[code] * scale. MXFP4: scale e8m0, codes as in Q4_0; value e2m1[code] *
2^(scale - 127).
Q4_K: scale and offset float16, 8 pairs of 6 bits (a factor for each of them) in 12 bytes, 128 bytes of codes: value
scale * factor * code - offset * factor'. Q5_K: as Q4_K with 32 bytes before the codes, bit r of byte j the fifth bit of
number j of run r. Q6_K: 128 bytes with the low four bits, 64 with the high two, 16 factors int8, scale float16; value
scale * factor * (code - 32). Q2_K: 16 pairs of 4 bits (factor, factor'), 64 bytes with four runs each 32, scale and
offset; as Q4_K. Q3_K: 32 bytes with the third bits as in Q5_K, 64 as in Q2_K, 16 factors of 6 bits in 12 bytes, scale;
value scale * (factor - 32) * (code - 4). IQ4_XS: scale, the high two bits of 8 factors in 2 bytes, the low four in 4,
128 bytes of codes by run as in Q4_0; value scale * (factor - 32) * table[code].
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.quantization.codes import FP4_VALUES, IQ4_VALUES, CodedWeight


def values_of(type: str, blocks: Tensor) -> Tensor:
    """blocks uint8 [R, B, S] -> float32 [R, B * n]."""
    if type in _OFFSETS:
        shifted, pairs, factors = _OFFSETS[type](blocks)
        repeat = factors.shape[1] // pairs.shape[1]
        both = pairs.float().repeat_interleave(repeat, 1) * factors.float()  # [R, groups, 2]
        return (shifted.float() * both[..., :1] - both[..., 1:]).flatten(1)
    codes, scales, middle = _codes_of(type, blocks)
    if type == "MXFP4":
        numbers = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])[codes.int()]
    else:
        numbers = _numbers(type, codes, middle).float()
    return (numbers * scales.float().unsqueeze(-1)).flatten(1)


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
    shift = 0 if type in (*_TABLES, "MXFP4") else out.format.middle - middle
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
        out.factors.copy_(factors.repeat_interleave(out.factors.shape[1] // factors.shape[1], 1))
        return
    out.scales[..., 1], out.factors[..., 1] = 0, 0
    codes, scales, own = _codes_of(type, blocks)
    numbers = _numbers(type, codes, own)
    if type in _SIGNED:  # a factor's sign moves to its codes
        scale, factors = _SIGNED[type](blocks)
        out.codes.copy_((numbers * factors.sign().unsqueeze(-1) + middle).flatten(1))
        out.factors[..., 0] = factors.abs().repeat_interleave(out.factors.shape[1] // factors.shape[1], 1)
        out.scales[..., 0] = scale.flatten(1).repeat_interleave(8, 1)
        return
    out.codes.copy_((numbers + middle).flatten(1))
    out.scales[..., 0], out.factors[..., 0] = scales, 1


def _numbers(type: str, codes: Tensor, middle: int) -> Tensor:
    """Codes uint8 -> the integers that they stand for, int16."""
    return torch.tensor(IQ4_VALUES, dtype=torch.int16)[codes.int()] if type in _TABLES else codes.short() - middle


def _codes_of(type: str, blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes uint8 [R, groups, n], scales [R, groups] in the dtype that represents them exactly, and the code of 0."""
    if type in _SIGNED:
        scale, factors = _SIGNED[type](blocks)
        scales = factors.float().unflatten(1, (blocks.shape[1], -1)) * scale.float()
        return _q6_k(blocks) if type == "Q6_K" else _halves(blocks[..., 8:], 16), scales.flatten(1), 32
    if type == "MXFP4":
        scales = torch.exp2(blocks[..., 0].float() - 127)
        return _halves(blocks[..., 1:], 16), scales, 0
    scales = _half(blocks, 0).flatten(1)
    if type == "Q5_0":
        return _five_bits(blocks[..., 2:]), scales, 16
    if type == "Q8_0":
        return blocks[..., 2:] ^ 128, scales, 128
    return _halves(blocks[..., 2:], 16), scales, 8


def _halves(packed: Tensor, count: int) -> Tensor:
    """Bytes [R, B, S] -> codes of 4 bits [R, groups, 2 * count]: of `count` bytes the low halves, then the high."""
    runs = packed.unflatten(-1, (-1, count))
    return torch.cat((runs & 15, runs >> 4), -1).flatten(1, 2)


def _five_bits(packed: Tensor) -> Tensor:
    """4 bytes with the fifth bits of 32 numbers, then 16 bytes with the others -> codes [R, B, 32]."""
    return _halves(packed[..., 4:], 16) | _bits(packed[..., :4].unsqueeze(-1)).flatten(-2) << 4


def _bits(x: Tensor) -> Tensor:
    """Bits of bytes, along the last dimension."""
    return x >> torch.arange(8, dtype=torch.uint8) & 1


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block, [R, B, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _q6_k(blocks: Tensor) -> Tensor:
    rows, count, _ = blocks.shape
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    low = torch.cat((low & 15, low >> 4), -1)  # for each half of a block: 128 numbers in runs of 32
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    return (low | high << 4).view(rows, count * 16, 16)


def _factors_of_q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _half(blocks, 208), blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).short()


def _factors_of_iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, pairs = blocks[..., 4:8].unsqueeze(-1), torch.arange(0, 8, 2, dtype=torch.uint8)
    low = torch.cat((low & 15, low >> 4), -1).flatten(-2)
    high = (blocks[..., 2:4].unsqueeze(-1) >> pairs & 3).flatten(-2)
    return _half(blocks, 0), (low | high << 4).flatten(1).short() - 32


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of each block, float16 [R, B, 2], and the factors of its 8 runs, uint8 [R, 8 B, 2]."""
    packed = blocks[..., 4:16]
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    offsets = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    return torch.cat((_half(blocks, 0), _half(blocks, 2)), -1), torch.stack((factors, offsets), -1).flatten(1, 2)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks[..., 16:], 32).view(len(blocks), -1, 32), *_pairs(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = _halves(blocks[..., 48:], 32).view(len(blocks), -1, 32)
    return low | _high_bits(blocks[..., 16:48]) << 4, *_pairs(blocks)


def _high_bits(packed: Tensor) -> Tensor:
    """32 bytes -> a bit of each number [R, 8 B, 32]: bit r of byte j for number j of run r."""
    return _bits(packed.unsqueeze(-1)).transpose(-1, -2).flatten(1, 2)


def _two_bits(packed: Tensor) -> Tensor:
    """64 bytes -> codes [R, 8 B, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    return (packed.unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(1, 3)


def _q2_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factors = torch.stack((blocks[..., :16] & 15, blocks[..., :16] >> 4), -1).flatten(1, 2)
    pairs = torch.cat((_half(blocks, 80), _half(blocks, 82)), -1)
    return _two_bits(blocks[..., 16:80]).view(len(blocks), -1, 16), pairs, factors


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Signs of factors move to the codes, which become 0 to 8; the offset is 4 scales."""
    low, high = blocks[..., 96:104], blocks[..., 104:108].unsqueeze(-2)
    low = torch.cat((low & 15, low >> 4), -1)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1) & 3).flatten(-2)
    factors = (low | high << 4).flatten(1).short() - 32
    codes = _two_bits(blocks[..., 32:96]) | _high_bits(blocks[..., :32]) << 2
    numbers = (codes.view(len(blocks), -1, 16).short() - 4) * factors.sign().unsqueeze(-1)
    scale, size = _half(blocks, 108), factors.abs().byte()
    return (numbers + 4).byte(), torch.cat((scale, 4 * scale), -1), torch.stack((size, size), -1)


def _of_blocks(codes: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a scale and a least value for each block."""
    pairs = torch.cat((_half(blocks, 0), -_half(blocks, 2)), -1)
    return codes, pairs, torch.ones_like(pairs, dtype=torch.uint8)


_TABLES = ("IQ4_NL", "IQ4_XS")
"""Types whose codes stand for the numbers of `IQ4_VALUES`."""
_SIGNED = {"Q6_K": _factors_of_q6_k, "IQ4_XS": _factors_of_iq4_xs}
"""Types whose groups have factors with a sign: blocks -> scales float16 [R, B, 1], factors int16 [R, groups]."""
_OFFSETS = {
    "Q4_1": lambda blocks: _of_blocks(_halves(blocks[..., 4:], 16), blocks),
    "Q5_1": lambda blocks: _of_blocks(_five_bits(blocks[..., 4:]), blocks),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
"""Types with offsets: blocks -> codes uint8 [R, groups, columns of a group], scales and offsets float16 [R, B, 2],
their factors uint8 [R, groups, 2]."""
