"""Checks that work on different streams is ordered if it uses the same memory.

Every launch records the bytes that it uses of each block, operators by index their rows (`index_rows`). A launch on
another stream that overlaps such bytes must be ordered after it if either writes: by an event, by a waiting stream, or
by a wait of the host.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from torch import Tensor

from tests.simulated_cuda.memory import Block
from tests.simulated_cuda.streams import HazardError, Stream, host_knows

MOST = 64
"""Max recorded accesses of a block; the oldest are dropped."""

_left: dict[tuple[Stream, Any], list[Access]] = {}
"""Accesses in progress on other streams when their memory was released, by the memory's stream and the graph captured
from it."""


@dataclass(frozen=True, eq=False)
class Extent:
    """Bytes of a block.

    Attributes:
        begin, end: the first byte, and the end. parts: first bytes of parts of `length`, ascending; None: all bytes.
    """

    begin: int
    end: int
    parts: np.ndarray | None = None
    length: int = 0

    @classmethod
    def of_parts(cls, begins: np.ndarray, length: int) -> Self:
        if not (len(begins) and length):
            return cls(0, 0)
        parts = np.sort(begins)
        return cls(int(parts[0]), int(parts[-1]) + length, parts if len(parts) > 1 else None, length)

    def overlaps(self, other: Extent) -> bool:
        if self.begin >= other.end or other.begin >= self.end:
            return False
        if self.parts is None and other.parts is None:
            return True
        (own, length), (begins, size) = self._parts(), other._parts()
        before = np.searchsorted(begins, own + length) - 1  # the last part that begins before the end of one's own
        return bool((begins[before.clip(0)] + size > own)[before >= 0].any())

    def _parts(self) -> tuple[np.ndarray, int]:
        return (np.array([self.begin]), self.end - self.begin) if self.parts is None else (self.parts, self.length)

    def covers(self, other: Extent) -> bool:
        if self.parts is None:
            return self.begin <= other.begin and other.end <= self.end
        return other.parts is not None and self.length == other.length and np.array_equal(self.parts, other.parts)


EVERYTHING = Extent(0, sys.maxsize)


@dataclass(frozen=True)
class Access:
    """A launch's access to bytes of a block."""

    bytes: Extent
    stream: Stream
    tick: int
    writes: bool
    what: str


def extent(tensor: Tensor) -> Extent:
    """The bytes of a tensor in its block, from the first to the last."""
    if not tensor.numel():
        return Extent(0, 0)
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
    size = tensor.element_size()
    return Extent(tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size)


def touch(block: Block, part: Extent, writes: bool, stream: Stream, tick: int, what: str) -> None:
    """A launch reads or writes bytes of a block.

    Raises:
        HazardError: another stream may still use the memory.
    """
    block.accesses = behind(block.accesses, Access(part, stream, tick, writes, what))


def behind(accesses: list[Access], new: Access) -> list[Access]:
    """The relevant accesses after a further one. Those that the host has waited for are in order with all later ones.

    Raises:
        HazardError: it is not ordered after one of them.
    """
    if new.bytes.begin == new.bytes.end:
        return accesses
    kept = []
    for other in accesses:
        if host_knows(other.stream, other.tick):
            continue
        known = new.stream.knows(other.stream, other.tick)
        if not known and (new.writes or other.writes) and new.bytes.overlaps(other.bytes):
            raise HazardError(
                f"{new.what} on stream {new.stream.number} {'writes' if new.writes else 'reads'} what {other.what} on "
                f"stream {other.stream.number} {'writes' if other.writes else 'reads'}, and nothing puts them in order"
            )
        if not (known and (new.writes or not other.writes) and new.bytes.covers(other.bytes)):
            kept.append(other)
    return [*kept[-MOST:], new]


def freed(block: Block) -> None:
    """Handles the release of a block. Its stream may reuse it at once, ordered after its own work only: if another
    stream may still use the block without ``record_stream``, the stream's next allocation may overlap it."""
    home = block.stream
    if home is None:
        return
    recorded = home.capturing.accesses.get(block, []) if home.capturing is not None else []
    before = [*recorded, *([] if block.pooled else block.accesses)]
    left = [x for x in before if x.stream not in block.recorded and not home.knows(x.stream, x.tick)]
    if left:
        given_back = [replace(x, bytes=EVERYTHING, what=f"{x.what} (given back since)") for x in left]
        _left.setdefault((home, home.capturing), []).extend(given_back)


def taken(block: Block) -> None:
    """Handles the allocation of a block: accesses in progress to its memory are recorded for it."""
    home = block.stream
    if home is None or (home, home.capturing) not in _left:
        return
    left = [x for x in _left.pop((home, home.capturing)) if not home.knows(x.stream, x.tick)]
    if left:
        _left[home, home.capturing] = left
        if home.capturing is not None:
            home.capturing.accesses[block] = left
        else:
            block.accesses = left
