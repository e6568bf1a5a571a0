"""Scores of the indexer in Triton: index queries of a few neighboring tokens against all keys of their request.

A program keeps the queries of up to 128 / Hi tokens as rows of one matrix product, and takes every n-th block of keys.
The number of programs does not depend on context lengths, which are read from the device: captured steps run the same
launch.

Legend: T query tokens, Hi index heads, I channels of an index head, S context tokens, N records.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.kv_format.formats import head_scale_offset
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

PRODUCT_ROWS = 128
"""Query rows of a matrix product: heads times tokens."""
KEYS = 64
"""Keys of a block."""


def tokens_of_a_record(heads: int) -> int:
    """Tokens whose queries one program holds."""
    return max(1, PRODUCT_ROWS // next_power_of_2(heads))


@dependent_jit(
    do_not_specialize=["out_stride", "base"],
    do_not_specialize_on_alignment=["rows", "starts", "lens", "records", "weights"],
)
def scores_kernel(
    q, weights, cache, out, rows, starts, lens, table, records, token_stride, head_stride, part_stride, weight_stride,
    cache_stride, table_stride, out_stride, base,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, RATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[token - base, position] = score, for all visible positions. RATE: `PagedQueries.rate`; PARTS: of the weights,
    which are their sum.

    records [N, 3]: request, first token, number of tokens. Grid (N, programs of a record).
    """
    wait_for_inputs()
    record = records + tl.program_id(0) * 3
    request, first, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    context = tl.load(lens + request)
    before = context - (tl.load(starts + request + 1) - first)  # positions before the record's first token
    index, channel = tl.arange(0, TOKENS * HEADS), tl.arange(0, WIDTH)
    token, head = index // HEADS, index % HEADS
    whole = (token < count) & (head < NUM_HEADS)
    line = (first + token).to(tl.int64)
    place = q + line[:, None] * token_stride + (head * head_stride)[:, None] + channel[None, :]
    queries = tl.load(place, whole[:, None], 0.0)
    factors = tl.zeros([TOKENS * HEADS], tl.float32)
    for part in tl.static_range(PARTS):
        factors += tl.load(weights + part * part_stride + line * weight_stride + head, whole, 0.0)
    table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
    number, inside = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    visible = before + number + 1
    seen = before + count  # of the last token
    line_out = out + (first - base + number).to(tl.int64) * out_stride
    for begin in range(tl.program_id(1) * KEYS, seen, tl.num_programs(1) * KEYS):
        position = begin + inside
        live = position < seen
        offset = (tl.load(table_row + position * RATE, live, 0) // RATE).to(tl.int64) * cache_stride
        keys = tl.load(cache + offset[:, None] + channel[None, :], live[:, None], 0)
        if FP8:
            keys = keys.to(tl.float8e4nv, bitcast=True)
        products = tl.dot(queries, keys.trans(1, 0), input_precision=PRECISION)
        products = tl.maximum(products, 0.0) * factors[:, None]
        scores = tl.sum(tl.reshape(products, (TOKENS, HEADS, KEYS)), axis=1)
        if FP8:
            scales = tl.load(cache.to(tl.pointer_type(tl.float32)) + (offset + SCALE) // 4, live, 0.0)
            scores *= scales[None, :]
        stored = (number < count)[:, None] & (position[None, :] < visible[:, None])
        tl.store(line_out[:, None] + position[None, :], scores, stored)


def scores(
    q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, records: Tensor, out: Tensor, base: int,
    programs: int,
) -> None:  # fmt: skip
    """Writes the scores of the records' tokens, the first of which is token `base`: out [rows, S] float32. Invisible
    positions are not written.

    Args:
        q: [T, Hi, I] in the cache's dtype, e4m3 for records. weights: [P, T, Hi] float32, parts of a sum.
        records: [N, 3] int32, see `scores_kernel`. programs: of a record.
    """
    heads, width = q.shape[1:]
    fp8 = cache.dtype == torch.uint8
    scores_kernel[(len(records), programs)](
        q, weights, cache, out, queries.rows, queries.query_starts, queries.context_lens_device, queries.slot_table,
        records, q.stride(0), q.stride(1), *weights.stride()[:2], cache.stride(0), queries.slot_table.stride(0),
        out.stride(0), base, **_constants(heads, width, q.dtype, fp8, queries.rate), PARTS=len(weights),
        num_warps=8,
    )  # fmt: skip


def _constants(heads: int, width: int, dtype: torch.dtype, fp8: bool, rate: int = 1) -> dict[str, object]:
    return {
        "NUM_HEADS": heads, "HEADS": next_power_of_2(heads), "WIDTH": width, "TOKENS": tokens_of_a_record(heads),
        "KEYS": KEYS, "FP8": fp8, "SCALE": head_scale_offset(width),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "RATE": rate,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    cases = []
    for heads in (64, 32):
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            fp8 = dtype == torch.float8_e4m3fn
            signature = {
                "q": f"*{element(dtype)}", "weights": "*fp32:1", "cache": "*u8" if fp8 else f"*{element(dtype)}",
                "out": "*fp32", "rows": "*i32:1", "starts": "*i32:1", "lens": "*i32:1", "table": "*i32",
                "records": "*i32:1", "token_stride": "i32:16", "head_stride": "i32:16", "part_stride": "i32:16",
                "weight_stride": "i32:16", "cache_stride": "i32" if fp8 else "i32:16", "table_stride": "i32:16",
                "out_stride": "i32", "base": "i32",
            }  # fmt: skip
            name = f"index scores, {heads} heads, {'fp8 records' if fp8 else element(dtype)}"
            constants = _constants(heads, 128, dtype, fp8) | {"PARTS": 1}
            cases.append(AotCase(name, scores_kernel, signature, constants, 8, 3, True))
            if not fp8:  # entries of DeepSeek V4 and V4.1
                constants |= {"RATE": 4 if heads == 64 else 2, "PARTS": 8 if heads == 64 else 10}
                cases.append(AotCase(f"{name}, of entries", scores_kernel, signature, constants, 8, 3, True))
    return cases
