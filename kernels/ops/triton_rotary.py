"""Rotary embedding in place, and the writes of MLA's and GQA's caches, each one pass over memory.

Legend: T tokens, H heads, R rotary width, C kv_lora_rank, Dh head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.triton_e4m3 import converted
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, stride_of, warps_for, with_contiguous_rows

_TILE = 2048


@triton.jit
def _turn(a, b, cos, sin):
    """The pair (a, b) rotated, in float32."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def turn_rows(
    source, target, table, live_row,
    WIDTH: tl.constexpr, CHANNEL: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr,
    INVERSE: tl.constexpr = False,
):  # fmt: skip
    """Rotates WIDTH channels, CHANNEL elements apart in rows at `source` [M, 1], into rows at `target`; `table`
    [M or 1, BLOCK_R / 2] points to the cosines of the pairs. INVERSE: by the negative angles."""
    pair = tl.arange(0, BLOCK_R // 2)[None, :]
    cos = tl.load(table, pair < WIDTH // 2, 0.0)
    sin = tl.load(table + WIDTH // 2, pair < WIDTH // 2, 0.0)
    if INVERSE:
        sin = -sin
    kind = target.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, BLOCK_R)[None, :]
        live = live_row & (channel < WIDTH)
        value = tl.load(source + channel * CHANNEL, live, 0.0)  # [M, BLOCK_R]
        first, second = tl.split(tl.reshape(value, [value.shape[0], BLOCK_R // 2, 2]))
        first, second = _turn(first, second, cos, sin)
        value = tl.reshape(tl.join(first, second), [value.shape[0], BLOCK_R])
        tl.store(target + channel * CHANNEL, converted(value, kind), live)
    else:
        live = live_row & (pair < WIDTH // 2)
        lower, upper = pair * CHANNEL, (pair + WIDTH // 2) * CHANNEL
        first, second = _turn(tl.load(source + lower, live, 0.0), tl.load(source + upper, live, 0.0), cos, sin)
        tl.store(target + lower, converted(first, kind), live)
        tl.store(target + upper, converted(second, kind), live)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def rotate_kernel(
    x, positions, cos_sin, stride, head_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotates the first WIDTH channels, CHANNEL elements apart, of x [T, HEADS, *]; BLOCK_R >= WIDTH."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_R // 2)[None, :]
    table = cos_sin + tl.load(positions + token) * WIDTH + pair
    base = x + token * stride + head.to(tl.int64) * head_stride
    turn_rows(base, base, table, head < HEADS, WIDTH, CHANNEL, INTERLEAVED, BLOCK_R, INVERSE)


@triton.jit
def normed_latent(source, weight, column, eps, LATENT: tl.constexpr):
    """RMSNorm of the LATENT values at `source`, in their dtype; padded with zeros."""
    kind = source.dtype.element_ty
    latent = tl.load(source + column, column < LATENT, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    normed = (latent * scale).to(kind).to(tl.float32)
    return (normed * tl.load(weight + column, column < LATENT, 0.0).to(tl.float32)).to(kind)


@triton.jit
def turned_pairs(source, table, pair, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(first, second, offset of the first, of the second) of the rotated pairs of WIDTH channels at `source`."""
    live = pair < WIDTH // 2
    cos, sin = tl.load(table + pair, live, 0.0), tl.load(table + WIDTH // 2 + pair, live, 0.0)
    if INTERLEAVED:  # one short row: two strided loads cost no more than a shuffle
        lower, upper = 2 * pair, 2 * pair + 1
    else:
        lower, upper = pair, pair + WIDTH // 2
    first, second = _turn(tl.load(source + lower, live, 0.0), tl.load(source + upper, live, 0.0), cos, sin)
    return first, second, lower, upper


@triton.jit
def write_row(
    source, weight, table, target, eps,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """target = [rms_norm(source[:C]) * weight | source[C:] rotated by the angles at `table`]; WIDTH may be 0."""
    kind = target.dtype.element_ty
    column = tl.arange(0, BLOCK_C)
    tl.store(target + column, normed_latent(source, weight, column, eps, LATENT).to(kind), column < LATENT)
    if WIDTH > 0:
        pair = tl.arange(0, BLOCK_R // 2)
        live = pair < WIDTH // 2
        first, second, lower, upper = turned_pairs(source + LATENT, table, pair, WIDTH, INTERLEAVED)
        tl.store(target + LATENT + lower, first.to(kind), live)
        tl.store(target + LATENT + upper, second.to(kind), live)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def write_latent_kernel(
    kv_a, weight, positions, cos_sin, slots, cache, kv_stride, cache_stride, eps,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """cache[slots[t]] = [rms_norm(kv_a[t, :C]) * weight | rotated kv_a[t, C:]]."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    source = kv_a + token * kv_stride
    target = cache + tl.load(slots + token).to(tl.int64) * cache_stride
    table = cos_sin + tl.load(positions + token) * WIDTH
    write_row(source, weight, table, target, eps, LATENT, WIDTH, INTERLEAVED, BLOCK_C, BLOCK_R)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def write_kv_kernel(
    k, v, slots, k_cache, v_cache,
    k_stride, k_head_stride, v_stride, v_head_stride, k_cache_stride, v_cache_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """k_cache[slots[t]] = k[t], v_cache[slots[t]] = v[t]; a cache slot holds its heads contiguously. WIDTH, VALUE:
    channels of a key, of a value."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, channel = item // WIDTH, item % WIDTH
    live = item < HEADS * WIDTH
    key = tl.load(k + token * k_stride + head * k_head_stride + channel, live)
    tl.store(k_cache + slot * k_cache_stride + item, key.to(k_cache.dtype.element_ty), live)
    if VALUE != WIDTH:
        head, channel = item // VALUE, item % VALUE
        live = item < HEADS * VALUE
    value = tl.load(v + token * v_stride + head * v_head_stride + channel, live)
    tl.store(v_cache + slot * v_cache_stride + item, value.to(v_cache.dtype.element_ty), live)


def rotate(x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
    """Rotates all channels of x [T, H, R], a view of any strides, in place."""
    count, heads, width = x.shape
    if not x.numel():
        return
    block_h, block_r = _rotate_tile(heads, width)
    rotate_kernel[(count, triton.cdiv(heads, block_h))](
        x, positions.reshape(-1), table.cos_sin, stride_of(x, 0), stride_of(x, 1),
        HEADS=heads, WIDTH=width, CHANNEL=x.stride(2), INTERLEAVED=table.interleaved, INVERSE=inverse,
        BLOCK_H=block_h, BLOCK_R=block_r, num_warps=warps_for(block_h * block_r),
    )  # fmt: skip


def _rotate_tile(heads: int, width: int) -> tuple[int, int]:
    block_r = next_power_of_2(width)
    return min(next_power_of_2(heads), max(1, _TILE // block_r)), block_r


def write_latent(
    kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable, slots: Tensor, cache: Tensor
) -> None:
    """`Ops.write_latent`."""
    if not len(kv_a):
        return
    kv_a = with_contiguous_rows(kv_a)
    latent = weight.shape[0]
    block_c = next_power_of_2(latent)
    write_latent_kernel[(len(kv_a),)](
        kv_a, weight, positions.reshape(-1), table.cos_sin, slots, cache, stride_of(kv_a, 0), stride_of(cache, 0), eps,
        LATENT=latent, WIDTH=table.width, INTERLEAVED=table.interleaved,
        BLOCK_C=block_c, BLOCK_R=next_power_of_2(table.width), num_warps=warps_for(block_c),
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """`Ops.write_kv`. Raises ValueError for caches whose slots are not contiguous."""
    count, heads, width = k.shape
    if not k.numel():
        return
    for cache in (k_cache, v_cache):
        if not cache[:1].is_contiguous():
            raise ValueError("a KV cache slot must hold its heads contiguously")
    k, v = with_contiguous_rows(k), with_contiguous_rows(v)
    widest = heads * max(width, v.shape[2])
    block = _kv_block(widest)
    write_kv_kernel[(count, triton.cdiv(widest, block))](
        k, v, slots, k_cache, v_cache,
        stride_of(k, 0), stride_of(k, 1), stride_of(v, 0), stride_of(v, 1),
        stride_of(k_cache, 0), stride_of(v_cache, 0),
        HEADS=heads, WIDTH=width, VALUE=v.shape[2], BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip


def _kv_block(elements: int) -> int:
    return min(_TILE, next_power_of_2(elements))


def rotate_case(label: str, heads: int, width: int, interleaved: bool) -> AotCase:
    """The specialization that `rotate` launches for bf16 views with contiguous channels."""
    block_h, block_r = _rotate_tile(heads, width)
    signature = {"x": "*bf16", "positions": "*i64:1", "cos_sin": "*fp32", "stride": "i32:16", "head_stride": "i32:16"}
    constants = {
        "HEADS": heads, "WIDTH": width, "CHANNEL": 1, "INTERLEAVED": interleaved, "INVERSE": False,
        "BLOCK_H": block_h, "BLOCK_R": block_r,
    }  # fmt: skip
    return AotCase(f"rotate_{label}", rotate_kernel, signature, constants, warps_for(block_h * block_r), 3, False)


def latent_case(label: str, latent: int, width: int, dtype: torch.dtype, slot_dtype: torch.dtype) -> AotCase:
    """The specialization that `write_latent` launches for interleaved rotary."""
    kind, block_c = f"*{element(dtype)}", next_power_of_2(latent)
    signature = {
        "kv_a": kind, "weight": kind, "positions": "*i64:1", "cos_sin": "*fp32", "slots": f"*{element(slot_dtype)}:1",
        "cache": kind, "kv_stride": "i32:16", "cache_stride": "i32:16", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "LATENT": latent, "WIDTH": width, "INTERLEAVED": True, "BLOCK_C": block_c, "BLOCK_R": next_power_of_2(width),
    }  # fmt: skip
    name = f"write_latent_{label}_{element(dtype)}_{element(slot_dtype)}"
    return AotCase(name, write_latent_kernel, signature, constants, warps_for(block_c), 3, False)


def kv_case(label: str, heads: int, width: int, value: int, slot_dtype: torch.dtype) -> AotCase:
    """The specialization that `write_kv` launches for bf16 caches."""
    block = _kv_block(heads * width)
    signature = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16") | {"slots": f"*{element(slot_dtype)}:1"}
    strides = ("k_stride", "k_head_stride", "v_stride", "v_head_stride", "k_cache_stride", "v_cache_stride")
    signature |= dict.fromkeys(strides, "i32:16")
    constants = {"HEADS": heads, "WIDTH": width, "VALUE": value, "BLOCK": block}
    name = f"write_kv_{label}_{element(slot_dtype)}"
    return AotCase(name, write_kv_kernel, signature, constants, warps_for(block), 3, False)


def aot_cases() -> list[AotCase]:
    """DeepSeek's rotary and latent, GLM-5.3-Flash's latent, Llama-3-8B's and Qwen3's heads."""
    cases = [rotate_case(f"v3_{heads}h", heads, 64, True) for heads in (1, 16, 128)]
    cases += [rotate_case(f"llama_{heads}h", heads, 128, False) for heads in (8, 32)]
    cases.append(rotate_case("partial", 32, 96, False))
    for slots in (torch.int32, torch.int64):
        cases.append(latent_case("v3", 512, 64, torch.bfloat16, slots))
        cases.append(kv_case("llama", 8, 128, 128, slots))
        cases.append(kv_case("mimo", 8, 192, 128, slots))
    cases.append(latent_case("v3", 512, 64, torch.float32, torch.int64))
    cases.append(latent_case("glm53_flash", 512, 0, torch.bfloat16, torch.int64))
    return cases
