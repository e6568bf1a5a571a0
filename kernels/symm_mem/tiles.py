"""Tile sizes of the kernels that write to peers, and the shapes that they are compiled for ahead of time.

Imports no torch. Rows of several KB cross NVLink in stores of 16 bytes a thread; a program that writes one row keeps
few registers, and many programs keep the links busy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerTiles:
    """`origin` says where the numbers come from.

    Attributes:
        announce_step: pairs that are compared with each other at a time.
        row_cols: numbers of a row at a time; row_blocks: blocks of 128 of an FP8 row.
        receive_parts: programs that share an expert's FP8 rows; return_parts: that send an expert's results back.
        copy_programs: that share the rows of one copy.
        sum_cols: numbers of a token that a program sums.
    """

    origin: str
    announce_step: int
    announce_warps: int
    row_cols: int
    row_blocks: int
    row_warps: int
    receive_parts: int
    return_parts: int
    copy_programs: int
    sum_cols: int
    sum_warps: int


TILES = PeerTiles(
    "unmeasured default: 8 numbers of bf16 a thread, programs for several waves of 132 SMs at 128 tokens of 8 choices",
    announce_step=64,
    announce_warps=8,
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
    """A model on so many ranks."""

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
