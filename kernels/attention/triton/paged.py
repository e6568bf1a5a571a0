"""Grouped-query attention over paged keys and values, for decode and prefill: one program per segment of `schedule` and
KV head. Rows are (query token, head of the group) pairs, so a tile of keys serves all heads of its group.

Legend: T query tokens, H heads, G KV heads, D width of a key, V width of a value, N segments; M, N rows and context
tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.schedule import RECORD, Schedule
from moe_engine.kernels.attention.triton.merge import merge_partials
from moe_engine.kernels.attention.triton.tiles import (
    LOG2_E,
    LOWEST,
    bounded,
    columns,
    finish,
    first_position,
    hide,
    inside_window,
    moved_window,
    next_slots,
    seen_tokens,
    softmax_step,
    stored_columns,
    with_sinks,
)
from moe_engine.kernels.attention_windows import window_number
from moe_engine.kernels.kv_format.formats import FP8_RANGE, FP8_TOKEN, PLAIN, head_scale_offset
from moe_engine.kernels.kv_format.head_records import form_of, value_width
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

_RECORD = tl.constexpr(RECORD)
_TOKEN = tl.constexpr(FP8_TOKEN)


@dataclass(frozen=True)
class PagedTile:
    """M rows, N context tokens, and resident programs per SM."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


def paged_tile(num_rows: int, width: int, dtype: torch.dtype) -> PagedTile:
    """The tile for requests of at most `num_rows` rows; chosen to fit registers and shared memory of sm_90 and
    sm_100, not by measurement."""
    if dtype == torch.float32 or width > 128:
        return PagedTile(16, 32, 4, 2, 1)
    if num_rows <= 16:
        return PagedTile(16, 64, 4, 3, 2)
    if num_rows <= 64:
        return PagedTile(64, 64, 4, 3, 2)
    return PagedTile(128, 64, 8, 3, 1)


@triton.jit
def _head_scales(cache, offset, SCALE: tl.constexpr):
    """[N]: the scales of the records at `cache + offset`."""
    return tl.load((cache + offset + SCALE).to(tl.pointer_type(tl.float32)))


@dependent_jit(do_not_specialize=["query_len"], do_not_specialize_on_alignment=["rows", "visible", "lens"])
def paged_kernel(
    q, keys, values, out, partial, lse, segments, rows, table, visible, sinks, lens,
    q_token_stride, q_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride, scale,
    query_len,
    PER_GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FORMAT: tl.constexpr, SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr, TREE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, BOUNDS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """q [T, H, D], keys [slots, G, D] and values [slots, G, V] or FP8 rows -> out [T, H, V], or partial [., G, M, V]
    and lse [., G, M] to base 2.

    `scale` is the score scale times log2(e). WIDE: a cache has 2^31 elements or more. SCALE, VALUE_SCALE: offset of the
    scale in a record of a key, of a value. WINDOW: positions that a query token sees; 0: all; negative: a
    `ChunkWindow`. SINKS: `sinks` [H] are logits without a value; those of partial results are added by the merge.
    BOUNDS: as `Schedule.query_len`, with the context tokens `lens` of each request. CAP: bound of the scores; 0: none.
    """
    wait_for_inputs()
    record = segments + tl.program_id(0) * _RECORD
    left = tl.load(record + 2)
    if left > 0:
        dtype: tl.constexpr = q.dtype.element_ty
        group, groups = tl.program_id(1), tl.num_programs(1)
        token, first_row = tl.load(record + 1).to(tl.int64), tl.load(record + 3)
        begin, stop, first = seen_tokens(record, lens, query_len, BOUNDS)
        row = tl.arange(0, BLOCK_M)
        inner = first_row + tl.minimum(row, left - 1)
        query = inner // PER_GROUP  # the row's query token in its request
        place = query.to(tl.int64) * q_token_stride + inner % PER_GROUP * q_head_stride
        q_group = q + token * q_token_stride + group * PER_GROUP * q_head_stride
        rotated = columns(q_group, place, 0, WIDTH, BLOCK, WIDTH != BLOCK)
        limit = first + query
        word = limit
        if TREE:
            word = tl.load(visible + token + query)
        before = first - 1
        best = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
        table_row = table + tl.load(rows + tl.load(record)).to(tl.int64) * table_stride
        inside = tl.arange(0, BLOCK_N)
        lowest = tl.maximum(first_position(first + first_row // PER_GROUP, WINDOW), 0)
        if BOUNDS and WINDOW != 0:
            begin, stop = moved_window(record, lens, lowest, BLOCK_N)
        slots = next_slots(table_row, inside_window(begin + inside, lowest, WINDOW), stop)
        for start in range(begin, stop, BLOCK_N):
            slot = slots.to(tl.int64) if WIDE else slots
            slots = next_slots(table_row, inside_window(start + BLOCK_N + inside, lowest, WINDOW), stop)
            own_keys, own_values = keys + group * key_head_stride, values + group * value_head_stride
            key = stored_columns(own_keys, slot * key_stride, 0, WIDTH, BLOCK, KV_FORMAT, dtype)
            scores = tl.dot(rotated, tl.trans(key), input_precision=PRECISION)
            if KV_FORMAT == _TOKEN:
                scores = scores * _head_scales(own_keys, slot * key_stride, SCALE)[None, :]
            scores = bounded(scores, scale, CAP)
            scores = hide(scores, start + inside, limit, word, before, stop, TREE, False)
            if WINDOW != 0:
                seen = (start + inside)[None, :] >= first_position(limit, WINDOW)[:, None]
                scores = tl.where(seen, scores, float("-inf"))
            weights, best, total, decay = softmax_step(scores, best, total, scale)
            if KV_FORMAT == _TOKEN:
                weights = weights * _head_scales(own_values, slot * value_stride, VALUE_SCALE)[None, :]
            value = stored_columns(own_values, slot * value_stride, 0, VALUE, VALUE_BLOCK, KV_FORMAT, dtype)
            mixed = tl.dot(weights.to(value.dtype), value, mixed * decay[:, None], input_precision=PRECISION)
        target = tl.load(record + 7)
        total = with_sinks(total, best, sinks, group * PER_GROUP + inner % PER_GROUP, target, SINKS)
        norm, log_sum = finish(best, total)
        mixed = mixed * norm[:, None]
        column = tl.arange(0, VALUE_BLOCK)
        live = (row < left)[:, None] & (column < VALUE)[None, :]
        if target < 0:
            head = group * PER_GROUP + inner % PER_GROUP
            out_row = query.to(tl.int64) * groups * PER_GROUP + head
            base = out + token * groups * PER_GROUP * VALUE
            tl.store(base + out_row[:, None] * VALUE + column[None, :], mixed.to(out.dtype.element_ty), live)
        else:
            partial_row = (target * groups + group) * BLOCK_M + row
            tl.store(partial + partial_row.to(tl.int64)[:, None] * VALUE + column[None, :], mixed, live)
            tl.store(lse + partial_row, log_sum)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, schedule: Schedule, tile: PagedTile, scale: float,
    sinks: Tensor | None, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """q [T, H, D], keys [slots, G, D] and values [slots, G, V] or FP8 rows -> [T, H, V]. No host synchronization.

    Args:
        schedule: schedule of these queries, H / G rows per token, with the tile's block size.
        sinks: float32 [H], logits without a value.
        cap: scores are cap * tanh(score / cap); 0: as they are.

    Raises:
        ValueError: if dtypes differ or head widths are strided.
    """
    num_tokens, heads, width = q.shape
    form, value = form_of(keys, width), value_width(keys, values, width)
    for cache, channels in ((keys, width), (values, value)):
        alike = cache.dtype == q.dtype if form == PLAIN else form_of(cache, channels) == form
        if not alike or cache.stride(-1) != 1:
            raise ValueError(f"queries are {q.dtype}, the cache is {cache.dtype} with strides {cache.stride()}")
    if form != PLAIN:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    groups = keys.shape[1]
    out = q.new_empty(num_tokens, heads, value)
    if num_tokens == 0:
        return out
    if q.stride(-1) != 1:
        q = q.contiguous()
    partial = q.new_empty(max(1, schedule.num_partials), groups, tile.block_m, value, dtype=torch.float32)
    lse = partial.new_empty(partial.shape[:3])
    paged_kernel[(len(schedule.segments), groups)](
        q, keys, values, out, partial, lse, schedule.segments, queries.rows, queries.slot_table, queries.visible, sinks,
        queries.context_lens_device if schedule.query_len is not None else None,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        queries.slot_table.stride(0), scale * LOG2_E, schedule.query_len or 0,
        **_constants(heads // groups, width, value, tile, form, queries.visible is not None, q.dtype),
        WINDOW=window_number(queries.window), SINKS=sinks is not None, BOUNDS=schedule.query_len is not None, CAP=cap,
        WIDE=max(c.shape[0] * c.stride(0) for c in (keys, values)) >= 1 << 31,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    merge_partials(partial, lse, schedule, out, sinks)
    return out


def _constants(
    per_group: int, width: int, value: int, tile: PagedTile, form: int, tree: bool, dtype: torch.dtype
) -> dict[str, object]:
    return {
        "PER_GROUP": per_group, "WIDTH": width, "BLOCK": max(16, next_power_of_2(width)), "VALUE": value,
        "VALUE_BLOCK": max(16, next_power_of_2(value)), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "KV_FORMAT": form, "SCALE": head_scale_offset(width), "VALUE_SCALE": head_scale_offset(value), "TREE": tree,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Llama-3-8B (4 heads a KV head), Qwen3 (8, 64 wide and 128), decode, verification and prefill; MiMo-V2-Flash with
    a window (keys of 192, values of 128); Llama 4 with chunks (5 heads); Gemma 2 with a window and bounded scores."""
    cases = []
    bf16, fp32 = torch.bfloat16, torch.float32
    windowed = [(8, width, tokens, bf16, PLAIN, False) for width in (64, 192) for tokens in (1, 512)]  # and sinks
    for per_group, width, tokens, dtype, form, tree in (
        *windowed, (8, 192, 1, bf16, FP8_TOKEN, False),
        (4, 128, 1, bf16, PLAIN, False), (4, 128, 8, bf16, PLAIN, True), (4, 128, 512, bf16, PLAIN, False),
        (8, 128, 1, bf16, PLAIN, False), (8, 128, 512, bf16, PLAIN, False), (2, 64, 1, bf16, PLAIN, False),
        (2, 64, 512, bf16, PLAIN, False), (4, 128, 1, fp32, PLAIN, False), (4, 128, 1, bf16, FP8_TOKEN, False),
        (4, 128, 512, bf16, FP8_TOKEN, False), (4, 128, 1, bf16, FP8_RANGE, False),
        (5, 128, 1, bf16, PLAIN, False), (5, 128, 512, bf16, PLAIN, False),  # chunks
        *((*heads, tokens, bf16, PLAIN, False) for heads in ((2, 256), (8, 512)) for tokens in (1, 512)),  # Gemma 4
    ):  # fmt: skip
        tile = paged_tile(per_group * tokens, width, dtype)
        kind = f"*{element(dtype)}"
        stored = kind if form == PLAIN else "*u8"
        strides = ("q_token", "q_head", "key", "key_head", "value", "value_head", "table")
        signature = {
            **dict.fromkeys(("q", "out"), kind), **dict.fromkeys(("keys", "values"), stored), "partial": "*fp32",
            "lse": "*fp32",
            "segments": "*i32", "rows": "*i32:1", "table": "*i32", "visible": "*i64:1",
            **{f"{name}_stride": "i32:16" for name in strides}, "scale": "fp32",
            "query_len": "i32",
        }  # fmt: skip
        if form == FP8_TOKEN:  # records are a multiple of 4 bytes long
            signature |= dict.fromkeys(("key_stride", "key_head_stride", "value_stride", "value_head_stride"), "i32")
        sinks, value = width in (64, 192) and per_group == 8, width if width > 192 else min(width, 128)
        constants = {**_constants(per_group, width, value, tile, form, tree, dtype), "WIDE": False}
        chunked = per_group == 5
        constants["WINDOW"] = -8192 if chunked else 128 * sinks
        constants |= {"SINKS": sinks, "CAP": 0.0} | ({} if sinks else {"sinks": None})
        signature |= {"sinks": "*fp32"} if sinks else {}
        bounds = tokens <= 8 and not tree  # decodes
        constants |= {"BOUNDS": bounds} | ({} if bounds else {"lens": None})
        signature |= {"lens": "*i32:1"} if bounds else {}
        if not tree:
            del signature["visible"]
            constants["visible"] = None
        rows = (element(dtype), "fp8 records", "", "e5m2")[form]
        more = f"{', tree' * tree}{', sinks' * sinks}{', chunks' * chunked}"
        name = f"paged attention, {per_group} heads of {width}, {tokens} tokens, {rows}{more}"
        cases.append(AotCase(name, paged_kernel, signature, constants, tile.num_warps, tile.num_stages, True))
    return [*cases, *(_capped(case) for case in cases if ", 2 heads of 256," in case.name)]


def _capped(case: AotCase) -> AotCase:
    """Gemma 2 9B: the same with bounded scores, within a window."""
    constants = {**case.constants, "CAP": 50.0, "WINDOW": 4096}
    return replace(case, name=f"{case.name}, bounded scores", constants=constants)
