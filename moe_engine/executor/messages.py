"""What crosses between the ranks of a group besides plans: who is there, how far each is, what went wrong.

Followers, and the launchers of other nodes, send to the leader's one known address; what else there is to know (the
plan channel, the store of torch.distributed) comes back in `Welcome`. Encoded with msgpack: nothing here can run code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moe_engine.core.executor import Survivors
from moe_engine.executor.progress import Position


class RankMessage(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """Base of all messages."""


# -- to the leader


class Hello(RankMessage, tag="hello"):
    """A rank is up. `fingerprint` stands for the flags it was started with: they must be the leader's.

    `plan_address`: where a rank that schedules sends its group's plans from.
    """

    rank: int
    host: str
    pid: int
    fingerprint: str = ""
    plan_address: str = ""


class Beat(RankMessage, tag="beat"):
    """A rank's process runs, and where it is. Answered by `Alive`.

    `board`: what a rank that schedules on another node would write on its status board (`SharedStatus.pack`).
    """

    rank: int
    position: Position
    board: list[float] = []


class Loaded(RankMessage, tag="loaded"):
    """A rank has its weights and takes plans. `kernels`: chosen row by family; ranks must choose alike.

    Of a rank that schedules: `core_address` for the front end, `step_address` for the other schedulers, `facts` as in
    `messages.CoreReady`.
    """

    rank: int
    kernels: dict[str, str] = {}
    core_address: str = ""
    step_address: str = ""
    facts: dict[str, Any] = {}


class Failed(RankMessage, tag="failed"):
    """A rank cannot go on; fields as in `executor.leader_worker.Failure`."""

    rank: int
    message: str
    peer_lost: bool = False
    config_error: bool = False
    generation: int = 0
    """Of the groups that it failed in."""


class Died(RankMessage, tag="died"):
    """From the launcher of another node: `how` names a rank's process there and how it ended, or what holds it."""

    rank: int
    how: str


class Answer(RankMessage, tag="answer"):
    """What a rank answered to `Run` of the same id; `error` where it could not."""

    rank: int
    id: int
    value: Any = None
    error: str = ""


class Ask(RankMessage, tag="ask"):
    """A rank wants every other to run `method` of `worker.calls`. Answered by `Answers` of the same id."""

    rank: int
    id: int
    method: str


class Ended(RankMessage, tag="ended"):
    """A rank that schedules has served to the end, as all have agreed: its going is no loss."""

    rank: int


class NodeHere(RankMessage, tag="node"):
    """From the launcher of another node: it runs. Answered by `Alive`."""

    node_rank: int
    host: str
    pid: int


class NodeRefused(RankMessage, tag="refused"):
    """From the launcher of another node, during the start: it cannot take part, for a flag or its environment."""

    host: str
    pid: int
    message: str


# -- from the leader


class Welcome(RankMessage, tag="welcome"):
    """How to join the others. `leader` names rank 0's process for messages of a follower.

    `plan_address` is that of the rank's own group; at `front_address` the front end listens for cores of other nodes.
    """

    plan_address: str
    store_host: str
    store_port: int
    leader: str
    front_address: str = ""


class Go(RankMessage, tag="go"):
    """Every rank is ready. `step_addresses` of all schedulers, by group."""

    step_addresses: list[str] = []


class Run(RankMessage, tag="run"):
    """Call `method` of `worker.calls`, between two steps."""

    id: int
    method: str


class Answers(RankMessage, tag="answers"):
    """What the others answered to `Ask`, in the order of their ranks; `error` where one could not."""

    id: int
    values: list[Any] = []
    error: str = ""


class Regroup(RankMessage, tag="regroup"):
    """Ranks were lost; those that are left go on."""

    survivors: Survivors


class Alive(RankMessage, tag="alive"):
    """The leader's process runs."""


class Leave(RankMessage, tag="leave"):
    """The group ends at once; `reason` names the rank that is lost."""

    reason: str


ToLeader = Hello | Beat | Loaded | Failed | Died | Answer | Ask | Ended | NodeHere | NodeRefused
ToRank = Welcome | Go | Run | Answers | Regroup | Alive | Leave

encode = msgspec.msgpack.Encoder().encode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
