"""Blocks of GGUF files from weights: every number rounded to the nearest code of its block. No command.

Scales follow from the largest or least number of a block; llama.cpp searches better ones for most types. Layouts: see
`moe_engine.models.formats.gguf_blocks`.
"""

from __future__ import annotations

import numpy as np

from moe_engine.kernels.quantization.codes import FP4_VALUES, IQ4_VALUES
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES

SMALL_BLOCKS = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""The type of matrices whose columns form no whole blocks of 256, as in llama.cpp."""


def half(values: np.ndarray) -> np.ndarray:
    """Bytes of float16, the last dimension becoming 2."""
    return values.astype("<f2")[..., None].view(np.uint8)


def blocks_of(kind: str, weight: np.ndarray) -> np.ndarray:
    """float32 [N, K] -> blocks uint8 [N, bytes]."""
    made: np.ndarray = _MAKERS[kind](weight.reshape(-1, BLOCK_TYPES[kind][0]).astype(np.float32))
    return made.reshape(len(weight), -1)


def type_for(kind: str, columns: int) -> str:
    """The type of a matrix in a file of type `kind`; BF16 has no blocks."""
    if kind == "BF16":
        return kind
    if columns % BLOCK_TYPES[kind][0]:
        kind = SMALL_BLOCKS.get(kind, kind)
    return "F16" if columns % BLOCK_TYPES[kind][0] else kind


def _q4_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1) / 7 + 1e-8
    codes = np.clip(np.round(x / scale[:, None]) + 8, 0, 15).astype(np.uint8)
    return np.concatenate((half(scale), codes[:, :16] | codes[:, 16:] << 4), -1)


def _q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1) / 127 + 1e-8
    return np.concatenate((half(scale), np.round(x / scale[:, None]).astype(np.int8).view(np.uint8)), -1)


def _q4_1(x: np.ndarray) -> np.ndarray:
    least = x.min(-1, keepdims=True)
    scale = (x.max(-1, keepdims=True) - least) / 15 + 1e-8
    codes = np.clip(np.round((x - least) / scale), 0, 15).astype(np.uint8)
    return np.concatenate((half(scale[:, 0]), half(least[:, 0]), codes[:, :16] | codes[:, 16:] << 4), -1)


def _q5_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True) / 15 + 1e-8
    codes = np.clip(np.round(x / scale) + 16, 0, 31).astype(np.uint8)
    return np.concatenate((half(scale[:, 0]), _five_bits(codes)), -1)


def _q5_1(x: np.ndarray) -> np.ndarray:
    least = x.min(-1, keepdims=True)
    scale = (x.max(-1, keepdims=True) - least) / 31 + 1e-8
    codes = np.clip(np.round((x - least) / scale), 0, 31).astype(np.uint8)
    return np.concatenate((half(scale[:, 0]), half(least[:, 0]), _five_bits(codes)), -1)


def _five_bits(codes: np.ndarray) -> np.ndarray:
    """The fifth bits in 4 bytes, then the others in 16."""
    low, high = codes & 15, np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate((high, low[:, :16] | low[:, 16:] << 4), -1)


def _iq4_nl(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1) / 127 + 1e-8
    codes = _nearest(x / scale[:, None])
    return np.concatenate((half(scale), codes[:, :16] | codes[:, 16:] << 4), -1)


def _mxfp4(x: np.ndarray) -> np.ndarray:
    powers = np.ceil(np.log2(np.maximum(np.abs(x).max(-1), 1e-30) / 6)).astype(np.int32)
    numbers = np.array(FP4_VALUES, np.float32)
    sizes = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.abs(x) / np.exp2(powers)[:, None])
    codes = (sizes | (x < 0) << 3).astype(np.uint8)
    return np.concatenate(((powers + 127).astype(np.uint8)[:, None], codes[:, :16] | codes[:, 16:] << 4), -1)


def _iq4_xs(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(-1, 8, 32)
    wide = np.abs(parts).max(-1) / 127 + 1e-8
    scale = wide.max(-1) / 31
    factors = np.clip(np.round(wide / scale[:, None]), 1, 31).astype(np.uint8) + 32
    codes = _nearest(parts / (scale[:, None] * (factors - 32.0))[..., None])
    high = sum((factors[:, i].astype("<u2") >> 4) << 2 * i for i in range(8))
    low = factors[:, 0::2] & 15 | (factors[:, 1::2] & 15) << 4
    flat = (codes[..., :16] | codes[..., 16:] << 4).reshape(len(x), 128)
    return np.concatenate((half(scale), np.asarray(high, "<u2")[:, None].view(np.uint8), low, flat), -1)


def _nearest(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers of the table."""
    bounds = (np.array(IQ4_VALUES[:-1]) + np.array(IQ4_VALUES[1:])) / 2
    return np.searchsorted(bounds, x).astype(np.uint8)


def _q2_k(x: np.ndarray) -> np.ndarray:
    scale, offset, factors, offsets, codes = _pairs(x.reshape(-1, 16, 16), 3, 15)
    return np.concatenate((factors | offsets << 4, _two_bits(codes), half(scale), half(offset)), -1)


def _q3_k(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(-1, 16, 16)
    wide = np.abs(parts).max(-1) / 4 + 1e-8
    scale = wide.max(-1) / 31
    factors = np.clip(np.round(wide / scale[:, None]), 1, 31).astype(np.uint8) + 32
    steps = scale[:, None] * (factors - 32.0)
    codes = (np.clip(np.round(parts / steps[..., None]), -4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    low = factors[:, :8] & 15 | (factors[:, 8:] & 15) << 4
    high = sum(factors[:, 4 * i : 4 * i + 4] >> 4 << 2 * i for i in range(4))
    third = np.packbits(codes.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little").reshape(len(x), 32)
    return np.concatenate((third, _two_bits(codes & 3), low, np.asarray(high, np.uint8), half(scale)), -1)


def _two_bits(codes: np.ndarray) -> np.ndarray:
    runs = codes.reshape(-1, 2, 4, 32)
    joined = sum(runs[:, :, i] << 2 * i for i in range(4))
    return np.asarray(joined, np.uint8).reshape(len(runs), 64)


def _q4_k(x: np.ndarray) -> np.ndarray:
    head, codes = _with_offsets(x, 15)
    return np.concatenate((head, (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(x), 128)), -1)


def _q5_k(x: np.ndarray) -> np.ndarray:
    head, codes = _with_offsets(x, 31)
    high = np.packbits(codes >> 4, axis=1, bitorder="little").reshape(len(x), 32)
    low = codes & 15
    return np.concatenate((head, high, (low[:, 0::2] | low[:, 1::2] << 4).reshape(len(x), 128)), -1)


def _with_offsets(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 16 bytes of a block of Q4_K or Q5_K, and its codes [blocks, 8, 32] up to `most`."""
    scale, offset, factors, offsets, codes = _pairs(x.reshape(-1, 8, 32), most, 63)
    first = factors[:, :4] | factors[:, 4:] >> 4 << 6
    second = offsets[:, :4] | offsets[:, 4:] >> 4 << 6
    third = factors[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    return np.concatenate((half(scale), half(offset), first, second, third), -1), codes


def _pairs(parts: np.ndarray, most: int, largest: int) -> tuple[np.ndarray, ...]:
    """Scales and offsets of blocks, their factors up to `largest` for each part, and codes up to `most`."""
    low = np.maximum(-parts.min(-1), 0)
    wide = (parts.max(-1) + low) / most + 1e-8
    scale, offset = wide.max(-1) / largest, low.max(-1) / largest + 1e-8
    factors = np.clip(np.round(wide / scale[:, None]), 1, largest).astype(np.uint8)
    offsets = np.clip(np.round(low / offset[:, None]), 0, largest).astype(np.uint8)
    steps = scale[:, None, None] * factors[..., None]
    codes = np.clip(np.round((parts + (offset[:, None] * offsets)[..., None]) / steps), 0, most).astype(np.uint8)
    return scale, offset, factors, offsets, codes


def _q6_k(x: np.ndarray) -> np.ndarray:
    parts = x.reshape(-1, 16, 16)
    wide = np.abs(parts).max(-1) / 31 + 1e-8
    scale = wide.max(-1) / 127
    factors = np.clip(np.round(wide / scale[:, None]), 1, 127).astype(np.int8)
    steps = scale[:, None, None] * factors[..., None]
    codes = (np.clip(np.round(parts / steps), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4  # [blocks, 2, 2, 32]
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4))
    flat = (low.reshape(len(x), 128), np.asarray(high, np.uint8).reshape(len(x), 64))
    return np.concatenate((*flat, factors.view(np.uint8), half(scale)), -1)


_MAKERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
