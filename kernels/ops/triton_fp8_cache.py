"""Writes of FP8 cache rows, each one pass over memory: norm, rotation, scales and packing together.

Row formats are those of `attention.kv_format`, bit-identical to `latent_records.pack` and `head_records.pack` of the
rows that a cache in the activation dtype would hold. Padding bytes of a record are not written.

Legend: T tokens, H heads, R rotary width, C kv_lora_rank, Dh head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.kv_format.formats import (
    E4M3,
    FP8_GROUPS,
    FP8_RANGE,
    FP8_TENSOR,
    FP8_TOKEN,
    GROUP,
    head_scale_offset,
    head_width,
    record_bytes,
    scales_offset,
)
from moe_engine.kernels.kv_format.head_records import form_of as head_form
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3, LARGEST_E5M2
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.triton_e4m3 import inside, unscaled_e4m3
from moe_engine.kernels.ops.triton_rotary import normed_latent, turned_pairs
from moe_engine.kernels.quantization.triton_rows import power_of_two_above
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, stride_of, warps_for, with_contiguous_rows

_TOKEN, _GROUPS, _RANGE = tl.constexpr(FP8_TOKEN), tl.constexpr(FP8_GROUPS), tl.constexpr(FP8_RANGE)
_TENSOR = tl.constexpr(FP8_TENSOR)
_GROUP = tl.constexpr(GROUP)
_LARGEST_E4M3, _LARGEST_E5M2 = tl.constexpr(LARGEST_E4M3), tl.constexpr(LARGEST_E5M2)
_LEAST = tl.constexpr(1e-12)
_TILE = 2048


@triton.jit
def _scale_of(largest):
    """The divisor that brings a row's largest magnitude into e4m3's range."""
    return tl.div_rn(tl.maximum(largest, _LEAST), _LARGEST_E4M3)


@triton.jit
def _e4m3(values, scale):
    """Bytes of values / scale; the cast saturates."""
    return tl.div_rn(values, scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _e5m2(values):
    """Bytes of unscaled values; saturates, NaN stays NaN."""
    return inside(values, _LARGEST_E5M2).to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def write_record(
    source, weight, table, target, eps, divisor,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, KV_FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """The bytes at `target` = the record of [rms_norm(source[:C]) * weight | source[C:] rotated by the angles at
    `table`].

    divisor: of `FP8_TENSOR`. SCALES: offset of the two scales in `FP8_TOKEN`.
    """
    column = tl.arange(0, BLOCK_C)
    latent = normed_latent(source, weight, column, eps, LATENT).to(tl.float32)
    pair = tl.arange(0, BLOCK_R // 2)
    live = pair < WIDTH // 2
    first, second, lower, upper = turned_pairs(source + LATENT, table, pair, WIDTH, INTERLEAVED)
    first, second = first.to(source.dtype.element_ty), second.to(source.dtype.element_ty)
    if KV_FORMAT == _GROUPS:
        groups = tl.reshape(latent, [BLOCK_C // _GROUP, _GROUP])
        scale = _scale_of(tl.max(tl.abs(groups), axis=1))
        scale = power_of_two_above(scale)
        tl.store(target + column, tl.reshape(_e4m3(groups, scale[:, None]), [BLOCK_C]))
        floats = (target + LATENT).to(tl.pointer_type(tl.float32))
        tl.store(floats + tl.arange(0, BLOCK_C // _GROUP), scale)
        halves = (target + LATENT + LATENT // _GROUP * 4).to(tl.pointer_type(tl.bfloat16))
        tl.store(halves + lower, first.to(tl.bfloat16), live)
        tl.store(halves + upper, second.to(tl.bfloat16), live)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        if KV_FORMAT == _TOKEN:
            scale = _scale_of(tl.max(tl.abs(latent), axis=0))
            of_rotary = _scale_of(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=0))
            floats = (target + SCALES).to(tl.pointer_type(tl.float32))
            tl.store(floats, scale)
            tl.store(floats + 1, of_rotary)
            numbers, first, second = _e4m3(latent, scale), _e4m3(first, of_rotary), _e4m3(second, of_rotary)
        elif KV_FORMAT == _TENSOR:
            numbers = unscaled_e4m3(tl.div_rn(latent, divisor))
            first = unscaled_e4m3(tl.div_rn(first, divisor))
            second = unscaled_e4m3(tl.div_rn(second, divisor))
        else:
            numbers, first, second = _e5m2(latent), _e5m2(first), _e5m2(second)
        tl.store(target + column, numbers, column < LATENT)
        tl.store(target + LATENT + lower, first, live)
        tl.store(target + LATENT + upper, second, live)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def write_latent_fp8_kernel(
    kv_a, weight, positions, cos_sin, slots, cache, kv_stride, cache_stride, eps, divisor,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, KV_FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """cache[slots[t]] = the record of [rms_norm(kv_a[t, :C]) * weight | rotated kv_a[t, C:]]; cache is bytes."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    source = kv_a + token * kv_stride
    target = cache + tl.load(slots + token).to(tl.int64) * cache_stride
    table = cos_sin + tl.load(positions + token) * WIDTH
    write_record(
        source, weight, table, target, eps, divisor, LATENT, WIDTH, INTERLEAVED, BLOCK_C, BLOCK_R, KV_FORMAT, SCALES
    )  # fmt: skip


@triton.jit
def _write_heads(
    source, head_stride, target, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KV_FORMAT: tl.constexpr, RECORD: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Writes heads `head` [BLOCK_H] of a token to contiguous records at `target`."""
    channel = tl.arange(0, BLOCK)[None, :]
    live = (head < HEADS)[:, None] & (channel < WIDTH)
    values = tl.load(source + head.to(tl.int64)[:, None] * head_stride + channel, live, 0.0).to(tl.float32)
    if KV_FORMAT == _TOKEN:
        scale = _scale_of(tl.max(tl.abs(values), axis=1))
        numbers = _e4m3(values, scale[:, None])
        tl.store((target + head * RECORD + SCALE).to(tl.pointer_type(tl.float32)), scale, head < HEADS)
    else:
        numbers = _e5m2(values)
    tl.store(target + head[:, None] * RECORD + channel, numbers, live)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def write_kv_fp8_kernel(
    k, v, slots, k_cache, v_cache,
    k_stride, k_head_stride, v_stride, v_head_stride, k_cache_stride, v_cache_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, KV_FORMAT: tl.constexpr,
    RECORD: tl.constexpr, SCALE: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    VALUE_RECORD: tl.constexpr, VALUE_SCALE: tl.constexpr,
):  # fmt: skip
    """k_cache[slots[t]] = records of k[t], v_cache[slots[t]] = records of v[t]; caches are bytes, a slot's heads are
    contiguous. RECORD: bytes of a key, SCALE: offset of its scale; VALUE_RECORD, VALUE_SCALE: of a value."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    key, value = k_cache + slot * k_cache_stride, v_cache + slot * v_cache_stride
    _write_heads(k + token * k_stride, k_head_stride, key, head, HEADS, WIDTH, BLOCK, KV_FORMAT, RECORD, SCALE)
    _write_heads(
        v + token * v_stride, v_head_stride, value, head, HEADS, VALUE, VALUE_BLOCK, KV_FORMAT, VALUE_RECORD,
        VALUE_SCALE,
    )  # fmt: skip


def write_latent(
    kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable, slots: Tensor, cache: Tensor,
    form: int, scale: float = 1.0,
) -> None:  # fmt: skip
    """`Ops.write_latent` to a cache of FP8 rows in that format."""
    if not len(kv_a):
        return
    kv_a, cache = with_contiguous_rows(kv_a), cache.view(torch.uint8)
    latent = weight.shape[0]
    write_latent_fp8_kernel[(len(kv_a),)](
        kv_a, weight, positions.reshape(-1), table.cos_sin, slots, cache, stride_of(kv_a, 0), stride_of(cache, 0), eps,
        scale, **_latent_constants(latent, table.width, table.interleaved, form), num_warps=_latent_warps(latent),
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """`Ops.write_kv` to caches of FP8 rows, both in one format.

    Raises:
        ValueError: if slots are not contiguous, or the formats differ.
    """
    count, heads, width = k.shape
    form = head_form(k_cache, width)
    if head_form(v_cache, v.shape[2]) != form:
        raise ValueError(f"the key cache is {k_cache.dtype}, the value cache {v_cache.dtype}")
    if not k.numel():
        return
    k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    for cache in (k_cache, v_cache):
        if not cache[:1].is_contiguous():
            raise ValueError("a KV cache slot must hold its heads contiguously")
    k, v = with_contiguous_rows(k), with_contiguous_rows(v)
    constants, warps = _kv_constants(heads, width, v.shape[2], form), _kv_warps(heads, width)
    write_kv_fp8_kernel[(count, triton.cdiv(heads, constants["BLOCK_H"]))](
        k, v, slots, k_cache, v_cache,
        stride_of(k, 0), stride_of(k, 1), stride_of(v, 0), stride_of(v, 1),
        stride_of(k_cache, 0), stride_of(v_cache, 0), **constants, num_warps=warps,
    )  # fmt: skip


def _latent_constants(latent: int, rotary: int, interleaved: bool, form: int) -> dict[str, int]:
    return {
        "LATENT": latent, "WIDTH": rotary, "INTERLEAVED": interleaved, "BLOCK_C": next_power_of_2(latent),
        "BLOCK_R": next_power_of_2(rotary), "KV_FORMAT": form, "SCALES": scales_offset(latent, rotary),
    }  # fmt: skip


def _latent_warps(latent: int) -> int:
    return warps_for(next_power_of_2(latent))


def _kv_constants(heads: int, width: int, value: int, form: int) -> dict[str, int]:
    block = next_power_of_2(width)
    record, value_record = (head_width(E4M3, each) if form == FP8_TOKEN else each for each in (width, value))
    return {
        "HEADS": heads, "WIDTH": width, "BLOCK_H": _kv_heads(heads, width), "BLOCK": block, "KV_FORMAT": form,
        "RECORD": record, "SCALE": head_scale_offset(width), "VALUE": value, "VALUE_BLOCK": next_power_of_2(value),
        "VALUE_RECORD": value_record, "VALUE_SCALE": head_scale_offset(value),
    }  # fmt: skip


def _kv_heads(heads: int, width: int) -> int:
    return min(next_power_of_2(heads), max(1, _TILE // next_power_of_2(width)))


def _kv_warps(heads: int, width: int) -> int:
    return warps_for(_kv_heads(heads, width) * next_power_of_2(width))


_NAMES = {FP8_TOKEN: "token", FP8_GROUPS: "groups", FP8_RANGE: "e5m2", FP8_TENSOR: "e4m3"}


def _latent_case(form: int, slot_dtype: torch.dtype) -> AotCase:
    """DeepSeek's latent in bf16."""
    row = 576 if form in (FP8_RANGE, FP8_TENSOR) else record_bytes(form, 512, 64)
    signature = {
        "kv_a": "*bf16", "weight": "*fp32", "positions": "*i64:1", "cos_sin": "*fp32",
        "slots": f"*{element(slot_dtype)}:1", "cache": "*u8", "kv_stride": "i32:16",
        "cache_stride": "i32:16" if row % 16 == 0 else "i32", "eps": "fp32", "divisor": "fp32",
    }  # fmt: skip
    name = f"write_latent_fp8_{_NAMES[form]}_{element(slot_dtype)}"
    constants = _latent_constants(512, 64, True, form)
    return AotCase(name, write_latent_fp8_kernel, signature, constants, _latent_warps(512), 3, False)


def _kv_case(form: int, width: int = 128) -> AotCase:
    """Llama-3-8B's heads in bf16, or with keys of 192 channels MiMo-V2-Flash's."""
    heads = 8
    constants = _kv_constants(heads, width, 128, form)
    cached = "i32:16" if heads * constants["RECORD"] % 16 == 0 else "i32"
    signature = {"k": "*bf16", "v": "*bf16", "slots": "*i64:1", "k_cache": "*u8", "v_cache": "*u8"}
    signature |= dict.fromkeys(("k_stride", "k_head_stride", "v_stride", "v_head_stride"), "i32:16")
    signature |= dict.fromkeys(("k_cache_stride", "v_cache_stride"), cached)
    name = f"write_kv_fp8_{_NAMES[form]}{'' if width == 128 else f'_{width}'}"
    return AotCase(name, write_kv_fp8_kernel, signature, constants, _kv_warps(heads, width), 3, False)


def aot_cases() -> list[AotCase]:
    cases = [_latent_case(form, torch.int64) for form in (FP8_TOKEN, FP8_GROUPS, FP8_RANGE, FP8_TENSOR)]
    cases.append(_latent_case(FP8_GROUPS, torch.int32))
    return cases + [_kv_case(FP8_TOKEN), _kv_case(FP8_RANGE), _kv_case(FP8_TOKEN, 192)]
