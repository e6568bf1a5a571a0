"""Membership: the leader's map from joined processes to ranks and nodes.

A process is identified by its socket identity, which contains its host and process id. The first process to join as a
rank or node keeps that role for the group's lifetime; messages of other processes in its name are refused.
"""

from __future__ import annotations

import os
import socket

from moe_engine.executor import messages
from moe_engine.executor.options import RankGroupOptions


def identity_of_process(name: str) -> str:
    """Socket identity of this process as `name` (``rank3``, ``node1``)."""
    return f"{name} {socket.gethostname()} {os.getpid()}"


class Peers:
    """Not thread-safe.

    Args:
        options: of the group.
        first_rank: lowest rank that another process may join as.
    """

    def __init__(self, options: RankGroupOptions, first_rank: int) -> None:
        self._places = {place.rank: place for place in options.places}
        self._ranks_to_come = range(first_rank, options.size)
        self._nodes_to_come = range(options.num_nodes)
        self._ranks: dict[bytes, int] = {}
        self._nodes: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}

    def join_rank(self, identity: bytes, rank: int) -> str | None:
        """Why the process may not join as this rank; None if it has joined."""
        if rank not in self._ranks_to_come:
            ranks = self._ranks_to_come
            return f"there is no rank {rank}, only {ranks.start} to {ranks.stop - 1}: use the same flags on all nodes"
        if self._identities.setdefault(rank, identity) != identity:
            return f"rank {rank} has joined already, as {_text(self._identities[rank])}"
        self._ranks[identity] = rank
        return None

    def join_node(self, identity: bytes, node: int) -> str | None:
        """Why the process may not join as this node's launcher; None if it has joined."""
        if node not in self._nodes_to_come:
            return f"there is no node {node}, only {self._nodes_to_come.start} to {self._nodes_to_come.stop - 1}"
        known = next((other for other, number in self._nodes.items() if number == node), identity)
        if known != identity:
            return f"node {node} has joined already, as {_text(known)}"
        self._nodes[identity] = node
        return None

    def refusal(self, identity: bytes, message: messages.ToLeader) -> str | None:
        """Why a process may not send this message; None if it may."""
        rank = getattr(message, "rank", -1)
        if isinstance(message, messages.Died):
            place = self._places.get(rank)
            allowed = place is not None and self._nodes.get(identity) == place.node_rank
        else:
            allowed = self._ranks.get(identity) == rank
        return None if allowed else f"{type(message).__name__} of rank {rank} from {_text(identity)}"

    def rank_of(self, identity: bytes) -> int | None:
        return self._ranks.get(identity)

    def identity_of(self, rank: int) -> bytes | None:
        """None for a rank that has not joined."""
        return self._identities.get(rank)

    @property
    def of_ranks(self) -> list[bytes]:
        return list(self._ranks)

    @property
    def all(self) -> list[bytes]:
        """Identities of ranks and nodes."""
        return [*self._ranks, *self._nodes]


def _text(identity: bytes) -> str:
    """An identity for a log message: ``rank3 host 4242``, or libzmq's own number in hexadecimal."""
    text = identity.decode("ascii", "replace")
    return text if text.isprintable() else identity.hex()
