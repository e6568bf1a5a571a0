"""The rows of attention of captured decodes in Triton, in one launch for each rate, from the tokens' positions.

Legend: as in `protocol`; R requests, K rows of a token, E entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.compression.protocol import DecodedTokens, Kept, PlannedRows, SelectedEntries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, warps_for

_BLOCK = 1024
"""Most rows of a program."""


@dependent_jit(
    do_not_specialize=["first_entry", "width"],
    do_not_specialize_on_alignment=[*UNALIGNED, "requests", "real", "counts", "places", "starts", "of_token",
                                    "columns", "chosen", "visible"],
)  # fmt: skip
def rows_kernel(
    positions, slots, requests, real, table, full, rows, counts, places, starts, of_token, columns, chosen, visible,
    table_stride, full_stride, rows_stride, first_entry, width,
    COUNT: tl.constexpr, WINDOW: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows[t, :width] = slots of the window in `table`, then entries by `full`, then -1. TOP_K: entries are set later,
    at most that many; 0: all are listed. COUNT: tokens of a request. EACH, SLOTS: of `Kept`. Outputs may be None. Grid
    (T, blocks of `width`)."""
    wait_for_inputs()
    token, tile = tl.program_id(0), tl.program_id(1)
    position, request = tl.load(positions + token), tl.load(requests + token // COUNT)
    seen = (position + 1).to(tl.int32)
    before = tl.minimum(seen, WINDOW)
    entries = seen // RATE if RATE > 0 else 0
    column = tile * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(table + request.to(tl.int64) * table_stride + seen - before + column, column < before, -1)
    if RATE > 0 and TOP_K == 0:
        number = column - before
        known = (number >= 0) & (number < entries)
        slot = tl.load(full + request.to(tl.int64) * full_stride + number * RATE, known, 0)
        found = tl.where(known, slot // RATE + first_entry, found)
    tl.store(rows + token.to(tl.int64) * rows_stride + column, found, column < width)
    if tile == 0:
        some = tl.minimum(entries, TOP_K) if TOP_K > 0 else entries
        tl.store(counts + token, before + some)
        if places is not None:
            if SLOTS > 0:
                slot = tl.load(slots + token).to(tl.int64)
                place = slot // SLOTS * EACH + slot % SLOTS % EACH
            else:
                place = (request + 1).to(tl.int64) * EACH + position % EACH
            if real is not None:
                place = tl.where(tl.load(real + token) != 0, place, 0)
            tl.store(places + token, place)
        if starts is not None:
            tl.store(starts + token, tl.load(positions + token // COUNT * COUNT))
            tl.store(of_token + token, request)
        if columns is not None:
            tl.store(columns + token, before)
            tl.store(chosen + token, some)
            tl.store(visible + token, tl.maximum(entries, 1))


def plan_rows(
    tokens: DecodedTokens, window: int, rate: int, first_entry: int, kept: Kept | None, out: PlannedRows,
    selected: SelectedEntries | None = None,
) -> Tensor | None:  # fmt: skip
    """See `PlanRows`."""
    count, width = out.rows.shape
    places = None if kept is None else torch.empty(count, dtype=torch.int64, device=out.rows.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    chosen = (None, None, None) if selected is None else (selected.columns, selected.counts, selected.visible)
    rows_kernel[(count, triton.cdiv(width, block))](
        tokens.positions, tokens.slots, tokens.requests, tokens.real, tokens.table, tokens.full, out.rows, out.counts,
        places, out.starts, out.of_token, *chosen, tokens.table.stride(0), tokens.full.stride(0), out.rows.stride(0),
        first_entry, width, count // len(tokens.requests), window, rate, 0 if selected is None else selected.top_k,
        0 if kept is None else kept.each, 0 if kept is None else kept.block, block, num_warps=warps_for(block),
    )  # fmt: skip
    return places


def aot_cases() -> list[AotCase]:
    """DeepSeek V4-Flash, one token of a request: windows, selected entries, and entries of 128 tokens."""
    cases = []
    for label, rate, top_k, each, block in (("window", 0, 0, 0, 0), ("csa", 4, 512, 8, 128), ("hca", 128, 0, 128, 0)):
        signature = {
            "positions": "*i64:1", "slots": "*i64:1", "requests": "*i32:1", "real": "*i32:1", "table": "*i32",
            "full": "*i32", "rows": "*i32", "counts": "*i32:1", "places": "*i64:1", "starts": "*i64:1",
            "of_token": "*i32:1", "table_stride": "i32:16", "full_stride": "i32:16", "rows_stride": "i32:16",
            "first_entry": "i32", "width": "i32",
        }  # fmt: skip
        sizes = {"COUNT": 1, "WINDOW": 128, "RATE": rate, "TOP_K": top_k, "EACH": each, "SLOTS": block, "BLOCK": 1024}
        constants: dict[str, object] = dict(sizes)
        absent: tuple[str, ...] = ("places",) if not rate else ("starts", "of_token")
        if top_k:
            signature |= dict.fromkeys(("columns", "chosen", "visible"), "*i32:1")
        else:
            absent += ("columns", "chosen", "visible")
        constants |= dict.fromkeys(absent)
        signature = {name: kind for name, kind in signature.items() if name not in absent}
        cases.append(AotCase(f"rows of a step, {label}", rows_kernel, signature, constants, warps_for(1024), 3, False))
    return cases
