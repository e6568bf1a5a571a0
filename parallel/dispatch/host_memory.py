"""What the dispatch buffers of a rank on a CPU hold at most. Imports no torch: memory is planned without it.

At most means: every token goes to every rank, and comes from there. Two results that are alive at once are halves of a
step, so they are counted as one. Legend: R ranks, T most tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

ROOM_TOKENS = 64
"""Of a message in normal mode, see `host_all_to_all`: more than what a message costs are then its bytes."""


@dataclass(frozen=True)
class HostLoad:
    """What one mode asks for.

    Attributes:
        num_nodes: hosts that the ranks stand on, evenly.
        tokens: T.
        room_tokens: of them fit into the first message.
        record_bytes: of a token with its choices, as it travels; row_bytes: of a result.
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
    """Messages out and in and what stays; rows that do not fit them; what arrived; sums that came back."""
    room = min(load.tokens, load.room_tokens)
    records = (2 * load.num_ranks - 1) * room + load.everything
    if load.tokens > room:
        records += load.everything
    return records * load.record_bytes + load.everything * load.row_bytes


def two_hop(load: HostLoad) -> int:
    """An all-to-all between hosts, and one inside for all that it brings."""
    inside = load.num_ranks // load.num_nodes
    static = load.room_tokens >= load.tokens  # a room then has all that can come
    arriving = load.num_nodes * load.tokens
    room = arriving if static else load.room_tokens
    return all_to_all(replace(load, num_ranks=load.num_nodes)) + all_to_all(
        replace(load, num_ranks=inside, tokens=arriving, room_tokens=room)
    )


def shared_memory(load: HostLoad) -> int:
    """This rank's share of the common memory, its tokens and the sums it makes; and what it takes from all."""
    return (load.tokens + load.everything) * load.record_bytes + load.everything * load.row_bytes


def allgather(load: HostLoad) -> int:
    """The tokens of this rank and of all."""
    return (load.tokens + load.everything) * load.record_bytes


OF_BACKEND: dict[str, Callable[[HostLoad], int]] = {
    "all_to_all": all_to_all,
    "two_hop": two_hop,
    "shared_memory": shared_memory,
    "allgather": allgather,
}
"""By the names of `tables.ROWS`: those that serve CPUs and several ranks."""
