"""Max size of the dispatch buffers of a CPU rank. Imports no torch: memory is planned without it.

The maximum: every token goes to every rank, and comes from every rank. Two results alive at the same time are halves of
a step, so they count as one. Legend: R ranks, T max tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

ROOM_TOKENS = 64
"""Buffer bytes of a message in normal mode, see `host_all_to_all`: beyond this, bytes dominate the message cost."""


@dataclass(frozen=True)
class HostLoad:
    """Sizes of one mode.

    Attributes:
        num_nodes: hosts, with equal rank counts.
        tokens: T.
        room_tokens: tokens that fit into the first message.
        record_bytes: of a dispatched token with its choices; row_bytes: of a result.
    """

    num_ranks: int
    num_nodes: int
    tokens: int
    room_tokens: int
    record_bytes: int
    row_bytes: int

    @property
    def everything(self) -> int:
        """R * T."""
        return self.num_ranks * self.tokens


def all_to_all(load: HostLoad) -> int:
    """Send and receive buffers and local rows; overflow rows; received tokens; returned sums."""
    room = min(load.tokens, load.room_tokens)
    records = (2 * load.num_ranks - 1) * room + load.everything
    if load.tokens > room:
        records += load.everything
    return records * load.record_bytes + load.everything * load.row_bytes


def two_hop(load: HostLoad) -> int:
    """An all-to-all between hosts, and one inside a host for the received tokens."""
    inside = load.num_ranks // load.num_nodes
    static = load.room_tokens >= load.tokens  # a buffer then holds all possible tokens
    arriving = load.num_nodes * load.tokens
    room = arriving if static else load.room_tokens
    return all_to_all(replace(load, num_ranks=load.num_nodes)) + all_to_all(
        replace(load, num_ranks=inside, tokens=arriving, room_tokens=room)
    )


def shared_memory(load: HostLoad) -> int:
    """This rank's share of the shared memory (its tokens and sums), and the rows it reads."""
    return (load.tokens + load.everything) * load.record_bytes + load.everything * load.row_bytes


def allgather(load: HostLoad) -> int:
    """The tokens of this rank and of all ranks."""
    return (load.tokens + load.everything) * load.record_bytes


OF_BACKEND: dict[str, Callable[[HostLoad], int]] = {
    "all_to_all": all_to_all,
    "two_hop": two_hop,
    "shared_memory": shared_memory,
    "allgather": allgather,
}
"""Keyed by the names of `tables.ROWS`: backends for several CPU ranks."""
