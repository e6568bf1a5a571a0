"""Tile sizes of the symmetric memory kernels, and the shapes of their ahead-of-time compilation.

Imports no torch. Rows of several KB cross NVLink in 16-byte stores per thread; a program that writes one row uses
few registers, and many programs keep the links busy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerTiles:
    """`origin`: source of the values.

    Attributes:
        notify_step: pairs compared with each other at once.
        row_cols: row elements per iteration; row_blocks: blocks of 128 of an FP8 row.
        receive_parts: programs per expert for dequantizing FP8 rows; return_parts: the same for sending results.
        copy_programs: programs of one row copy.
        sum_cols: elements of a token per summing program.
    """

    origin: str
    notify_step: int
    notify_warps: int
    row_cols: int
    row_blocks: int
    row_warps: int
    receive_parts: int
    return_parts: int
    copy_programs: int
    sum_cols: int
    sum_warps: int


TILES = PeerTiles(
    "unmeasured default: 8 bf16 elements per thread, programs for several waves of 132 SMs at 128 tokens of 8 choices",
    notify_step=64,
    notify_warps=8,
    row_cols=1024,
    row_blocks=8,
    row_warps=4,
    receive_parts=8,
    return_parts=16,
    copy_programs=264,
    sum_cols=1024,
    sum_warps=4,
)


@dataclass(frozen=True)
class CompiledShape:
    """A model on `num_ranks` ranks."""

    name: str
    num_ranks: int
    num_local: int
    top_k: int
    hidden: int
    fp8: bool


SHAPES = (
    CompiledShape("v3_ep8", 8, 32, 8, 7168, False),
    CompiledShape("v3_ep8_fp8", 8, 32, 8, 7168, True),
    CompiledShape("v2_lite_ep2", 2, 32, 6, 2048, False),
)
