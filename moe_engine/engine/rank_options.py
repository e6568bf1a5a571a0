"""What a group of ranks is made from: how many, where, what each runs, and how long is too long."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_engine.errors import ConfigError


@dataclass(frozen=True)
class RankPlace:
    """One rank of the group. `name` opens its log lines and names it in errors: ``DP0 TP3``, or ``TP3``."""

    rank: int
    size: int
    name: str
    node_rank: int = 0
    local_rank: int = 0


@dataclass(frozen=True)
class WatchLimits:
    """Seconds. `silent`: without a sign of life a rank counts as lost. A rank that others wait for counts as late after
    `late` or `late_factor` recent steps, whichever is longer; that is logged. `start`: for all ranks to be ready.
    """

    silent: float = 3.0
    late: float = 1.0
    late_factor: float = 3.0
    start: float = 1200.0
    progress: float = 5.0
    """Between two lines that say who is waited for during the start."""


@dataclass(frozen=True)
class RankGroupOptions:
    """One engine core's ranks.

    Args:
        make_worker: ``make_worker(config, place, progress)`` returns a rank's `worker.Worker`; called in its process
            when torch.distributed is up; picklable by name. Groups it makes should tell `progress.observe`.
        leader_address: ``host:port`` of rank 0's node, the one address that must be known; None on a single node.
        collective_timeout: seconds after which a collective gives up that a rank never entered; a rank that died or
            fell silent is found long before by the watch.
        fingerprint: equal on all nodes that were started with the same flags.
    """

    size: int
    make_worker: Callable[..., Any]
    num_nodes: int = 1
    node_rank: int = 0
    leader_address: str | None = None
    name_prefix: str = ""
    backend: str = "gloo"
    limits: WatchLimits = field(default_factory=WatchLimits)
    collective_timeout: float = 300.0
    fingerprint: str = ""
    generation: int = 0

    def __post_init__(self) -> None:
        if self.size % self.num_nodes:
            raise ConfigError(f"{self.size} ranks do not fill --nnodes {self.num_nodes} evenly")
        if self.num_nodes > 1 and self.leader_address is None:
            raise ConfigError(f"--nnodes {self.num_nodes} needs --dist-init-addr HOST:PORT of node 0")

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.num_nodes

    @property
    def places(self) -> list[RankPlace]:
        per_node, prefix = self.ranks_per_node, f"{self.name_prefix} " if self.name_prefix else ""
        return [
            RankPlace(rank, self.size, f"{prefix}TP{rank}", rank // per_node, rank % per_node)
            for rank in range(self.size)
        ]

    @property
    def local_places(self) -> list[RankPlace]:
        return [place for place in self.places if place.node_rank == self.node_rank]

    @property
    def leader_host(self) -> str:
        return self.leader_address.rpartition(":")[0].strip("[]") if self.leader_address else "127.0.0.1"

    def leader_tcp(self, port: str | None = None) -> str:
        """``tcp://IP:PORT`` of the leader's control channel, or another `port` of its node.

        Raises:
            ConfigError: the host cannot be resolved.
        """
        assert self.leader_address is not None
        try:
            ip = socket.gethostbyname(self.leader_host)
        except OSError as error:
            raise ConfigError(f"--dist-init-addr {self.leader_address}: unknown host: {error}") from None
        return f"tcp://{ip}:{port or self.leader_address.rpartition(':')[2]}"
