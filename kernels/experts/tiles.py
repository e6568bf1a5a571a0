"""Tile sizes of the grouped products, by rows per expert: a readable table that measurements can replace.

An expert's rows are the tokens that chose it. The host does not know their number: tables are looked up by a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.linear import tiles as linear
from moe_engine.kernels.linear.tiles import Tiles, TileTable
from moe_engine.kernels.quantization.codes import GroupCodes


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of both products of an expert: gate and up (two results per tile), and down. `block_k`: K per step."""

    gate_up: TileTable
    down: TileTable
    block_k: int


_DEFAULT = "unmeasured default: chosen by shared memory, registers and waves of 132 SMs"

BLOCK_FP8 = ExpertTiles(
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 128, 4, 4, swap_ab=True)),
            (32, Tiles(32, 128, 8, 4, swap_ab=True)),
            (None, Tiles(64, 128, 8, 4, group=8, tma=True)),
        ),
    ),
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 128, 4, 5, swap_ab=True)),
            (32, Tiles(32, 128, 4, 5, swap_ab=True)),
            (96, Tiles(64, 128, 4, 4)),
            (None, Tiles(128, 128, 8, 4, group=8, tma=True)),
        ),
    ),
    block_k=128,
)
"""A step is one scale block, and a tile of the first product one block of its quantized output: both 128."""

PLAIN = ExpertTiles(
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 64, 4, 4, swap_ab=True)),
            (32, Tiles(32, 64, 4, 4, swap_ab=True)),
            (96, Tiles(64, 64, 4, 4)),
            (None, Tiles(128, 128, 8, 3, group=8, tma=True)),
        ),
    ),
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 64, 4, 5, swap_ab=True)),
            (32, Tiles(32, 64, 4, 5, swap_ab=True)),
            (96, Tiles(64, 128, 4, 4)),
            (None, Tiles(128, 128, 8, 4, group=8, tma=True)),
        ),
    ),
    block_k=64,
)

MXFP4 = "mxfp4"
"""Name of MXFP4 in `tiles_of`, for rows of 16 bits."""
FOUR_BITS = "4 bits"
"""Likewise of the other weights in 4 bits, whose products take a half of a step's columns at a time."""
FOUR_BITS_WIDE = "4 bits, float32"

_MXFP4_TILES = ExpertTiles(
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 64, 4, 4, swap_ab=True)),
            (32, Tiles(32, 64, 4, 4, swap_ab=True)),
            (96, Tiles(64, 64, 4, 4, swap_ab=True)),
            (None, Tiles(128, 128, 8, 3, swap_ab=True, group=8)),
        ),
    ),
    linear.FOUR_BITS,
    block_k=128,
)
_FOUR_BITS_TILES = ExpertTiles(
    TileTable(_DEFAULT, (*_MXFP4_TILES.gate_up.rows[:-1], (None, Tiles(64, 128, 8, 4, swap_ab=True, group=8)))),
    _MXFP4_TILES.down,
    block_k=128,
)
"""Both operands of gate and up with 128 rows would not fit into the registers; nor would SiTU."""

WIDE = ExpertTiles(
    TileTable(_DEFAULT, ((None, Tiles(32, 64, 4, 3)),)), TileTable(_DEFAULT, ((None, Tiles(32, 64, 4, 3)),)), block_k=32
)
"""float32, without tensor cores: correct, not fast."""

_WIDE_FOUR_BITS = ExpertTiles(linear.FOUR_BITS_WIDE, linear.FOUR_BITS_WIDE, block_k=128)
"""Likewise; a step is that of the scales."""

_FIXED = "the same for every number of rows, so that a row's bits do not depend on it"
FIXED_BLOCK_FP8 = ExpertTiles(
    TileTable(_FIXED, ((None, Tiles(64, 128, 8, 4, group=8)),)),
    TileTable(_FIXED, ((None, Tiles(64, 128, 4, 4, group=8)),)),
    block_k=128,
)
FIXED_FOUR_BITS = ExpertTiles(
    TileTable(_FIXED, ((None, Tiles(64, 64, 4, 4, swap_ab=True, group=8)),)),
    TileTable(_FIXED, ((None, linear.FIXED_FOUR_BITS),)),
    block_k=128,
)
FIXED_PLAIN = ExpertTiles(
    TileTable(_FIXED, ((None, Tiles(64, 64, 4, 4, group=8)),)),
    TileTable(_FIXED, ((None, Tiles(64, 128, 4, 4, group=8)),)),
    block_k=64,
)
"""For --enable-deterministic-inference."""


def tiles_of(element: str, deterministic: bool) -> ExpertTiles:
    """Tiles by Triton's name of the weights' dtype, or `MXFP4`, `FOUR_BITS` or `FOUR_BITS_WIDE`."""
    fp8, plain = (FIXED_BLOCK_FP8, FIXED_PLAIN) if deterministic else (BLOCK_FP8, PLAIN)
    mxfp4, few = (FIXED_FOUR_BITS, FIXED_FOUR_BITS) if deterministic else (_MXFP4_TILES, _FOUR_BITS_TILES)
    four_bits = {MXFP4: mxfp4, FOUR_BITS: few, FOUR_BITS_WIDE: _WIDE_FOUR_BITS}
    return {"fp8e4nv": fp8, "fp32": WIDE, **four_bits}.get(element, plain)


def four_bits_tiles(format: GroupCodes, activation: GatedActivation) -> str:
    """The name in `tiles_of` of weights in this format."""
    return MXFP4 if format.mxfp4 and not activation.beta else FOUR_BITS


def row_classes(num_experts: int, most: int, tiles: ExpertTiles) -> list[int]:
    """Total row counts, up to `most`, that together select every tile reachable within `most` rows."""
    limits = {limit for table in (tiles.gate_up, tiles.down) for limit, _ in table.rows if limit is not None}
    return sorted({num_experts * limit for limit in limits if num_experts * limit < most} | {most}) if most else []
