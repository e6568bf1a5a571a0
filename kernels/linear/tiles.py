"""Tile sizes of products with quantized weights, by number of rows: readable tables that measurements can replace.

Legend: M rows, N out-features, K in-features. A tile is BLOCK_M x BLOCK_N results; K advances in steps of 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.kernels.quantization.protocol import num_blocks

NUM_SMS = 132  # of an H100 or H200: split target of decode-sized products
MIN_STEPS = 4  # min K steps of 128 per part of a split product
MAX_SPLIT = 16


@dataclass(frozen=True)
class Tiles:
    """Tiling of one product.

    Attributes:
        swap_ab: multiply weight by rows: the weight's 64 or more rows fill the tensor core's M, few rows its N.
        group: row tiles that share a weight tile in the L2 cache.
        split: parts of K, summed afterwards in a fixed order.
        tma: weights are loaded by TMA, which computes addresses itself: large tiles have no registers to
            spare for them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    group: int = 1
    split: int = 1
    tma: bool = False


@dataclass(frozen=True)
class TileTable:
    """Entries (max M, tiles), the last for any M. `provenance`: GPU, date and command of a measurement."""

    provenance: str
    rows: tuple[tuple[int | None, Tiles], ...]

    def at(self, num_rows: int) -> Tiles:
        return next(tiles for limit, tiles in self.rows if limit is None or num_rows <= limit)


BLOCK_FP8 = TileTable(
    "unmeasured default: chosen by shared memory, registers and waves of 132 SMs",
    (
        (16, Tiles(16, 128, 4, 5, swap_ab=True)),
        (32, Tiles(32, 128, 4, 5, swap_ab=True)),
        (64, Tiles(64, 64, 4, 5)),
        (256, Tiles(64, 128, 4, 4)),
        (None, Tiles(128, 128, 8, 4, group=8, tma=True)),
    ),
)


FOUR_BITS = TileTable(
    "unmeasured default: chosen by shared memory, registers and waves of 132 SMs",
    (
        (16, Tiles(16, 64, 4, 5, swap_ab=True)),
        (32, Tiles(32, 64, 4, 5, swap_ab=True)),
        (96, Tiles(64, 128, 8, 4, swap_ab=True)),
        (None, Tiles(128, 128, 8, 3, swap_ab=True, group=8)),
    ),
)
"""Weights are the tensor cores' first operand, which they read from the registers where codes are decoded: each group
of four warps decodes 64 rows of them."""
FOUR_BITS_WIDE = TileTable("float32, without tensor cores: correct, not fast", ((None, Tiles(32, 64, 4, 2)),))


def split_tiles(table: TileTable, num_rows: int, n: int, k: int) -> Tiles:
    """The tiles of a product [M, K] x [N, K]. K is split if the tiles alone would leave SMs idle.

    Depends on M only through the table's limits, so that few kernels cover every batch.
    """
    limit = next((limit for limit, _ in table.rows if limit is None or num_rows <= limit), None)
    tiles = table.at(num_rows)
    if limit is None:
        return tiles
    programs = -(-limit // tiles.block_m) * -(-n // tiles.block_n)
    split = 1
    while split < MAX_SPLIT and programs * split < NUM_SMS and num_blocks(k) // (2 * split) >= MIN_STEPS:
        split *= 2
    return replace(tiles, split=split)


def block_fp8_tiles(num_rows: int, n: int, k: int) -> Tiles:
    """`split_tiles` of block FP8."""
    return split_tiles(BLOCK_FP8, num_rows, n, k)


FIXED_BLOCK_FP8 = Tiles(64, 64, 4, 4, group=8)
"""Tiles of every product in deterministic mode (--enable-deterministic-inference), independent of the number of rows: K
is not split, and the smallest tile that fills tensor cores leaves few SMs idle in decodes."""
FIXED_FOUR_BITS = Tiles(64, 128, 8, 4, swap_ab=True, group=8)


FEW_BLOCK_FP8 = Tiles(16, 16, 4, 8)
"""Up to `FEW_ROWS` rows: a program for each 16 rows of a weight, so that K needs no split and no sum of parts."""
MOST_QUANTIZED = 2048
"""Columns of few rows up to which a product with `FEW_BLOCK_FP8` quantizes them itself. Each program quantizes all
rows, 128 columns before each of its products: about 0.15 us for these, where a launch costs about 2.5 us (both
estimated)."""

MOST_NORMED = 8
"""Rows up to which such a product also computes their norm. Each of its programs reads all rows before they are
quantized: twice the bytes of quantized ones, so half as many rows."""
WIDE_BLOCK_FP8 = Tiles(16, 32, 4, 8)
"""The same for a weight of `MANY_ROWS` rows, whose programs outnumber the SMs: half as many norm and quantize rows."""
MANY_ROWS = 8192


def normed_tiles(n: int) -> Tiles:
    """The tiles of a product [M, K] x [N, K] that computes the norm of its rows."""
    return WIDE_BLOCK_FP8 if n >= MANY_ROWS else FEW_BLOCK_FP8


@dataclass(frozen=True)
class PlainTiles:
    """Tiling of a product with unquantized weights, for any number of rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8


FIXED_PLAIN = PlainTiles(64, 64, 64, 4, 4)
FIXED_WIDE = PlainTiles(32, 32, 32, 4, 3)
"""float32, without tensor cores."""
FEW_ROWS = 16
MAX_FEW_BYTES = 1 << 25
"""Size of the largest weight for which a gap is worth more than a library's tiles: about 8 us of an H200's memory."""
FEW_PLAIN = PlainTiles(16, 16, 256, 4, 4)
"""Up to `FEW_ROWS` rows: a program for each 16 rows of a weight; up to four programs share an SM, and their loads in
flight hide the latency of memory."""
