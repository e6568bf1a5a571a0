"""Whether work on different streams is ordered where it touches the same memory.

Every launch leaves its byte ranges with the blocks it touched. A launch on another stream that overlaps one of them,
and of which one writes, must come behind it: by an event, by a stream that waits, or by the host that waited.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tests.simulated_cuda.memory import MEMORY, Block
from tests.simulated_cuda.streams import HazardError, Stream

MOST = 64
"""Accesses kept of a block; the oldest are forgotten."""

_left: dict[tuple[Stream, Any], list[Access]] = {}
"""Under way on other streams when their memory was given back: by its stream, and the graph recorded from that."""


@dataclass(frozen=True)
class Access:
    """What a launch did with bytes of a block."""

    begin: int
    end: int
    stream: Stream
    tick: int
    writes: bool
    what: str


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its block."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
    size = tensor.element_size()
    return tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size


def touch(tensor: Tensor, writes: bool, stream: Stream, tick: int, what: str) -> None:
    """A launch reads or writes a device tensor.

    Raises:
        HazardError: something on another stream may still be at it.
    """
    touch_bytes(MEMORY.block(tensor), *extent(tensor), writes, stream, tick, what)


def touch_bytes(block: Block, begin: int, end: int, writes: bool, stream: Stream, tick: int, what: str) -> None:
    """`touch`, of bytes of a block."""
    block.accesses = behind(block.accesses, Access(begin, end, stream, tick, writes, what))


def behind(accesses: list[Access], new: Access) -> list[Access]:
    """The accesses that matter after one more.

    Raises:
        HazardError: it is not behind one of them.
    """
    if new.begin == new.end:
        return accesses
    kept = []
    for other in accesses:
        overlaps = other.begin < new.end and new.begin < other.end
        known = new.stream.knows(other.stream, other.tick)
        if overlaps and not known and (new.writes or other.writes):
            raise HazardError(
                f"{new.what} on stream {new.stream.number} {'writes' if new.writes else 'reads'} what {other.what} on "
                f"stream {other.stream.number} {'writes' if other.writes else 'reads'}, and nothing puts them in order"
            )
        inside = new.begin <= other.begin and other.end <= new.end
        if not (inside and known and (new.writes or not other.writes)):
            kept.append(other)
    return [*kept[-MOST:], new]


def freed(block: Block) -> None:
    """A block is given back. Its stream may have it again at once, behind its own work only: where another stream may
    still be at it without ``record_stream``, the next allocation of the stream may lie there."""
    home = block.stream
    if home is None:
        return
    recorded = home.capturing.accesses.get(block, []) if home.capturing is not None else []
    before = [*recorded, *([] if block.pooled else block.accesses)]
    left = [x for x in before if x.stream not in block.recorded and not home.knows(x.stream, x.tick)]
    if left:
        given_back = [replace(x, begin=0, end=sys.maxsize, what=f"{x.what} (given back since)") for x in left]
        _left.setdefault((home, home.capturing), []).extend(given_back)


def taken(block: Block) -> None:
    """A block is given out: what may still be at its memory is at it."""
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
