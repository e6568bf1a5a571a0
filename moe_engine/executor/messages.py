"""Control messages between the ranks of a group: rendezvous, heartbeats, failures.

Followers, and the launchers of other nodes, connect to the leader's one known address; `Welcome` returns the other
addresses (plan channel, torch.distributed's store). Encoded with msgpack, which cannot execute code.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moe_engine.executor.progress import Position


class RankMessage(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """Base of all messages."""


# -- to the leader


class Hello(RankMessage, tag="hello"):
    """A rank has started. `fingerprint` has the values of the flags it was started with, `checkpoint`
    identifies its files. Both must equal the leader's.

    `plan_address`: the address at which a rank that schedules publishes its group's plans.
    """

    rank: int
    host: str
    pid: int
    fingerprint: Mapping[str, str] = {}
    plan_address: str = ""
    checkpoint: str = ""


class Beat(RankMessage, tag="beat"):
    """Heartbeat of a rank, with its position. Answered by `Alive`.

    `status`: shared status of a rank that schedules on another node (`SharedStatus.pack`).
    """

    rank: int
    position: Position
    status: list[float] = []


class Loaded(RankMessage, tag="loaded"):
    """A rank has loaded its weights and accepts plans. `kernels`: chosen backend by family; must be equal on all ranks.

    From a rank that schedules: `core_address` for the frontend, `step_address` for the other schedulers.
    """

    rank: int
    kernels: dict[str, str] = {}
    core_address: str = ""
    step_address: str = ""


class Failed(RankMessage, tag="failed"):
    """A rank cannot continue; fields as in `executor.leader_worker.Failure`."""

    rank: int
    message: str
    peer_lost: bool = False
    config_error: bool = False


class Died(RankMessage, tag="died"):
    """From the launcher of another node: `how` names a rank's process there and how it ended or was stopped."""

    rank: int
    how: str


class Ended(RankMessage, tag="ended"):
    """A rank that schedules has shut down after all groups agreed to: its exit is no failure."""

    rank: int


class NodeHere(RankMessage, tag="node"):
    """From the launcher of another node: it has started. Answered by `Alive`."""

    node_rank: int
    host: str
    pid: int


class NodeRefused(RankMessage, tag="refused"):
    """From the launcher of another node, during startup: it cannot join because of a flag or its environment."""

    host: str
    pid: int
    message: str


# -- from the leader


class Welcome(RankMessage, tag="welcome"):
    """Addresses for joining the group. `leader` names rank 0's process, for a follower's error messages.

    `plan_address`: plan channel of the rank's own group; `front_address`: where the frontend listens for cores of
    other nodes.
    """

    plan_address: str
    store_host: str
    store_port: int
    leader: str
    front_address: str = ""


class Go(RankMessage, tag="go"):
    """Every rank is ready. `step_addresses`: of all schedulers, by group."""

    step_addresses: list[str] = []


class Alive(RankMessage, tag="alive"):
    """The leader's process is alive."""


class Leave(RankMessage, tag="leave"):
    """The group exits immediately; `reason` names the lost rank."""

    reason: str


ToLeader = Hello | Beat | Loaded | Failed | Died | Ended | NodeHere | NodeRefused
ToRank = Welcome | Go | Alive | Leave

encode = msgspec.msgpack.Encoder().encode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
