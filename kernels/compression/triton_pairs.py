"""Entries of two tokens in Triton (DeepSeek V4.1), in one launch: a program a token.

Legend: as in `protocol`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.compression.protocol import CompressedTokens, Kept, PairedEntries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, row_stride

_WARPS = 4


@dependent_jit(do_not_specialize_on_alignment=[*UNALIGNED, "rows", "places"])
def pair_kernel(
    projected, kept, norm, positions, starts, rows, slots, places, out, entry_slots, first, stride, kept_stride, eps,
    WIDTH: tl.constexpr, EACH: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `SumPairs`; with KEEP, kept[places[t]] = projected[t]. Grid (T,)."""
    wait_for_inputs()
    token, channel = tl.program_id(0), tl.arange(0, BLOCK)
    live = channel < WIDTH
    kind: tl.constexpr = projected.dtype.element_ty
    position = tl.load(positions + token)
    own = projected + token.to(tl.int64) * stride + channel
    value, gate = tl.load(own, live, 0.0), tl.load(own + WIDTH, live, 0.0)
    if KEEP:
        ring = kept + tl.load(places + token) * kept_stride + channel
        tl.store(ring, value.to(kept.dtype.element_ty), live)
        tl.store(ring + WIDTH, gate.to(kept.dtype.element_ty), live)
    completes = position % 2 == 1
    slot = tl.load(slots + token).to(tl.int64)
    tl.store(entry_slots + token, tl.where(completes, slot // 2, 0))
    tl.store(first + token, tl.where(completes, position - 1, 0))
    normed = tl.zeros([BLOCK], tl.float32)
    if completes:
        in_step = position > tl.load(starts + token)
        line = (tl.load(rows + token).to(tl.int64) + 1) * EACH + (position - 1) % EACH
        new, old = projected + (token - 1).to(tl.int64) * stride + channel, kept + line * kept_stride + channel
        young, stored = live & in_step, live & (position <= tl.load(starts + token))
        before = tl.load(new, young, 0.0).to(tl.float32) + tl.load(old, stored, 0.0).to(tl.float32)
        base = tl.load(new + WIDTH, young, 0.0).to(tl.float32) + tl.load(old + WIDTH, stored, 0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(base - gate.to(tl.float32)))
        mixed = before + share * (value.to(tl.float32) - before)
        mixed = mixed.to(kind).to(tl.float32)
        scale = tl.rsqrt(tl.sum(mixed * mixed) / WIDTH + eps)
        normed = (mixed * scale).to(kind).to(tl.float32) * tl.load(norm + channel, live, 0.0)
    tl.store(out + token.to(tl.int64) * WIDTH + channel, normed.to(kind), live)


def sum_pairs(
    projected: Tensor, kept: Kept, norm: tuple[Tensor, float], tokens: CompressedTokens, places: Tensor | None = None
) -> PairedEntries:
    """`SumPairs`.

    Raises:
        ValueError: rows are not contiguous, or kept by blocks of slots.
    """
    weight, eps = norm
    if kept.block or {projected.stride(1), kept.rows.stride(1)} != {1}:
        raise ValueError("sums of pairs need contiguous rows, kept by request")
    found = PairedEntries(
        projected.new_empty(len(projected), len(weight)), torch.empty_like(tokens.positions),
        torch.empty_like(tokens.positions),
    )  # fmt: skip
    if len(projected):
        block = next_power_of_2(len(weight))
        pair_kernel[(len(projected),)](
            projected, kept.rows, weight, tokens.positions, tokens.starts, tokens.rows, tokens.slots, places, *found,
            row_stride(projected), row_stride(kept.rows), eps, WIDTH=len(weight), EACH=kept.each,
            KEEP=places is not None, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip
    return found


def aot_cases() -> list[AotCase]:
    """DeepSeek V4.1."""
    cases = []
    for dtype, keep in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)):
        kind = f"*{element(dtype)}"
        signature = {
            "projected": kind, "kept": kind, "norm": "*fp32", "positions": "*i64:1", "starts": "*i64:1",
            "rows": "*i32:1", "slots": "*i64:1", "out": kind, "entry_slots": "*i64", "first": "*i64",
            "stride": "i32:16", "kept_stride": "i32:16", "eps": "fp32",
        }  # fmt: skip
        constants: dict[str, object] = {"WIDTH": 512, "EACH": 2, "KEEP": keep, "BLOCK": 512}
        if keep:
            signature["places"] = "*i64:1"
        else:
            constants["places"] = None
        name = f"pairs_{element(dtype)}{'_kept' * keep}"
        cases.append(AotCase(name, pair_kernel, signature, constants, _WARPS, 3, False))
    return cases
