"""Whether work on different streams is ordered where it touches the same memory.

Every launch leaves its byte ranges with the blocks it touched. A launch on another stream that overlaps one of them,
and of which one writes, must come behind it: by an event, by a stream that waits, or by the host that waited.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tests.simulated_cuda.memory import MEMORY, Block
from tests.simulated_cuda.streams import HazardError, Stream

MOST = 64
"""Accesses kept of a block; the oldest are forgotten."""

hazards: list[str] = []
"""Found where nothing can be raised; the next launch says so."""


@dataclass(frozen=True)
class _Access:
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
    if begin == end:
        return
    kept = []
    for other in block.accesses:
        overlaps = other.begin < end and begin < other.end
        known = stream.knows(other.stream, other.tick)
        if overlaps and not known and (writes or other.writes):
            raise HazardError(
                f"{what} on stream {stream.number} {'writes' if writes else 'reads'} what {other.what} on stream "
                f"{other.stream.number} {'writes' if other.writes else 'reads'}, and nothing puts them in order"
            )
        inside = begin <= other.begin and other.end <= end
        if not (inside and known and (writes or not other.writes)):
            kept.append(other)
    block.accesses = [*kept[-MOST:], _Access(begin, end, stream, tick, writes, what)]


def freed(block: Block) -> None:
    """A block is given back. Its stream may take it again behind its own work only: a hazard where another stream may
    still be at it, and nobody called ``record_stream``."""
    home = block.stream
    for access in () if block.pooled or home is None else block.accesses:
        if access.stream not in block.recorded and not home.knows(access.stream, access.tick):
            hazards.append(
                f"memory of stream {home.number} is given back while {access.what} on stream {access.stream.number} "
                "may be at it: Tensor.record_stream, or wait for that stream first"
            )


def raise_hazards() -> None:
    """Raises HazardError with what was found since the last call."""
    if hazards:
        found = hazards[:]
        hazards.clear()
        raise HazardError("; ".join(found))
