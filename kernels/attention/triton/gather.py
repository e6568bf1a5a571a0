"""Gathers the latents of some requests from their slots into contiguous rows, dequantizing FP8 rows.

Legend: S context tokens, C kv_lora_rank, P rotary width, N records.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.triton.tiles import stored_values
from moe_engine.kernels.kv_format.latent_records import (
    FP8_GROUPS,
    FP8_RANGE,
    FP8_TENSOR,
    FP8_TOKEN,
    GROUP,
    PLAIN,
    scales_offset,
)
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.launch import element

GATHER_ROWS = 32
"""Tokens per program; a record is (request, first token in the context, tokens, first row of the output)."""

_TOKEN, _GROUPS, _GROUP = tl.constexpr(FP8_TOKEN), tl.constexpr(FP8_GROUPS), tl.constexpr(GROUP)
_RANGE, _TENSOR = tl.constexpr(FP8_RANGE), tl.constexpr(FP8_TENSOR)


@triton.jit(do_not_specialize_on_alignment=["rows", "records"])
def gather_kernel(
    cache, out, records, rows, table, cache_stride, table_stride,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KV_FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """cache [slots, .] -> out [S, C + P]."""
    record = records + tl.program_id(0) * 4
    count = tl.load(record + 2)
    inside = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    whole = inside < count
    table_row = table + tl.load(rows + tl.load(record)).to(tl.int64) * table_stride + tl.load(record + 1)
    offset = tl.load(table_row + inside, whole, 0).to(tl.int64) * cache_stride
    live = whole[:, None] & (column < LATENT + ROTARY)[None, :]
    values = tl.load(cache + offset[:, None] + column[None, :], live, 0)
    if KV_FORMAT == _RANGE or KV_FORMAT == _TENSOR:  # noqa: SIM109 - constants of the compiler
        values = stored_values(values, KV_FORMAT, tl.float32)
    elif KV_FORMAT > 0:
        raw = stored_values(values, KV_FORMAT, tl.float32)
        floats = cache.to(tl.pointer_type(tl.float32)) + (offset // 4)[:, None]
        in_latent = (column < LATENT)[None, :]
        if KV_FORMAT == _TOKEN:
            which = SCALES // 4 + (column >= LATENT)[None, :].to(tl.int32)
            values = raw * tl.load(floats + which, live, 0.0)
        else:
            scale = tl.load(floats + LATENT // 4 + column[None, :] // _GROUP, live & in_latent, 0.0)
            halves = cache.to(tl.pointer_type(tl.bfloat16)) + LATENT // 2 + LATENT // _GROUP * 2 - LATENT
            rotary = tl.load(halves + (offset // 2)[:, None] + column[None, :], live & (column >= LATENT)[None, :], 0.0)
            values = tl.where(in_latent, raw * scale, rotary.to(tl.float32))
    place = (tl.load(record + 3).to(tl.int64) + inside)[:, None] * (LATENT + ROTARY) + column[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), live)


def gather(cache: Tensor, queries: PagedQueries, records: Tensor, out: Tensor, latent: int, form: int) -> None:
    """Writes out [S, C+P], contiguous, in its own dtype.

    Args:
        records: [N, 4] int32, see `GATHER_ROWS`.
        form: row format of the cache.
    """
    if not len(out):
        return
    rotary = out.shape[1] - latent
    cache = cache if form == PLAIN else cache.view(torch.uint8)
    gather_kernel[(len(records),)](
        cache, out, records, queries.rows, queries.slot_table, cache.stride(0), queries.slot_table.stride(0),
        latent, rotary, next_power_of_2(latent + rotary), GATHER_ROWS, form, scales_offset(latent, rotary),
        num_warps=8,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    cases = []
    plain, records = (torch.bfloat16, torch.float32), (FP8_TOKEN, FP8_GROUPS, FP8_RANGE, FP8_TENSOR)
    for form, dtype in [*((PLAIN, dtype) for dtype in plain), *((form, None) for form in records)]:
        kind = "bf16" if dtype is None else element(dtype)
        signature = {
            "cache": f"*{kind if dtype else 'u8'}", "out": f"*{kind}", "records": "*i32:1", "rows": "*i32:1",
            "table": "*i32", "cache_stride": "i32:16", "table_stride": "i32:16",
        }  # fmt: skip
        constants = {
            "LATENT": 512, "ROTARY": 64, "BLOCK": 1024, "ROWS": GATHER_ROWS, "KV_FORMAT": form,
            "SCALES": scales_offset(512, 64),
        }  # fmt: skip
        name = f"latent gather, {(kind, 'fp8 token records', 'fp8 group records', 'e5m2', 'e4m3')[form]}"
        cases.append(AotCase(name, gather_kernel, signature, constants, 8, 3, False))
    return cases
