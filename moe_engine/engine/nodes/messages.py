"""What crosses between the front end and the other nodes, where replicas lie on several: who starts what, how it ended.

Nodes send to the one known address, and everything else is learnt from the answers: a front end has a port for what
each replica's cores send, and a replica over several nodes one where its ranks meet. Encoded with msgpack: nothing here
can run code.
"""

from __future__ import annotations

from typing import Any

import msgspec


class NodeMessage(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """Base of all messages."""


# -- to the front end


class NodeHello(NodeMessage, tag="hello"):
    """A node is up. `fingerprint` stands for the flags it was started with: they must be node 0's."""

    node_rank: int
    host: str
    pid: int
    fingerprint: str


class NodeBeat(NodeMessage, tag="beat"):
    """It runs. `boards`: of each replica that it leads, what its schedulers show (`StatusBoard.pack`), by group."""

    boards: dict[int, list[list[float]]] = {}


class Started(NodeMessage, tag="started"):
    """The core of a replica has this process."""

    replica: int
    name: str
    pid: int


class Listens(NodeMessage, tag="listens"):
    """The other nodes of a replica join its core at this address."""

    replica: int
    address: str


class Ready(NodeMessage, tag="ready"):
    """A replica serves. `info` as in `messages.CoreReady`."""

    replica: int
    info: dict[str, Any]


class StartFailed(NodeMessage, tag="failed"):
    """Fields as in `messages.CoreFailed`."""

    replica: int
    message: str
    error: str


class Ended(NodeMessage, tag="ended"):
    """The core of a replica is no more; `how` names it."""

    replica: int
    how: str


# -- from the front end


class Lead(NodeMessage, tag="lead"):
    """Start the core of a replica, which sends what it brings to `front_address`."""

    replica: int
    front_address: str


class Join(NodeMessage, tag="join"):
    """Start this node's ranks of a replica that another node leads, at `address`."""

    replica: int
    address: str


class AllReady(NodeMessage, tag="all ready"):
    """Silence now means a loss sooner than during the start."""


class Kill(NodeMessage, tag="kill"):
    """End the core of a replica at once."""

    replica: int
    reason: str


class End(NodeMessage, tag="end"):
    """Leave with this exit code: with 0 after what this node runs has ended by itself, else at once, for `reason`."""

    code: int
    reason: str = ""


class Heard(NodeMessage, tag="heard"):
    """The front end runs."""


ToFront = NodeHello | NodeBeat | Started | Listens | Ready | StartFailed | Ended
ToNode = Lead | Join | AllReady | Kill | End | Heard

encode = msgspec.msgpack.Encoder().encode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
