"""MLA in the absorbed form: few query tokens against the paged latent, one program per segment of `schedule`.

Keys are the latent and the rotary channels, values the latent alone: a tile is read once and serves both products. The
slots of the next tile are prefetched during the current tile, so that addresses are ready when its copies start.
Rows are (query token, head) pairs, contiguous in q and in the output.

Legend: T query tokens, H heads, C kv_lora_rank, P rotary width, N segments; M, N rows and context tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.schedule import RECORD, Schedule
from moe_engine.kernels.attention.selected import Shift, Turn
from moe_engine.kernels.attention.triton.merge import merge_partials
from moe_engine.kernels.attention.triton.merge_values import merge_values
from moe_engine.kernels.attention.triton.tiles import (
    LOG2_E,
    LOWEST,
    columns,
    finish,
    hide,
    next_slots,
    seen_tokens,
    softmax_step,
    stored_columns,
    stored_values,
    with_sinks,
)
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
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

_RECORD = tl.constexpr(RECORD)
_TOKEN, _GROUPS, _GROUP = tl.constexpr(FP8_TOKEN), tl.constexpr(FP8_GROUPS), tl.constexpr(GROUP)


@dataclass(frozen=True)
class LatentTile:
    """M rows, N context tokens. The latent is cut into `parts` column blocks: narrow products need fewer registers for
    addresses and results.

    With `shares` 2, two programs compute the same scores and half of the values each: 64 or 128 rows by all 512
    columns exceed an SM's registers, and 32 rows leave tensor cores idle.
    """

    block_m: int
    block_n: int
    parts: int
    shares: int
    num_warps: int
    num_stages: int


def latent_tile(num_rows: int, dtype: torch.dtype, form: int) -> LatentTile:
    """The tile for requests of at most `num_rows` rows, for q of `dtype`; chosen to fit registers and shared
    memory (227 KiB) of sm_90 and sm_100, not by measurement."""
    if dtype == torch.float32:
        return LatentTile(16, 16, 8, 2, 8, 2)
    if form != PLAIN:
        if num_rows <= 16:
            return LatentTile(16, 64, 2, 1, 8, 3)
        if num_rows <= 32:
            return LatentTile(32, 32, 2, 1 if form == FP8_TOKEN else 2, 8, 3)
        return LatentTile(128, 16 if form == FP8_TOKEN else 32, 4, 2, 8, 2)
    if num_rows <= 16:
        return LatentTile(16, 64, 2, 1, 4, 3)
    if num_rows <= 32:
        return LatentTile(32, 64, 2, 1, 8, 3)
    if num_rows <= 64:
        return LatentTile(64, 32, 4, 2, 4, 4)
    return LatentTile(128, 32, 4, 2, 8, 2)


@triton.jit
def _latent_part(
    cache, offset, first,
    LATENT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[N, WIDTH] DTYPE: columns [first, first + WIDTH) of the latent at `cache + offset`, scaled in `FP8_GROUPS`."""
    values = columns(cache, offset, first, LATENT, WIDTH, PADDED)
    if KV_FORMAT != _GROUPS:
        values = stored_values(values, KV_FORMAT, DTYPE)
    else:
        floats = cache.to(tl.pointer_type(tl.float32)) + (offset // 4)[:, None]
        NUM: tl.constexpr = WIDTH // _GROUP if WIDTH > _GROUP else 1
        group = first // _GROUP + tl.arange(0, NUM)
        scale = tl.load(floats + LATENT // 4 + group[None, :])
        raw = stored_values(values, KV_FORMAT, tl.float32)
        if NUM == 1:
            values = (raw * scale).to(DTYPE)
        else:
            wide = tl.reshape(raw, [raw.shape[0], NUM, _GROUP]) * scale[:, :, None]
            values = tl.reshape(wide.to(DTYPE), [raw.shape[0], WIDTH])
    return values


@triton.jit
def _rotary_part(
    cache, offset,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_P: tl.constexpr, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[N, BLOCK_P] DTYPE: the rotary channels, unscaled in `FP8_TOKEN`."""
    if KV_FORMAT == _GROUPS:
        halves = cache.to(tl.pointer_type(tl.bfloat16)) + LATENT // 2 + LATENT // _GROUP * 2
        values = columns(halves, offset // 2, 0, ROTARY, BLOCK_P, ROTARY != BLOCK_P).to(DTYPE)
    else:
        values = stored_columns(cache + LATENT, offset, 0, ROTARY, BLOCK_P, KV_FORMAT, DTYPE)
    return values


@triton.jit
def _rotary_scores(
    q_rotary, cache, offset,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, KV_FORMAT: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, N]: products of the rotary channels, 0 without any; and in `FP8_TOKEN`, divided by it, the scale [1, N] of
    the latents."""
    of_latent = tl.full([1, BLOCK_N], 1.0, tl.float32)
    if ROTARY > 0:
        rotary = _rotary_part(cache, offset, LATENT, ROTARY, BLOCK_P, KV_FORMAT, q_rotary.dtype)
        scores = tl.dot(q_rotary, tl.trans(rotary), input_precision=PRECISION)
    else:
        scores = tl.zeros([q_rotary.shape[0], BLOCK_N], tl.float32)
    if KV_FORMAT == _TOKEN:
        floats = cache.to(tl.pointer_type(tl.float32)) + offset // 4 + SCALES // 4
        of_latent = tl.load(floats)[None, :]
        scores = scores * (tl.load(floats + 1)[None, :] / of_latent)
    return scores, of_latent


@triton.jit
def _first(i, own, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """First column of part i, for a program whose own share of the values begins with part `own`."""
    return (i + own) % PARTS * WIDTH


@triton.jit
def _turned_back(values, first, angles, LATENT: tl.constexpr, TURNED: tl.constexpr):
    """values [M, WIDTH], columns from `first` on: interleaved pairs of the last TURNED of the LATENT columns rotated by
    the negative angles at `angles`, other columns as they are."""
    HALF: tl.constexpr = values.shape[1] // 2
    pair = first // 2 + tl.arange(0, HALF) - (LATENT - TURNED) // 2
    live = (pair >= 0) & (pair < TURNED // 2)
    cos, sin = tl.load(angles + pair, live, 1.0)[None, :], tl.load(angles + TURNED // 2 + pair, live, 0.0)[None, :]
    lower, upper = tl.split(tl.reshape(values, [values.shape[0], HALF, 2]))
    return tl.reshape(tl.join(lower * cos + upper * sin, upper * cos - lower * sin), values.shape)


@triton.jit
def _turned_parts(
    mixed, cos_sin, position, share,
    LATENT: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The parts of a share, the last TURNED channels of the latent rotated by the negative angles of a position."""
    angles = cos_sin + position * TURNED
    OWN: tl.constexpr = len(mixed)
    turned = ()
    for i in tl.static_range(OWN):
        part = mixed[i]
        if (PARTS - OWN + i + 1) * WIDTH > LATENT - TURNED:  # of some share
            part = _turned_back(part, _first(i, share * OWN, PARTS, WIDTH), angles, LATENT, TURNED)
        turned = turned + (part,)  # type: ignore[assignment]
    return turned


@triton.jit
def _store(
    out, mixed, norm, row, left, share,
    LATENT: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores the share's columns, divided by the row sums: rows below `left`, or all rows with WHOLE."""
    for i in tl.static_range(OWN):
        column = _first(i, share * OWN, PARTS, WIDTH) + tl.arange(0, WIDTH)
        place = out + row[:, None] * LATENT + column[None, :]
        values = (mixed[i] * norm[:, None]).to(out.dtype.element_ty)
        if WHOLE and PARTS * WIDTH == LATENT:
            tl.store(place, values)
        else:
            tl.store(place, values, (row < left)[:, None] & (column < LATENT)[None, :])


@dependent_jit(
    do_not_specialize=["query_len", "shift_first", "shift_added"],
    do_not_specialize_on_alignment=["rows", "visible", "lens", "positions"],
)
def latent_kernel(
    q, cache, out, partial, lse, segments, rows, table, visible, lens, sinks, positions, cos_sin,
    q_stride, cache_stride, table_stride, scale, query_len, shift_first, shift_added,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
    PARTS: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FORMAT: tl.constexpr,
    SCALES: tl.constexpr, TREE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BOUNDS: tl.constexpr,
    SINKS: tl.constexpr, SHIFT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """q [T * H, C + P], cache [slots, .] -> out [T * H, C], or partial [., M, C] and lse [., M] to base 2.
    `scale` is the score scale times log2(e). WIDE: the cache has 2^31 elements or more. SCALES: offset of the scales
    in `FP8_TOKEN`. BOUNDS: as `Schedule.query_len`, with the context tokens `lens` of each request. SINKS: `sinks` [H]
    are logits without a value; those of partial results are added by the merge. SHIFT: see `Shift`. TURNED: width of
    `cos_sin`, see `_turned_parts`; partial results merge to a rotated result, since a rotation is linear.
    """
    wait_for_inputs()
    record = segments + tl.program_id(0) * _RECORD
    left = tl.load(record + 2)
    if left > 0:
        WIDTH: tl.constexpr = BLOCK_C // PARTS
        OWN: tl.constexpr = PARTS // SHARES
        PADDED: tl.constexpr = BLOCK_C != LATENT
        WHOLE: tl.constexpr = HEADS % BLOCK_M == 0  # blocks are full, with rows of one token
        dtype: tl.constexpr = q.dtype.element_ty
        token, first_row = tl.load(record + 1), tl.load(record + 3)
        begin, stop, first = seen_tokens(record, lens, query_len, BOUNDS)
        row, inside = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        q_token = q + (token.to(tl.int64) * HEADS + first_row) * q_stride
        place = (row if WHOLE else tl.minimum(row, left - 1)) * q_stride
        q_rotary = columns(q_token + LATENT, place, 0, ROTARY, BLOCK_P, ROTARY != BLOCK_P)
        share = tl.program_id(1)
        q_parts = ()
        for i in tl.static_range(PARTS):
            q_parts = q_parts + (columns(q_token, place, _first(i, share * OWN, PARTS, WIDTH), LATENT, WIDTH, PADDED),)  # type: ignore[assignment]
        mixed = ()
        for _ in tl.static_range(OWN):
            mixed = mixed + (tl.zeros([BLOCK_M, WIDTH], tl.float32),)  # type: ignore[assignment]
        inner = first_row // HEADS  # the rows' query token in their request
        if not WHOLE:
            inner += (first_row % HEADS + tl.minimum(row, left - 1)) // HEADS
        limit = first + inner
        word = tl.load(visible + token + inner) if TREE else limit
        best, total = tl.full([BLOCK_M], LOWEST, tl.float32), tl.zeros([BLOCK_M], tl.float32)
        table_row = table + tl.load(rows + tl.load(record)).to(tl.int64) * table_stride
        slots = next_slots(table_row, begin + inside, stop)
        for start in range(begin, stop, BLOCK_N):
            if SHIFT:
                slots += tl.where(slots >= shift_first, shift_added, 0)
            offset = (slots.to(tl.int64) if WIDE else slots) * cache_stride
            slots = next_slots(table_row, start + BLOCK_N + inside, stop)
            scores, of_latent = _rotary_scores(
                q_rotary, cache, offset, LATENT, ROTARY, BLOCK_P, BLOCK_N, KV_FORMAT, SCALES, PRECISION
            )
            latent = ()
            for i in tl.static_range(PARTS):
                column = _first(i, share * OWN, PARTS, WIDTH)
                latent = latent + (_latent_part(cache, offset, column, LATENT, WIDTH, PADDED, KV_FORMAT, dtype),)  # type: ignore[assignment]
                scores = tl.dot(q_parts[i], tl.trans(latent[i]), scores, input_precision=PRECISION)
            if KV_FORMAT == _TOKEN:
                scores = scores * of_latent
            scores = hide(scores, start + inside, limit, word, first - 1, stop, TREE, WHOLE)
            weights, best, total, decay = softmax_step(scores, best, total, scale)
            if KV_FORMAT == _TOKEN:
                weights = weights * of_latent
            weights = weights.to(dtype)
            new = ()
            for i in tl.static_range(OWN):
                new = new + (tl.dot(weights, latent[i], mixed[i] * decay[:, None], input_precision=PRECISION),)  # type: ignore[assignment]
            mixed = new
        target = tl.load(record + 7)
        total = with_sinks(total, best, sinks, (first_row + tl.minimum(row, left - 1)) % HEADS, target, SINKS)
        norm, log_sum = finish(best, total)
        if TURNED > 0:
            mixed = _turned_parts(mixed, cos_sin, tl.load(positions + token), share, LATENT, PARTS, WIDTH, TURNED)
        if target < 0:
            rows_before = token.to(tl.int64) * HEADS + first_row
            _store(out + rows_before * LATENT, mixed, norm, row, left, share, LATENT, PARTS, WIDTH, OWN, WHOLE)
        else:
            rows_before = target.to(tl.int64) * BLOCK_M
            _store(partial + rows_before * LATENT, mixed, norm, row, left, share, LATENT, PARTS, WIDTH, OWN, WHOLE)
            tl.store(lse + rows_before + row, log_sum, share == 0)  # shares round their sums differently


def latent_attention(
    q: Tensor, cache: Tensor, queries: PagedQueries, schedule: Schedule, tile: LatentTile, scale: float, latent: int,
    form: int, weight: Tensor | None = None, sinks: Tensor | None = None, shift: Shift | None = None,
    turn: Turn | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, C+P], cache [slots, C+P] or FP8 rows -> [T, H, C] in q's dtype. No host synchronization.

    Args:
        schedule: schedule of these queries, H rows per token, with the tile's block size.
        form: row format of the cache, from `latent_records.form_of`.
        weight: W_UV [H, V, C]; the result is then [T, H, V].
        sinks: float32 [H], logits without a value; not with `weight`.
        turn: of the results [T, H, C], by interleaved pairs; of requests of one query token each.

    Raises:
        ValueError: if the cache has another dtype, or strided rows.
    """
    num_tokens, heads, width = q.shape
    if cache.stride(-1) != 1 or (form == PLAIN and cache.dtype != q.dtype):
        raise ValueError(f"queries are {q.dtype}, the cache is {cache.dtype} with strides {cache.stride()}")
    cache = cache if form == PLAIN else cache.view(torch.uint8)
    out = q.new_empty(num_tokens, heads, latent)
    if num_tokens == 0:
        return out if weight is None else q.new_empty(0, heads, weight.shape[1])
    if q.stride(2) != 1 or (q.stride(0) != heads * q.stride(1) and num_tokens > 1):
        q = q.contiguous()
    partial = q.new_empty(max(1, schedule.num_partials), 1, tile.block_m, latent, dtype=torch.float32)
    lse = partial.new_empty(partial.shape[:3])
    latent_kernel[(len(schedule.segments), tile.shares)](
        q, cache, out, partial, lse, schedule.segments, queries.rows, queries.slot_table, queries.visible,
        queries.context_lens_device if schedule.query_len is not None else None, sinks,
        *((None, None) if turn is None else (turn.positions, turn.table.cos_sin)),
        q.stride(1), cache.stride(0), queries.slot_table.stride(0), scale * LOG2_E, schedule.query_len or 0,
        0 if shift is None else shift.first, 0 if shift is None else shift.added,
        **_constants(heads, latent, width - latent, tile, form, queries.visible is not None, q.dtype),
        WIDE=cache.shape[0] * cache.stride(0) >= 1 << 31, BOUNDS=schedule.query_len is not None,
        SINKS=sinks is not None, SHIFT=shift is not None, TURNED=0 if turn is None else turn.table.width,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if weight is not None:
        return merge_values(out, partial, lse, schedule, weight)
    merge_partials(partial, lse, schedule, out, sinks)
    return out


def _constants(
    heads: int, latent: int, rotary: int, tile: LatentTile, form: int, tree: bool, dtype: torch.dtype
) -> dict[str, object]:
    block_c = max(16 * tile.parts, next_power_of_2(latent))  # a part has 16 columns at least
    return {
        "HEADS": heads, "LATENT": latent, "ROTARY": rotary, "BLOCK_C": block_c,
        "BLOCK_P": max(16, next_power_of_2(rotary)), "PARTS": tile.parts, "SHARES": tile.shares,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FORMAT": form, "SCALES": scales_offset(latent, rotary),
        "TREE": tree, "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3 (128 heads, and 16 of 8 ranks) and V2-Lite (16 heads), one to eight query tokens; sinks: DeepSeek
    V4-Pro and V4-Flash (64 heads, and 8 of 8 ranks), whose selected rows have no rotary channels apart from values,
    with and without (GLM-5.3-Flash) the rotation of results."""
    bf16, fp32 = torch.bfloat16, torch.float32
    sizes = [
        (128, 1, bf16, PLAIN, False), (128, 2, bf16, PLAIN, True), (16, 1, bf16, PLAIN, False),
        (16, 2, bf16, PLAIN, False), (16, 4, bf16, PLAIN, False), (16, 8, bf16, PLAIN, True),
        (128, 1, bf16, FP8_TOKEN, False), (128, 1, bf16, FP8_GROUPS, False), (16, 1, bf16, FP8_TOKEN, False),
        (16, 1, bf16, FP8_GROUPS, False), (16, 2, bf16, FP8_TOKEN, False), (16, 2, bf16, FP8_GROUPS, False),
        (16, 1, bf16, FP8_RANGE, False), (16, 1, bf16, FP8_TENSOR, False), (16, 2, bf16, FP8_TENSOR, False),
        (128, 1, bf16, FP8_TENSOR, False), (16, 1, fp32, PLAIN, False),
    ]  # fmt: skip
    cases = []
    for heads, tokens, dtype, form, tree, sinks in (
        *((*size, False) for size in sizes), *((heads, 1, bf16, PLAIN, False, True) for heads in (128, 64, 8)),
    ):  # fmt: skip
        tile = latent_tile(heads * tokens, dtype, form)
        kind, stored = f"*{element(dtype)}", "*u8" if form != PLAIN else f"*{element(dtype)}"
        signature = {
            "q": kind, "cache": stored, "out": kind, "partial": "*fp32", "lse": "*fp32", "segments": "*i32",
            "rows": "*i32:1", "table": "*i32", "visible": "*i64:1", "q_stride": "i32:16", "cache_stride": "i32:16",
            "table_stride": "i32:16", "scale": "fp32", "query_len": "i32",
            "shift_first": "i32", "shift_added": "i32",
        }  # fmt: skip
        constants = {
            **_constants(heads, 512, 0 if sinks else 64, tile, form, tree, dtype), "WIDE": False, "BOUNDS": not tree,
            "SINKS": sinks, "SHIFT": False, "TURNED": 0,
        }  # fmt: skip
        signature |= {"sinks": "*fp32"} if sinks else {}
        constants |= {"positions": None, "cos_sin": None} | ({} if sinks else {"sinks": None})
        if tree:
            constants["lens"] = None
        else:
            signature["lens"] = "*i32:1"
        if not tree:
            del signature["visible"]
            constants["visible"] = None
        form_name = (element(dtype), "fp8 token records", "fp8 group records", "e5m2", "e4m3")[form]
        name = f"latent attention, {heads} heads, {tokens} tokens, {form_name}{', tree' * tree}{', sinks' * sinks}"
        cases.append(AotCase(name, latent_kernel, signature, constants, tile.num_warps, tile.num_stages, True))
    large = [case for case in cases if "group records" in case.name]  # whose pools reach 2^31 bytes on one GPU
    wide = (replace(case, name=f"{case.name}, wide", constants={**case.constants, "WIDE": True}) for case in large)
    whole = [_turned(case) for case in cases if case.name.endswith(", sinks")]
    shared = [case for case in (*cases, *whole) if ", sinks" in case.name and " 8 heads" in case.name]
    shifted = (
        replace(case, name=f"{case.name}, shift", constants={**case.constants, "SHIFT": True}) for case in shared
    )
    return [*cases, *wide, *whole, *shifted]


def _turned(case: AotCase) -> AotCase:
    """The case with DeepSeek V4's rotation of results."""
    constants = {name: value for name, value in case.constants.items() if name not in ("positions", "cos_sin")}
    signature = {**case.signature, "positions": "*i64:1", "cos_sin": "*fp32"}
    return replace(case, name=f"{case.name}, turned", signature=signature, constants=constants | {"TURNED": 64})
