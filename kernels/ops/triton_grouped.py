"""The rows of grouped-query attention in one launch: bias, norms of q and k by head, rotation, cache rows. Keys of
DeepSeek V4, which are also the values, are such rows without values.

One launch instead of two (rotation, cache write) to six (bias, two norms, two rotations, cache write). Sums and
roundings are those of the separate kernels.

Legend: T tokens, H query heads, G KV heads, Dh width of a key, V width of a value, R rotated channels, the first
or the last ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, stride_of, warps_for, with_contiguous_rows

_TILE = 2048


@triton.jit
def _head_rows(
    source, bias, target, weight, table, live_row, eps,
    BIAS: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rows at `target` [M, 1] = rows of WIDTH channels at `source`, plus those at `bias` if BIAS, normed if NORM;
    TURNED ones from FIRST on are rotated by the cosines at `table` [1, PAIRS]."""
    kind: tl.constexpr = source.dtype.element_ty
    stored: tl.constexpr = target.dtype.element_ty
    channel, pair = tl.arange(0, BLOCK)[None, :], tl.arange(0, PAIRS)[None, :]
    known, turned = live_row & (channel < WIDTH), live_row & (pair < TURNED // 2)
    row = _biased(source, bias, channel, known, BIAS)
    if INTERLEAVED:
        lower, upper = FIRST + 2 * pair, FIRST + 2 * pair + 1
    else:
        lower, upper = FIRST + pair, FIRST + pair + TURNED // 2
    first, second = _biased(source, bias, lower, turned, BIAS), _biased(source, bias, upper, turned, BIAS)
    if NORM:
        wide = row.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        row = _normed(row, scale, weight + channel, channel < WIDTH, kind)
        first = _normed(first, scale, weight + lower, pair < TURNED // 2, kind)
        second = _normed(second, scale, weight + upper, pair < TURNED // 2, kind)
    cos = tl.load(table, pair < TURNED // 2, 0.0)
    sin = tl.load(table + TURNED // 2, pair < TURNED // 2, 0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(target + lower, (a * cos - b * sin).to(kind).to(stored), turned)
    tl.store(target + upper, (a * sin + b * cos).to(kind).to(stored), turned)
    if WIDTH > TURNED:
        tl.store(target + channel, row.to(stored), known & ((channel < FIRST) | (channel >= FIRST + TURNED)))


@triton.jit
def _biased(source, bias, channel, known, BIAS: tl.constexpr):
    """Values at `source`, with those at `bias` added and rounded as a product's."""
    values = tl.load(source + channel, known, 0.0)
    if BIAS:
        values = (values.to(tl.float32) + tl.load(bias + channel, known, 0.0).to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def _normed(values, scale, weight, known, KIND: tl.constexpr):
    rounded = (values.to(tl.float32) * scale).to(KIND).to(tl.float32)  # models are trained with this rounding
    return (rounded * tl.load(weight, known, 0.0)).to(KIND)


@dependent_jit(do_not_specialize_on_alignment=UNALIGNED)
def grouped_rows_kernel(
    q, k, v, bias, q_norm, k_norm, positions, cos_sin, slots, out, k_cache, v_cache,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, out_stride, k_cache_stride,
    v_cache_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, TURNED: tl.constexpr,
    FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, WIDTH] -> out, of the same shape with contiguous heads; k [T, KV_HEADS, WIDTH] and v [T, KV_HEADS,
    VALUE] -> cache rows of their slots; bias of the heads of q, k and v. Grid (T, blocks of query heads, then blocks of
    KV heads). VALUE 0: keys only, v is None."""
    wait_for_inputs()
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = cos_sin + tl.load(positions + token) * TURNED + tl.arange(0, PAIRS)[None, :]
    if tile < tl.cdiv(HEADS, BLOCK_H):
        head = (tile * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        source = q + token * q_stride + head * q_head_stride
        target = out + token * out_stride + head * WIDTH
        _head_rows(
            source, bias + head * WIDTH if BIAS else bias, target, q_norm, table, head < HEADS, eps,
            BIAS, NORM, WIDTH, TURNED, FIRST, INTERLEAVED, BLOCK, PAIRS,
        )  # fmt: skip
    else:
        head = ((tile - tl.cdiv(HEADS, BLOCK_H)) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        live = head < KV_HEADS
        slot = tl.load(slots + token).to(tl.int64)
        source = k + token * k_stride + head * k_head_stride
        target = k_cache + slot * k_cache_stride + head * WIDTH
        _head_rows(
            source, bias + (HEADS + head) * WIDTH if BIAS else bias, target, k_norm, table, live, eps,
            BIAS, NORM, WIDTH, TURNED, FIRST, INTERLEAVED, BLOCK, PAIRS,
        )  # fmt: skip
        if VALUE > 0:
            channel = tl.arange(0, VALUE_BLOCK)[None, :]
            known = live & (channel < VALUE)
            value = _biased(
                v + token * v_stride + head * v_head_stride,
                bias + (HEADS + KV_HEADS) * WIDTH + head * VALUE if BIAS else bias, channel, known, BIAS,
            )  # fmt: skip
            place = v_cache + slot * v_cache_stride + head * VALUE + channel
            tl.store(place, value.to(v_cache.dtype.element_ty), known)


def grouped_rows(
    q: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms | None, positions: Tensor, table: RotaryTable,
    slots: Tensor, k_cache: Tensor, v_cache: Tensor | None, bias: Tensor | None = None, trailing: bool = False,
) -> Tensor:  # fmt: skip
    """`OpsCapabilities.grouped_rows`. Raises ValueError for caches of records, or whose slots are not contiguous."""
    count, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not count:
        return out
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if rows is None or cache is None:
            continue
        held, given = list(cache.shape[1:]), list(rows.shape[1:])
        if held != given or not cache[:1].is_contiguous():
            raise ValueError(f"a KV cache slot must hold {given} contiguously, not {held}")
    q, k = with_contiguous_rows(q), with_contiguous_rows(k)
    v = None if v is None else with_contiguous_rows(v)
    v_strides = (0, 0) if v is None else (stride_of(v, 0), stride_of(v, 1))
    v_cache_stride = 0 if v_cache is None else stride_of(v_cache, 0)
    value = 0 if v is None else v.shape[2]
    constants = _constants(heads, k.shape[1], width, value, table, norms is not None, bias is not None, trailing)
    block_h = constants["BLOCK_H"]
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    grouped_rows_kernel[(count, triton.cdiv(heads, block_h) + triton.cdiv(k.shape[1], block_h))](
        q, k, v, bias, q_norm, k_norm, positions.reshape(-1), table.cos_sin, slots, out, k_cache, v_cache,
        stride_of(q, 0), stride_of(q, 1), stride_of(k, 0), stride_of(k, 1), *v_strides,
        heads * width, stride_of(k_cache, 0), v_cache_stride, eps, **constants,
        num_warps=warps_for(block_h * constants["BLOCK"]),
    )  # fmt: skip
    return out


def _constants(
    heads: int, kv_heads: int, width: int, value: int, table: RotaryTable, norm: bool, bias: bool, trailing: bool
) -> dict[str, int]:
    block = next_power_of_2(width)
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "VALUE": value, "TURNED": table.width,
        "FIRST": width - table.width if trailing else 0, "INTERLEAVED": table.interleaved, "BIAS": bias,
        "NORM": norm, "BLOCK_H": min(next_power_of_2(max(heads, kv_heads)), max(1, _TILE // block)), "BLOCK": block,
        "VALUE_BLOCK": next_power_of_2(max(value, 1)), "PAIRS": next_power_of_2(table.width // 2),
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Llama-3-8B, Qwen3-235B and GLM-4.6 on eight ranks, Qwen3-Next, gpt-oss-120b and MiMo-V2-Flash on four, the index
    rows of MiniMax-M3; DeepSeek V4-Flash on one rank and on eight, and its keys without queries; queries and keys of
    Ling-2.6's lightning attention on four ranks."""
    cases = []
    for label, heads, kv_heads, width, turned, norm, bias in (
        ("llama", 32, 8, 128, 128, False, False), ("qwen3", 8, 1, 128, 128, True, False),
        ("glm", 12, 1, 128, 64, True, True), ("qwen3-next", 4, 1, 256, 64, True, False),
        ("gpt-oss", 16, 2, 64, 64, False, False), ("mimo", 16, 2, 192, 64, False, False),
        ("minimax-m3 index", 4, 1, 128, 64, True, False), ("v4", 64, 1, 512, 64, True, False),
        ("v4 of eight ranks", 8, 1, 512, 64, True, False), ("v4 keys", 0, 1, 512, 64, True, False),
        ("ling 2.6", 8, 8, 128, 64, True, False),
    ):  # fmt: skip
        v4, slots = label.startswith("v4"), torch.int32 if label == "ling 2.6" else torch.int64
        table = RotaryTable(torch.empty(1, turned), interleaved=v4)
        value = 0 if v4 else {"mimo": 128, "minimax-m3 index": 0, "ling 2.6": 0}.get(label, width)
        constants = _constants(heads, kv_heads, width, value, table, norm, bias, trailing=v4)
        signature = dict.fromkeys(("q", "k", "out", "k_cache"), "*bf16") | {
            "positions": "*i64:1", "cos_sin": "*fp32", "slots": f"*{element(slots)}:1", "eps": "fp32",
        }  # fmt: skip
        strides = [f"{x}_{y}" for x in "qkv" for y in ("stride", "head_stride")]
        signature |= dict.fromkeys((*strides, "out_stride", "k_cache_stride", "v_cache_stride"), "i32:16")
        optional = dict.fromkeys(("q_norm", "k_norm"), "*fp32" if norm else None) | {"bias": "*bf16" if bias else None}
        optional |= dict.fromkeys(("v", "v_cache"), "*bf16" if value else None)
        signature |= {name: kind for name, kind in optional.items() if kind is not None}
        constants |= {name: kind for name, kind in optional.items() if kind is None}  # type: ignore[misc]
        warps = warps_for(constants["BLOCK_H"] * constants["BLOCK"])
        cases.append(AotCase(f"grouped rows, {label}", grouped_rows_kernel, signature, constants, warps, 3, False))
    return cases
