"""`DecodeKernels` in Triton: one launch before a captured step, one after its sampling."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.speculation.decode_inputs import DecodeBuffers
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs

_BLOCK = 128


@dependent_jit(do_not_specialize=["count"])
def decode_inputs_kernel(
    packed, packed32, rows, last_tokens, table, ids, positions, slots, out_rows, lens, count, BLOCK: tl.constexpr
):  # fmt: skip
    """See `DecodeKernels.enter`. packed32: the same memory in int32."""
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row, slot = tl.load(rows + at, inside, 0), tl.load(packed + count + at, inside, 0)
    tl.store(table + tl.load(packed + 2 * count + at, inside, 0), slot.to(tl.int32), inside)
    tl.store(ids + at, tl.load(last_tokens + row, inside, 0), inside)
    tl.store(positions + at, tl.load(packed + at, inside, 0), inside)
    tl.store(slots + at, slot, inside)
    tl.store(out_rows + at, row.to(tl.int32), inside)
    tl.store(lens + at, tl.load(packed32 + 6 * count + at, inside, 0), inside)


@dependent_jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["tokens", "rows"])
def keep_tokens_kernel(tokens, rows, last_tokens, count, BLOCK: tl.constexpr):
    """See `DecodeKernels.keep`."""
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, inside, 0)
    tl.store(last_tokens + tl.load(rows + at, inside, 0), tl.maximum(token, 0), inside)


class TritonDecodes:
    """`DecodeKernels` on a GPU."""

    def enter(self, packed: Tensor, rows: Tensor, last_tokens: Tensor, table: Tensor, out: DecodeBuffers) -> None:
        count = len(rows)
        decode_inputs_kernel[(triton.cdiv(count, _BLOCK),)](
            packed, packed.view(torch.int32), rows, last_tokens, table, out.ids, out.positions, out.slots, out.rows,
            out.lens, count, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def keep(self, tokens: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
        count = len(rows)
        keep_tokens_kernel[(triton.cdiv(count, _BLOCK),)](tokens, rows, last_tokens, count, BLOCK=_BLOCK, num_warps=4)


def aot_cases() -> list[AotCase]:
    narrow = dict.fromkeys(("packed32", "table", "out_rows", "lens"), "*i32") | {"count": "i32"}

    def case(name: str, kernel: Any, **kinds: str) -> AotCase:
        names = [name for name in kernel.arg_names if name != "BLOCK"]
        signature = {name: (narrow | kinds).get(name, "*i64") for name in names}
        return AotCase(name, kernel, signature, {"BLOCK": _BLOCK}, 4, 3, False)

    kept = case("keep_tokens", keep_tokens_kernel, tokens="*i64:1", rows="*i64:1")
    return [case("decode_inputs", decode_inputs_kernel), kept]
