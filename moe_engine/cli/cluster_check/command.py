"""The command ``moe-engine cluster-check``."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from moe_engine.cli.cluster_check.follower import Follower
from moe_engine.cli.cluster_check.leader import Leader, Plan
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.planning.cluster_env import ClusterPlace, find_place

DESCRIPTION = """\
Checks whether the nodes of a job can serve a model together; starts no GPU work. Run it once on every node, for
instance by `srun --ntasks-per-node=1 moe-engine cluster-check`: SLURM's and torchrun's environments say who is who.
Every node is looked at, every link between two nodes is tried in both directions, and the embedded model is served by
one CPU rank a node. Node 0 prints a table and, last, OK; or it names the nodes and links that failed."""


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0 where all is in order, 1 where something failed.

    Raises:
        ConfigError: flags or the launcher's environment are at fault.
    """
    options = _parser(prog).parse_args(list(argv))
    for flag, seconds in (("--join-timeout", options.join_timeout), ("--engine-timeout", options.engine_timeout)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{flag} {seconds:g}: must be more than 0 seconds")
    place = _place(options, os.environ)
    if place.local_rank:
        print(f"node {place.node_rank}: local rank 0 checks for this node, local rank {place.local_rank} leaves")
        return 0
    engine_seconds = 0.0 if options.no_engine else options.engine_timeout
    plan = Plan(place.num_nodes, place.leader_address, place.hosts, options.join_timeout, engine_seconds)
    if place.node_rank == 0:
        return _run(_lead(plan))
    return _run(Follower(place.node_rank, plan.host, plan.port, options.join_timeout, _say).run())


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION)
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of nodes, where no launcher says it")
    parser.add_argument("--node-rank", type=int, metavar="I", help="this node's number, from 0")
    parser.add_argument("--dist-init-addr", metavar="HOST:PORT", help="of node 0: the one address all must reach")
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="SECONDS", help="for all nodes to come (60)"
    )
    parser.add_argument(
        "--engine-timeout", type=float, default=180.0, metavar="SECONDS", help="for the engine to be ready (180)"
    )
    parser.add_argument("--no-engine", action="store_true", help="look at nodes and links only")
    return parser


def _place(options: Any, environ: Mapping[str, str]) -> ClusterPlace:
    """Flags go before the environment, as for ``serve``."""
    place = find_place(environ)
    given = [options.nnodes, options.node_rank, options.dist_init_addr]
    if given == [None, None, None]:
        return place or ClusterPlace(1, 0, None, 0, "one node")
    nodes = 1 if options.nnodes is None else options.nnodes
    rank, address = options.node_rank or 0, options.dist_init_addr
    if nodes < 1 or not 0 <= rank < nodes:
        raise ConfigError(f"--node-rank {rank}: with --nnodes {nodes} it is 0 to {nodes - 1}")
    host, _, port = (address or "").rpartition(":")
    if nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of node 0 that all reach")
    return ClusterPlace(nodes, rank, address if nodes > 1 else None, 0, "flags")


async def _lead(plan: Plan) -> int:
    _say(f"checking {plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''} from {socket.gethostname()}")
    report = await Leader(plan, _say).run()
    _say(report.text())
    return int(not report.ok)


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Until the end or SIGTERM, which ends the engine's process here, too."""

    async def bounded() -> int:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(bounded())
    except asyncio.CancelledError:
        _say("ended by SIGTERM")
        return 1


def _say(text: str) -> None:
    print(text, flush=True)
