"""Symmetric memory layout of the all-reduce kernels, and the sizes that choose between them. Imports no torch.

Each program of a launch has an arena of its own in every rank's memory, in two halves that its epochs alternate. A rank
writes half e only after every rank's flag of epoch e - 1, which a rank raises after its reads of epoch e - 2: no second
barrier is needed. A program's rows follow from its number, so launches of any size use the arenas in any order.
Legend: R ranks, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256
PROGRAMS = 112
"""Max programs of a launch: all of them wait for other ranks, so all must run simultaneously. A program may take a
whole SM; data-center GPUs from Hopper on have 114 or more."""
MAX_BYTES = 8 << 20
"""Max message; NCCL sends larger ones. Unmeasured: the limit of SGLang's and vLLM's all-reduce."""
MAX_RANKS = 16
MAX_WIDTH = 16384
"""Max D: a program holds a row in registers."""
_ONE_SHOT_SENT = 2 << 20


@dataclass(frozen=True)
class Arenas:
    """Sizes for rows [D] of `item_bytes` per element, of `num_ranks` ranks."""

    num_ranks: int
    width: int
    item_bytes: int

    @property
    def lanes(self) -> int:
        """Flags of a program and kind: one per rank, to the next power of two, at least 16 bytes."""
        return max(2, 1 << (self.num_ranks - 1).bit_length())

    @property
    def gathered_at(self) -> int:
        """Offset in a half: R received rows, then R summed rows of a two-shot launch."""
        return self.num_ranks * self.width * self.item_bytes

    @property
    def half_bytes(self) -> int:
        return -(-2 * self.gathered_at // ALIGNMENT) * ALIGNMENT

    @property
    def gathered_flags_at(self) -> int:
        """Offset of the second kind of flags: the sums have arrived. The first kind, at 0: the rows have."""
        return PROGRAMS * self.lanes * 8

    @property
    def arenas_at(self) -> int:
        return -(-2 * self.gathered_flags_at // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.arenas_at + PROGRAMS * 2 * self.half_bytes

    def is_one_shot(self, num_rows: int) -> bool:
        """Whether every rank sends its rows to all: one exchange. Two-shot sends 2 / R of the bytes in two exchanges.
        Unmeasured: 256 KiB of 8 ranks, as in SGLang."""
        sent = num_rows * self.width * self.item_bytes * self.num_ranks
        return self.num_ranks == 2 or sent <= _ONE_SHOT_SENT


@dataclass(frozen=True)
class CompiledShape:
    """A model on `num_ranks` ranks, for ahead-of-time compilation. top_k: experts of a token, shared ones included."""

    name: str
    num_ranks: int
    width: int
    top_k: int


SHAPES = (CompiledShape("v3_tp8", 8, 7168, 9), CompiledShape("v2_lite_tp2", 2, 2048, 8))


def why_not(num_ranks: int, width: int, item_bytes: int) -> str | None:
    """The reason why the kernels do not support these sizes, or None."""
    if num_ranks > MAX_RANKS:
        return f"the kernels sum over at most {MAX_RANKS} ranks; there are {num_ranks}"
    if width * item_bytes % 16:
        return f"hidden {width}: rows must be a multiple of 16 bytes"
    return f"hidden {width} is above {MAX_WIDTH}" if width > MAX_WIDTH else None
