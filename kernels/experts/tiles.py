"""Tile sizes of the grouped products, by rows of an expert: a table a person can read, and a measurement can replace.

An expert has as many rows as tokens chose it. The host does not know the number: tables are entered with a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.kernels.linear.tiles import Tiles, TileTable


@dataclass(frozen=True)
class ExpertTiles:
    """Of both products of an expert: gate and up (which hold two results a tile), and down. `block_k`: a step of K."""

    gate_up: TileTable
    down: TileTable
    block_k: int


_DEFAULT = "unmeasured default: chosen by shared memory, registers and waves of 132 SMs"

BLOCK_FP8 = ExpertTiles(
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 128, 4, 4, swap=True)),
            (32, Tiles(32, 128, 8, 4, swap=True)),
            (None, Tiles(64, 128, 8, 4, group=8, bulk=True)),
        ),
    ),
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 128, 4, 5, swap=True)),
            (32, Tiles(32, 128, 4, 5, swap=True)),
            (96, Tiles(64, 128, 4, 4)),
            (None, Tiles(128, 128, 8, 4, group=8, bulk=True)),
        ),
    ),
    block_k=128,
)
"""A step is a block of scales, and a tile of the first product a block of what it quantises: 128 both."""

PLAIN = ExpertTiles(
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 64, 4, 4, swap=True)),
            (32, Tiles(32, 64, 4, 4, swap=True)),
            (96, Tiles(64, 64, 4, 4)),
            (None, Tiles(128, 128, 8, 3, group=8, bulk=True)),
        ),
    ),
    TileTable(
        _DEFAULT,
        (
            (16, Tiles(16, 64, 4, 5, swap=True)),
            (32, Tiles(32, 64, 4, 5, swap=True)),
            (96, Tiles(64, 128, 4, 4)),
            (None, Tiles(128, 128, 8, 4, group=8, bulk=True)),
        ),
    ),
    block_k=64,
)

WIDE = ExpertTiles(
    TileTable(_DEFAULT, ((None, Tiles(32, 64, 4, 3)),)), TileTable(_DEFAULT, ((None, Tiles(32, 64, 4, 3)),)), block_k=32
)
"""float32, which tensor cores do not multiply: correct, not fast."""

_FIXED = "the same for every number of rows, so that a row's bits do not depend on it"
FIXED_BLOCK_FP8 = ExpertTiles(
    TileTable(_FIXED, ((None, Tiles(64, 128, 8, 4, group=8)),)),
    TileTable(_FIXED, ((None, Tiles(64, 128, 4, 4, group=8)),)),
    block_k=128,
)
FIXED_PLAIN = ExpertTiles(
    TileTable(_FIXED, ((None, Tiles(64, 64, 4, 4, group=8)),)),
    TileTable(_FIXED, ((None, Tiles(64, 128, 4, 4, group=8)),)),
    block_k=64,
)
"""For --enable-deterministic-inference."""


def tiles_of(element: str, deterministic: bool = False) -> ExpertTiles:
    """By Triton's name of the weights' numbers."""
    fp8, plain = (FIXED_BLOCK_FP8, FIXED_PLAIN) if deterministic else (BLOCK_FP8, PLAIN)
    return {"fp8e4nv": fp8, "fp32": WIDE}.get(element, plain)


def row_classes(num_experts: int, most: int, tiles: ExpertTiles) -> list[int]:
    """Rows of all experts together, up to `most`, with which every tile is chosen that they can bring."""
    limits = {limit for table in (tiles.gate_up, tiles.down) for limit, _ in table.rows if limit is not None}
    return sorted({num_experts * limit for limit in limits if num_experts * limit < most} | {most}) if most else []
