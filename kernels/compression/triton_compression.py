"""Compressed entries in Triton: a program a token, which ends immediately if its token completes no window. Nothing is
read on the host, so that launches can be captured.

Legend: as in `protocol`; BLOCK channels, TOKENS tokens of a loop iteration.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.compression.protocol import CompressedTokens, CompressorWeights, Kept, PlanRows, SumPairs
from moe_engine.kernels.compression.triton_pairs import sum_pairs
from moe_engine.kernels.compression.triton_rows import plan_rows
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, row_stride

_LOWEST = tl.constexpr(-1e30)
"""Below every gate, and finite."""
_TILE = 4096


@triton.jit
def _keep(source, target, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a row of PARTS times WIDTH numbers."""
    channel = tl.arange(0, BLOCK)
    for part in tl.static_range(PARTS):
        values = tl.load(source + part * WIDTH + channel, channel < WIDTH, 0.0)
        tl.store(target + part * WIDTH + channel, values, channel < WIDTH)


@dependent_jit(do_not_specialize_on_alignment=[*UNALIGNED, "rows", "places"])
def compress_kernel(
    projected, kept, bias, norm, cos_sin, positions, starts, rows, table, slots, places, out, stride, kept_stride,
    table_stride, out_stride, eps, RATE: tl.constexpr, SERIES: tl.constexpr, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr, EACH: tl.constexpr, SLOTS: tl.constexpr, KEEP: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[slots[t] // RATE] = the entry of token t's window, if it completes one; with KEEP, kept[places[t]] =
    projected[t]. SLOTS: `Kept.block`. Grid (T,)."""
    wait_for_inputs()
    token = tl.program_id(0)
    if KEEP:
        ring = kept + tl.load(places + token) * kept_stride
        _keep(projected + token.to(tl.int64) * stride, ring, 2 * SERIES, WIDTH, BLOCK)
    end = tl.load(positions + token) + 1
    if end % RATE == 0:
        start, request = tl.load(starts + token), tl.load(rows + token).to(tl.int64)
        table_row = table + request * table_stride
        channel, inner = tl.arange(0, BLOCK), tl.arange(0, TOKENS)
        top = tl.full([BLOCK], _LOWEST, tl.float32)
        total, mixed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for series in tl.static_range(SERIES):
            for begin in range(0, RATE, TOKENS):
                place = begin + inner
                position = end - (SERIES - series) * RATE + place
                live = (place < RATE) & (position >= 0)  # window 0 has none before
                before = live & (position < start)
                if SLOTS:
                    slot = tl.load(table_row + position, before, 0).to(tl.int64)
                    line = slot // SLOTS * EACH + slot % SLOTS % EACH
                else:
                    line = (request + 1) * EACH + position % EACH
                own = kept + (line * kept_stride)[:, None]
                new = projected + ((token - (end - 1) + position) * stride)[:, None]
                column = series * WIDTH + channel[None, :]
                inside = live[:, None] & (channel < WIDTH)[None, :]
                old, young = inside & before[:, None], inside & (live & (position >= start))[:, None]
                value = tl.load(new + column, young, 0.0).to(tl.float32)
                value += tl.load(own + column, old, 0.0).to(tl.float32)
                column += SERIES * WIDTH
                gate = tl.load(new + column, young, 0.0).to(tl.float32)
                gate += tl.load(own + column, old, 0.0).to(tl.float32)
                column -= SERIES * WIDTH
                gate += tl.load(bias + place[:, None] * (SERIES * WIDTH) + column, inside, 0.0)
                gate = tl.where(inside, gate, float("-inf"))
                higher = tl.maximum(top, tl.max(gate, 0))
                decay, weight = tl.exp(top - higher), tl.exp(gate - higher[None, :])
                total = total * decay + tl.sum(weight, 0)
                mixed = mixed * decay + tl.sum(weight * value, 0)
                top = higher
        entry = mixed / tl.where(channel < WIDTH, total, 1.0)
        scale = tl.rsqrt(tl.sum(entry * entry) / WIDTH + eps)
        entry *= scale * tl.load(norm + channel, channel < WIDTH, 0.0)
        pair = tl.arange(0, BLOCK // 2) - (WIDTH - ROTARY) // 2
        angles, turned = cos_sin + (end - RATE) * ROTARY + pair, (pair >= 0) & (pair < ROTARY // 2)
        cos, sin = tl.load(angles, turned, 1.0), tl.load(angles + ROTARY // 2, turned, 0.0)
        first, second = tl.split(tl.reshape(entry, [BLOCK // 2, 2]))
        both = tl.join(first * cos - second * sin, first * sin + second * cos)
        target = out + tl.load(slots + token).to(tl.int64) // RATE * out_stride + channel
        tl.store(target, tl.reshape(both, [BLOCK]).to(out.dtype.element_ty), channel < WIDTH)


class TritonCompression:
    """`CompressionKernel`."""

    name = "triton"

    @property
    def plan_rows(self) -> PlanRows:
        return plan_rows

    @property
    def sum_pairs(self) -> SumPairs:
        return sum_pairs

    def compress(
        self, projected: Tensor, kept: Kept, weights: CompressorWeights, rotary: RotaryTable, tokens: CompressedTokens,
        out: Tensor, places: Tensor | None = None,
    ) -> None:  # fmt: skip
        if not rotary.interleaved or {projected.stride(1), kept.rows.stride(1), out.stride(1)} != {1}:
            raise ValueError("compression needs contiguous rows and a rotary table of interleaved pairs")
        if len(tokens.positions):
            compress_kernel[(len(tokens.positions),)](
                projected, kept.rows, weights.bias, weights.norm, rotary.cos_sin, tokens.positions, tokens.starts,
                tokens.rows, tokens.table, tokens.slots, places, out, row_stride(projected), row_stride(kept.rows),
                row_stride(tokens.table), row_stride(out), weights.eps,
                **_constants(weights.rate, weights.series, len(weights.norm), rotary.width, kept.each, kept.block),
                KEEP=places is not None, num_warps=8,
            )  # fmt: skip


def _constants(rate: int, series: int, width: int, rotary: int, each: int, slots: int) -> dict[str, Any]:
    block = next_power_of_2(width)
    tokens = min(next_power_of_2(rate), max(1, _TILE // block))
    return {
        "RATE": rate, "SERIES": series, "WIDTH": width, "ROTARY": rotary, "EACH": each, "SLOTS": slots,
        "TOKENS": tokens, "BLOCK": block,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V4: CSA, its indexer, and HCA; projections are kept by the same launch in captured steps."""
    cases = []
    for label, sizes in (
        ("csa", (4, 2, 512, 64, 8, 128)), ("index", (4, 2, 128, 64, 8, 128)), ("hca", (128, 1, 512, 64, 128, 0)),
    ):  # fmt: skip
        for dtype, keep in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
            kind = f"*{element(dtype)}"
            signature = {
                "projected": kind, "kept": kind, "bias": "*fp32", "norm": "*fp32", "cos_sin": "*fp32",
                "positions": "*i64:1", "starts": "*i64:1", "rows": "*i32:1", "table": "*i32", "slots": "*i64:1",
                "out": kind, "stride": "i32:16", "kept_stride": "i32:16", "table_stride": "i32:16",
                "out_stride": "i32:16", "eps": "fp32",
            }  # fmt: skip
            constants = _constants(*sizes) | {"KEEP": keep}
            if keep:
                signature["places"] = "*i64:1"
            else:
                constants["places"] = None
            name = f"compression_{label}_{element(dtype)}" + "_kept" * keep
            cases.append(AotCase(name, compress_kernel, signature, constants, 8, 3, False))
    return cases
