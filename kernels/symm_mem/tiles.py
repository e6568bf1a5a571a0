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
        place_step: choices compared with each other at once; place_counts: counts of other programs read at once.
        row_warps: warps of a program, which holds a row in registers. return_programs: programs of combine's sends.
        row_cols, copy_programs, copy_warps: elements per iteration and programs of one row copy.
    """

    origin: str
    place_step: int
    place_counts: int
    row_warps: int
    return_programs: int
    row_cols: int
    copy_programs: int
    copy_warps: int


TILES = PeerTiles(
    "unmeasured default: 32 elements per thread, two programs per SM of 132 where none waits",
    place_step=64,
    place_counts=2048,
    row_warps=8,
    return_programs=264,
    row_cols=1024,
    copy_programs=264,
    copy_warps=4,
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
