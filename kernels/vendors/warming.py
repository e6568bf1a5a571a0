"""Warm-up of libraries that compile kernels at first use.

DeepGEMM compiles a product for its weight's sizes and for a tile selected by the number of rows. So every weight shape
is run with row counts dense enough to select each possible tile.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepShapes:
    """Max sizes of a launch plan's steps on one rank; 0: does not occur.

    tokens: rows of a dense product. expert_rows: rows of all local experts together (`grouped` batches).
    expert_capacity: rows of one expert's part of a `padded` batch. dispatched: tokens are dispatched between ranks.
    dtype: of the activations, by torch's name.
    """

    tokens: int
    expert_rows: int = 0
    expert_capacity: int = 0
    dispatched: bool = False
    dtype: str = "bfloat16"


def row_counts(most: int) -> list[int]:
    """Up to `most`: each multiple of 16 to 512, of 64 to 4096, of 256 beyond, and 1 and `most` themselves."""
    steps = (range(16, 513, 16), range(576, 4097, 64), range(4352, most + 1, 256))
    return sorted({count for step in steps for count in step if count < most} | {1, most}) if most > 0 else []
