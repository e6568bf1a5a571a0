"""What a group of ranks is made from: how many, where, what each runs, and how long is too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.coverage import Coverage
from moe_engine.processes.addresses import LOOPBACK
from moe_engine.processes.rendezvous_address import RendezvousAddress
from moe_engine.processes.zmq_sockets import JobKeys


def plan_name(rank: int) -> str:
    return f"rank{rank}"


@dataclass(frozen=True)
class RankPlace:
    """One rank of the world. `name` opens its log lines and names it in errors: ``DP0 TP3``, or ``TP3``.

    `group` counts attention groups; `leads` tells that the rank's process schedules for its group.
    """

    rank: int
    size: int
    name: str
    node_rank: int = 0
    local_rank: int = 0
    group: int = 0
    leads: bool = False
    device: str = "cpu"
    """``cpu``, or ``cuda:3``."""


@dataclass(frozen=True)
class WatchLimits:
    """Seconds. `silent`: without a sign of life a rank counts as lost. A rank that others wait for counts as late after
    `late` or `late_factor` recent steps, whichever is longer; that is logged.

    `start`: for all ranks to be ready. Until then a rank is named when it has given no sign for `start_late`, and lost
    after `start_silent`; one that a signal holds, as its parent sees, is lost after `silent`.
    """

    silent: float = 3.0
    start_late: float = 5.0
    start_silent: float = 15.0
    late: float = 1.0
    late_factor: float = 3.0
    start: float = 1200.0
    progress: float = 5.0
    """Between two lines that say who is waited for during the start."""
    refused: float = 5.0
    """For a leader that refuses a node's connection to be replaced by the right one."""


@dataclass(frozen=True)
class RankGroupOptions:
    """The ranks of one model, which meet in its collectives.

    Args:
        num_groups: attention groups, each with requests and a scheduler of its own.
        first_group: the number of the first group among those of all replicas; None with a single group in all.
        make_worker: ``make_worker(config, place, progress)`` returns a rank's `worker.Worker`; called in its process
            when torch.distributed is up; picklable by name. Groups it makes should tell `progress.observe`.
        num_nodes: that the ranks are spread over evenly; `node_rank` is this one.
        leader_address: ``host:port`` of rank 0's node, the one address that must be known; None on a single node.
        collective_timeout: seconds after which a collective gives up that a rank never entered; a rank that died or
            fell silent is found long before by the watch.
        fingerprint: equal on all nodes that were started with the same flags.
        keys: of the sockets between nodes; None without a job secret.
        coverage: set where ranks may be lost (``--elastic-ep``): those that are left go on.
    """

    size: int
    make_worker: Callable[..., Any]
    num_nodes: int = 1
    node_rank: int = 0
    leader_address: str | None = None
    num_groups: int = 1
    first_group: int | None = None
    backend: str = "gloo"
    limits: WatchLimits = field(default_factory=WatchLimits)
    collective_timeout: float = 300.0
    fingerprint: str = ""
    keys: JobKeys | None = None
    coverage: Coverage | None = None
    device: str = "cpu"
    base_device: int = 0
    """GPU of the node's first rank; `device_step` further stands the next rank's."""
    device_step: int = 1

    def __post_init__(self) -> None:
        if self.size % self.num_nodes:
            raise ConfigError(f"{self.size} ranks do not fill --nnodes {self.num_nodes} evenly")
        if self.num_nodes > 1 and self.leader_address is None:
            raise ConfigError(f"--nnodes {self.num_nodes} needs --dist-init-addr HOST:PORT of node 0")
        if self.size % self.num_groups:
            raise ConfigError(f"{self.size} ranks do not form {self.num_groups} equal attention groups")

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.num_nodes

    @property
    def group_size(self) -> int:
        """Ranks that share a scheduler."""
        return self.size // self.num_groups

    @property
    def places(self) -> list[RankPlace]:
        return [self._place(rank) for rank in range(self.size)]

    def _place(self, rank: int) -> RankPlace:
        group, follows = divmod(rank, self.group_size)
        node, local = divmod(rank, self.ranks_per_node)
        first = 0 if self.first_group is None and self.num_groups > 1 else self.first_group
        prefix = "" if first is None else f"DP{first + group} "
        name = f"{prefix}TP{rank}" if self.size > 1 or not prefix else prefix.strip()
        device = self.device
        if device != "cpu":
            device += f":{self.base_device + self.device_step * local}"
        return RankPlace(rank, self.size, name, node, local, group, not follows, device)

    @property
    def local_places(self) -> list[RankPlace]:
        return [place for place in self.places if place.node_rank == self.node_rank]

    def followers_of(self, group: int) -> list[str]:
        """Names under which the ranks of a group ask for their leader's plans."""
        first = group * self.group_size
        return [plan_name(rank) for rank in range(first + 1, first + self.group_size)]

    @property
    def leader_host(self) -> str:
        return self._leader.host if self.leader_address else LOOPBACK

    def leader_bind(self, port: str | None = None) -> str:
        """Where rank 0 listens: `RendezvousAddress.bind`."""
        return self._leader.bind(port)

    @property
    def leader_flag(self) -> str:
        """The flag that names rank 0's address, for errors."""
        return f"--dist-init-addr {self.leader_address}" if self.leader_address else ""

    def leader_tcp(self, port: str | None = None) -> str:
        """``tcp://IP:PORT`` of the leader's control channel: `RendezvousAddress.tcp`."""
        return self._leader.tcp(port)

    @property
    def _leader(self) -> RendezvousAddress:
        assert self.leader_address is not None
        return RendezvousAddress(self.leader_address)
