"""KV cache row formats by dtype name: sizes and layout. Imports no torch: the memory ledger (before launch) and the
allocation use the same rules.

`fp8_e4m3` has three fraction bits and a small exponent range, so its values carry scales, in records of bytes; only
`fp8_per_tensor` has none:
- `FP8_GROUPS`, MLA where the latent allows it: C e4m3 values, C/128 float32 scales (powers of two), P bfloat16 rotary
  channels; 656 bytes for 512 + 64. FlashMLA's record. Rotary channels are few, large and sensitive: they stay bf16.
- `FP8_TOKEN`, other latents: C + P e4m3 values, padding to 16 bytes, a float32 scale of the latent and one of the
  rotary channels, padding to 16 bytes; 592 bytes for 512 + 64.
- a GQA head's key or value: Dh e4m3 values, padding to 4 bytes, a float32 scale; 132 bytes for 128.
- `FP8_TENSOR`, MLA: C + P e4m3 values and nothing else, 576 bytes for 512 + 64, as trtllm-gen's, FlashInfer's and
  FlashMLA's dense kernels read them. The scale of the tensor is 1. Values saturate.
`fp8_e5m2` (`FP8_RANGE`) has two fraction bits and float16's exponents: a scale gains nothing, so values are stored
unscaled, one byte each.

Legend: C kv_lora_rank, P rotary width, G KV heads, Dh head width.
"""

from __future__ import annotations

PLAIN, FP8_TOKEN, FP8_GROUPS, FP8_RANGE, FP8_TENSOR = 0, 1, 2, 3, 4
"""Row formats; the C++ and Triton kernels use the same numbers. A head's e4m3 record is `FP8_TOKEN` there."""

GROUP = 128
"""Latent channels that share a scale in `FP8_GROUPS`."""

E4M3, E5M2, E4M3_TENSOR = "fp8_e4m3", "fp8_e5m2", "fp8_per_tensor"
STORED = {"bfloat16": ("bfloat16", 2), "float16": ("float16", 2), "float32": ("float32", 4), E4M3: ("uint8", 1)}
STORED |= {E5M2: ("float8_e5m2", 1), E4M3_TENSOR: ("float8_e4m3fn", 1)}
"""By dtype name: torch's dtype name of the cache tensor, and its bytes."""


def is_fp8(kv_dtype: str) -> bool:
    return kv_dtype in (E4M3, E5M2, E4M3_TENSOR)


def scales_offset(latent: int, rotary: int) -> int:
    """Bytes before the two scales of an `FP8_TOKEN` record."""
    return -(-(latent + rotary) // 16) * 16


def record_bytes(form: int, latent: int, rotary: int) -> int:
    """Bytes of one token's MLA e4m3 record.

    Raises:
        ValueError: if the format has no record for these widths.
    """
    if form == FP8_TOKEN:
        return scales_offset(latent, rotary) + 16
    if form == FP8_GROUPS:
        if not _has_groups(latent, rotary):
            raise ValueError(f"grouped FP8 records need {GROUP} * 2^n latent channels, not {latent}")
        return latent + latent // GROUP * 4 + 2 * rotary
    raise ValueError(f"format {form} is not an FP8 record")


def latent_width(kv_dtype: str, latent: int, rotary: int) -> int:
    """Elements (bytes, for FP8) of one MLA cache row."""
    if kv_dtype != E4M3:
        return latent + rotary
    return record_bytes(FP8_GROUPS if _has_groups(latent, rotary) else FP8_TOKEN, latent, rotary)


def head_width(kv_dtype: str, width: int) -> int:
    """Elements (bytes, for FP8) of one head's key, or value, in GQA's cache."""
    return head_scale_offset(width) + 4 if kv_dtype == E4M3 else width


def head_record_width(kv_dtype: str, width: int) -> int:
    """Elements of `kv_dtype` in an e4m3 record of a head, whatever the type of the other rows."""
    return head_width(E4M3, width) // STORED[kv_dtype][1]


def head_scale_offset(width: int) -> int:
    """Bytes before the scale of a head's record."""
    return -(-width // 4) * 4


def _has_groups(latent: int, rotary: int) -> bool:
    return latent % GROUP == 0 and latent & (latent - 1) == 0 and rotary % 8 == 0
