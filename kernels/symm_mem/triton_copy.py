"""Copies the first rows of a tensor, their number read on the device, to memory that peers read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES
from moe_engine.kernels.triton.aot import AotCase


@triton.jit(do_not_specialize_on_alignment=["end"])
def copy_rows_kernel(rows, out, end, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """out[row] = rows[row] of WIDTH elements, for rows below *end. Any grid."""
    for row in range(tl.program_id(0), tl.load(end), tl.num_programs(0)):
        line = tl.cast(row, tl.int64) * WIDTH
        for begin in range(0, WIDTH, COLS):
            places = begin + tl.arange(0, COLS)
            tl.store(out + line + places, tl.load(rows + line + places, mask=places < WIDTH), mask=places < WIDTH)


def copy_rows(rows: Tensor, out: Tensor, end: Tensor) -> None:
    """rows, out [M, D] contiguous, of one dtype; end int32 [1]. No host synchronization."""
    copy_rows_kernel[(TILES.copy_programs,)](
        rows, out, end, WIDTH=rows.shape[1], COLS=TILES.row_cols, num_warps=TILES.copy_warps
    )


def aot_cases() -> list[AotCase]:
    """Row widths of `tiles.SHAPES`."""
    signature = {"rows": "*bf16", "out": "*bf16", "end": "*i32:1"}
    return [
        AotCase(
            f"peer_copy_{width}", copy_rows_kernel, signature, {"WIDTH": width, "COLS": TILES.row_cols},
            TILES.copy_warps, 3, False,
        )
        for width in sorted({shape.hidden for shape in SHAPES})
    ]  # fmt: skip
