"""The nodes of a launch and this process's place among them: from the flags, else from the cluster launch."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.inputs.cluster_env import ClusterPlace
from moe_engine.planning.resolution_log import Record
from moe_engine.processes.rendezvous_address import RendezvousAddress


def resolve_place(args: EngineArgs, place: ClusterPlace | None, record: Record) -> tuple[int, int, str | None]:
    """(nodes, node rank, leader) from the flags, else from the cluster launch."""
    flags, given = args.parallel, args.given
    if place is not None and "node_rank" in given:
        _check_node_rank(flags, "nnodes" in given, place)
    if place is None or {"nnodes", "node_rank"} & given:
        return flags.nnodes, flags.node_rank, flags.dist_init_addr
    leader = flags.dist_init_addr
    if leader is None and place.num_nodes > 1:
        leader = record.note("dist_init_addr", place.leader_address, place.origin)
    nodes = record.note("nnodes", place.num_nodes, place.origin)
    return nodes, record.note("node_rank", place.node_rank, place.origin), leader


def _check_node_rank(flags: ParallelArgs, nnodes_given: bool, place: ClusterPlace) -> None:
    """Checks --node-rank against the launcher, as ``"$SLURM_NODEID"`` in a batch script is expanded on node 0 alone.
    With fewer --nnodes than the launcher started, users divide the nodes themselves: not checked.

    Raises:
        ConfigError: names both numbers.
    """
    if place.num_nodes == 1 or (nnodes_given and flags.nnodes != place.num_nodes):
        return
    if flags.node_rank != place.node_rank:
        contradiction = f"--node-rank {flags.node_rank}, but {place.node_variable}={place.node_rank} ({place.origin})"
        if place.node_variable != "SLURM_NODEID":
            raise ConfigError(f"{contradiction}: leave --node-rank out")
        raise ConfigError(
            f"{contradiction}: leave --node-rank out, or let the shell of each task expand $SLURM_NODEID (the batch "
            "script expands it on its first node only): srun bash -c '... --node-rank $SLURM_NODEID'"
        )


def check_nodes(nodes: int, node_rank: int, leader: str | None) -> None:
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank {node_rank}: must be 0 to {nodes - 1} with --nnodes {nodes}")
    if nodes > 1 and leader is None:
        raise ConfigError(
            f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of node 0 that all nodes can reach"
        )
    if leader is not None:
        RendezvousAddress(leader).check()
