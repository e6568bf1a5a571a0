"""Options of a rank group: size, placement of ranks, worker factory, timeouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.logs import rank_name
from moe_engine.processes.addresses import LOOPBACK
from moe_engine.processes.rendezvous_address import RendezvousAddress
from moe_engine.processes.zmq_sockets import JobKeys

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker


def plan_name(rank: int) -> str:
    return f"rank{rank}"


@dataclass(frozen=True)
class RankPlace:
    """One rank of the world. `name` prefixes its log lines and identifies it in errors: ``DP0 TP3``, or ``TP3``.

    `group`: index of its attention group; `leads`: its process runs the group's scheduler.
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
class DetectorLimits:
    """Time limits of the failure detector, in seconds.

    `silent`: a rank without heartbeats for this long is lost. A rank that others wait for is logged as late after the
    longer of `late` and `late_factor` times the longest recent step. `start`: until all ranks are ready; meanwhile a
    rank without heartbeats is logged after `start_late` and lost after `start_silent`, and a rank process stopped by a
    signal (detected by its parent) is lost after `silent`.
    """

    silent: float = 3.0
    start_late: float = 5.0
    start_silent: float = 15.0
    late: float = 1.0
    late_factor: float = 3.0
    start: float = 1200.0
    progress: float = 5.0
    """Interval of the log lines that list the ranks not ready during startup."""
    refused: float = 5.0
    """How long a node retries when a leader refuses its connection, in case a stale leader is being replaced."""


@dataclass(frozen=True)
class RankGroupOptions:
    """The ranks of one model replica.

    Args:
        num_groups: attention groups, each with its own requests and scheduler.
        first_group: index of the first group among those of all replicas; None with a single group in total.
        make_worker: ``make_worker(config, place, progress)`` returns a rank's `worker.Worker`; called in its process
            after torch.distributed is initialized; picklable by name. Its groups should report to `progress.observe`.
        num_nodes: nodes with an equal number of ranks each; `node_rank` is this node.
        leader_address: ``host:port`` of rank 0's node, the one address that must be known; None on a single node.
        collective_timeout: seconds until a collective that a rank never entered fails; the failure detector finds a
            rank that died or fell silent much earlier.
        fingerprint: resolved values by name, equal on all nodes started with the same flags.
        checkpoint: equal on all nodes with the same weights.
        keys: CURVE keys of the sockets between nodes; None without a job secret.
        on_rank_lost: the `cluster.rank_loss.RankLossPolicy`; None: a lost rank ends the replica.
    """

    size: int
    make_worker: Callable[..., Worker]
    num_nodes: int = 1
    node_rank: int = 0
    leader_address: str | None = None
    num_groups: int = 1
    first_group: int | None = None
    backend: str = "gloo"
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    collective_timeout: float = 300.0
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    keys: JobKeys | None = None
    on_rank_lost: Any = None
    device: str = "cpu"
    base_device: int = 0
    """GPU of the node's first rank; the next ranks' GPUs follow at intervals of `device_step`."""
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
        name = rank_name(rank, self.size, None if first is None else first + group)
        device = self.device
        if device != "cpu":
            device += f":{self.base_device + self.device_step * local}"
        return RankPlace(rank, self.size, name, node, local, group, not follows, device)

    @property
    def local_places(self) -> list[RankPlace]:
        return [place for place in self.places if place.node_rank == self.node_rank]

    def followers_of(self, group: int) -> list[str]:
        """Names under which a group's followers subscribe to their leader's plans."""
        return [plan_name(rank) for rank in self.following_ranks(group)]

    def following_ranks(self, group: int) -> range:
        """The ranks of a group without its leader."""
        first = group * self.group_size
        return range(first + 1, first + self.group_size)

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

    def leader_tcp(self) -> str:
        """``tcp://IP:PORT`` of the leader's control channel: `RendezvousAddress.tcp`."""
        return self._leader.tcp()

    @property
    def _leader(self) -> RendezvousAddress:
        assert self.leader_address is not None
        return RendezvousAddress(self.leader_address)
