"""MLA's decode query and its cache rows in one launch: the absorbed product per head, the rotation of the query's last
channels next to it, and the tokens' cache rows (norm of the latent, rotation, write).

One launch instead of four (rotation, cache write, product, copy), and the query is read once.

    out[t, h] = [W_UK[h] q[t, h, :N] | rotated q[t, h, N:]]

Legend: T tokens, H heads, N qk_nope, R rotary width, C kv_lora_rank.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.kv_format import latent_records
from moe_engine.kernels.kv_format.formats import FP8_GROUPS, FP8_RANGE, FP8_TENSOR, PLAIN, record_bytes, scales_offset
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.triton_e4m3 import converted
from moe_engine.kernels.ops.triton_fp8_cache import write_record
from moe_engine.kernels.ops.triton_rotary import turn_rows, write_row
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, stride_of, with_contiguous_rows

_PLAIN = tl.constexpr(PLAIN)

_FEW_TOKENS = 16
"""Up to this many tokens tiles are low, and narrow, so that enough programs read the weight."""


@dependent_jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def absorb_kernel(
    q, weight, out, kv_a, norm, positions, cos_sin, slots, cache, num_tokens,
    q_stride, q_head_stride, kv_stride, cache_stride, eps, divisor,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    KV_FORMAT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Grid (C / BLOCK_C + 1, HEADS, T / BLOCK_T): a tile of a head's product; the last tile rotates, and writes the
    cache rows of every HEADS-th of its tokens. weight [H, C, N] and out [T, H, C+R] are contiguous; an `out` of
    bytes holds e4m3."""
    wait_for_inputs()
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * BLOCK_T
    token = first + tl.arange(0, BLOCK_T)
    live = (token < num_tokens)[:, None]
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    source = (q + row * q_stride + head * q_head_stride)[:, None]
    target = (out + (row * HEADS + head) * (LATENT + WIDTH))[:, None]
    if tile < tl.cdiv(LATENT, BLOCK_C):
        channel = tl.arange(0, BLOCK_N)
        column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        inside, known = (channel < NOPE), (column < LATENT)[None, :]
        a = tl.load(source + channel[None, :], live & inside[None, :], 0.0)  # [BLOCK_T, BLOCK_N]
        matrix = weight + (head * LATENT + column)[None, :] * NOPE + channel[:, None]
        b = tl.load(matrix, inside[:, None] & known, 0.0)  # [BLOCK_N, BLOCK_C]
        product = tl.dot(a, b, input_precision="ieee")
        tl.store(target + column[None, :], converted(product, out.dtype.element_ty), live & known)
    else:
        pair = tl.arange(0, BLOCK_R // 2)[None, :]
        angles = cos_sin + tl.load(positions + row)[:, None] * WIDTH + pair
        turn_rows(source + NOPE, target + LATENT, angles, live, WIDTH, 1, INTERLEAVED, BLOCK_R)
        for place in range(tl.program_id(1), min(BLOCK_T, num_tokens - first), HEADS):
            written = (first + place).to(tl.int64)
            line = kv_a + written * kv_stride
            record = cache + tl.load(slots + written).to(tl.int64) * cache_stride
            table = cos_sin + tl.load(positions + written) * WIDTH
            if KV_FORMAT == _PLAIN:
                write_row(line, norm, table, record, eps, LATENT, WIDTH, INTERLEAVED, BLOCK_L, BLOCK_R)
            else:
                write_record(
                    line, norm, table, record, eps, divisor,
                    LATENT, WIDTH, INTERLEAVED, BLOCK_L, BLOCK_R, KV_FORMAT, SCALES,
                )  # fmt: skip


def absorb(
    q: Tensor, keys: Tensor, kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable,
    slots: Tensor, cache: Tensor, query_dtype: torch.dtype | None = None, scale: float = 1.0,
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """`OpsCapabilities.absorb`.

    Args:
        query_dtype: of the result; only e4m3 is supported besides that of q.
        scale: as in `Ops.write_latent`.
        deterministic: the tiling does not depend on the number of tokens (batch-invariant results).

    Raises:
        ValueError: if the widths or dtypes differ.
    """
    count, heads, width = q.shape
    latent, nope = keys.shape[1:]
    if keys.shape[0] != heads or width != nope + table.width or q.dtype != keys.dtype:
        raise ValueError(f"queries {list(q.shape)} {q.dtype} do not fit keys {list(keys.shape)} {keys.dtype}")
    out = torch.empty(count, heads, latent + table.width, dtype=query_dtype or q.dtype, device=q.device)
    if not count:
        return out
    form = latent_records.form_of(cache, latent, table.width)
    stored = cache if form == PLAIN else cache.view(torch.uint8)
    q, kv_a = with_contiguous_rows(q), with_contiguous_rows(kv_a)
    constants, grid = _plan(count, heads, nope, latent, table, form, q.dtype, deterministic)
    written = out if query_dtype is None else out.view(torch.uint8)
    absorb_kernel[grid](
        q, keys.contiguous(), written, kv_a, weight, positions.reshape(-1), table.cos_sin, slots, stored, count,
        stride_of(q, 0), stride_of(q, 1), stride_of(kv_a, 0), stride_of(stored, 0), eps, scale, **constants,
        num_warps=4,
    )  # fmt: skip
    return out


def _plan(
    count: int, heads: int, nope: int, latent: int, table: RotaryTable, form: int, dtype: torch.dtype,
    deterministic: bool = False,
) -> tuple[dict[str, Any], tuple[int, int, int]]:  # fmt: skip
    """(constants, grid) for `count` tokens."""
    few = count <= _FEW_TOKENS and not deterministic
    block_t, block_c = (16, 64) if few else (64, 128)
    if dtype == torch.float32:  # no tensor cores: small tiles, no spills
        block_t, block_c = 16, 32
    block_c = min(block_c, max(16, next_power_of_2(latent)))
    constants = {
        "HEADS": heads, "NOPE": nope, "LATENT": latent, "WIDTH": table.width, "INTERLEAVED": table.interleaved,
        "BLOCK_T": block_t, "BLOCK_N": max(16, next_power_of_2(nope)), "BLOCK_C": block_c,
        "BLOCK_L": next_power_of_2(latent), "BLOCK_R": next_power_of_2(table.width),
        "KV_FORMAT": form, "SCALES": scales_offset(latent, table.width),
    }  # fmt: skip
    return constants, (triton.cdiv(latent, block_c) + 1, heads, triton.cdiv(count, block_t))


def absorb_case(
    label: str, heads: int, count: int, form: int, dtype: torch.dtype = torch.bfloat16,
    slot_dtype: torch.dtype = torch.int64, fp8_query: bool = False,
) -> AotCase:  # fmt: skip
    """The specialization that `absorb` launches for DeepSeek's widths and `count` tokens."""
    nope, latent, rotary = 128, 512, 64
    table = RotaryTable(torch.empty(1, rotary), interleaved=True)
    constants, _ = _plan(count, heads, nope, latent, table, form, dtype)
    kind = f"*{element(dtype)}"
    record = record_bytes(form, latent, rotary) if form not in (PLAIN, FP8_RANGE, FP8_TENSOR) else latent + rotary
    signature = dict.fromkeys(("q", "weight", "out", "kv_a"), kind) | {
        "norm": "*fp32", "positions": "*i64:1", "cos_sin": "*fp32", "slots": f"*{element(slot_dtype)}:1",
        "cache": kind if form == PLAIN else "*u8", "num_tokens": "i32", "eps": "fp32", "divisor": "fp32",
        "cache_stride": "i32:16" if record % 16 == 0 else "i32", **({"out": "*u8"} if fp8_query else {}),
    }  # fmt: skip
    signature |= dict.fromkeys(("q_stride", "q_head_stride", "kv_stride"), "i32:16")
    matrix = dtype != torch.float32
    name = f"absorb_{label}_{count}_{form}_{element(dtype)}_{element(slot_dtype)}{'_e4m3' * fp8_query}"
    return AotCase(name, absorb_kernel, signature, constants, 4, 3, matrix)


def aot_cases() -> list[AotCase]:
    """DeepSeek-V3 with all heads, and V2-Lite (V3's share of eight ranks), for few and many tokens."""
    cases = [absorb_case(f"{heads}h", heads, count, PLAIN) for heads in (16, 128) for count in (16, 128)]
    cases += [absorb_case("128h", 128, count, FP8_GROUPS) for count in (16, 128)]
    cases.append(absorb_case("16h", 16, 128, FP8_RANGE))
    cases += [absorb_case("128h", 128, count, FP8_TENSOR, fp8_query=True) for count in (16, 128)]
    cases.append(absorb_case("16h", 16, 128, PLAIN, slot_dtype=torch.int32))
    cases.append(absorb_case("16h", 16, 128, PLAIN, torch.float32))
    return cases
