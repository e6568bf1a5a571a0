"""Checks that work on different streams is ordered if it uses the same memory.

Every launch records its byte ranges in the blocks it uses. A launch on another stream that overlaps such a range must
be ordered after it if either writes: by an event, by a waiting stream, or by a wait of the host.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tests.simulated_cuda.memory import MEMORY, Block
from tests.simulated_cuda.streams import HazardError, Stream

MOST = 64
"""Max recorded accesses of a block; the oldest are dropped."""

_left: dict[tuple[Stream, Any], list[Access]] = {}
"""Accesses in progress on other streams when their memory was released, by the memory's stream and the graph captured
from it."""


@dataclass(frozen=True)
class Access:
    """A launch's access to bytes of a block."""

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
        HazardError: another stream may still use the memory.
    """
    touch_bytes(MEMORY.block(tensor), *extent(tensor), writes, stream, tick, what)


def touch_bytes(block: Block, begin: int, end: int, writes: bool, stream: Stream, tick: int, what: str) -> None:
    """`touch` for bytes of a block."""
    block.accesses = behind(block.accesses, Access(begin, end, stream, tick, writes, what))


def behind(accesses: list[Access], new: Access) -> list[Access]:
    """The relevant accesses after a further one.

    Raises:
        HazardError: it is not ordered after one of them.
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
    """Handles the release of a block. Its stream may reuse it at once, ordered after its own work only: if another
    stream may still use the block without ``record_stream``, the stream's next allocation may overlap it."""
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
