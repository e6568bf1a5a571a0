"""Command line of ``moe-engine cluster-check``."""

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
Checks that the nodes of a job can serve a model together; uses no GPU. Run it once on every node, for example with
`srun --ntasks-per-node=1 moe-engine cluster-check`: node ranks are read from SLURM's or torchrun's environment. It
checks every node, tests every link between two nodes in both directions, and serves the embedded model with one CPU
rank per node. Node 0 prints a table, then OK or the nodes and links that failed."""


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0 if all checks passed, else 1.

    Raises:
        ConfigError: invalid flags or launcher environment.
    """
    options = _parser(prog).parse_args(list(argv))
    for flag, seconds in (("--join-timeout", options.join_timeout), ("--engine-timeout", options.engine_timeout)):
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{flag} {seconds:g}: must be more than 0 seconds")
    place = _place(options, os.environ)
    if place.local_rank:
        print(f"node {place.node_rank}: local rank 0 checks this node, local rank {place.local_rank} exits")
        return 0
    engine_seconds = 0.0 if options.no_engine else options.engine_timeout
    plan = Plan(place.num_nodes, place.leader_address, place.hosts, options.join_timeout, engine_seconds)
    if place.node_rank == 0:
        return _run(_lead(plan))
    return _run(Follower(place.node_rank, plan.host, plan.port, options.join_timeout, _log).run())


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION)
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of nodes (default: from the launcher)")
    parser.add_argument("--node-rank", type=int, metavar="I", help="this node's rank, from 0")
    parser.add_argument("--dist-init-addr", metavar="HOST:PORT", help="address of node 0, reachable from all nodes")
    parser.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="SECONDS", help="time limit for all nodes to join (60)"
    )
    parser.add_argument(
        "--engine-timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="time limit for the engine to be ready (180)",
    )
    parser.add_argument("--no-engine", action="store_true", help="check nodes and links only")
    return parser


def _place(options: Any, environ: Mapping[str, str]) -> ClusterPlace:
    """Flags override the environment, as in ``serve``."""
    place = find_place(environ)
    given = [options.nnodes, options.node_rank, options.dist_init_addr]
    if given == [None, None, None]:
        return place or ClusterPlace(1, 0, None, 0, "one node")
    nodes = 1 if options.nnodes is None else options.nnodes
    rank, address = options.node_rank or 0, options.dist_init_addr
    if nodes < 1 or not 0 <= rank < nodes:
        raise ConfigError(f"--node-rank {rank}: must be 0 to {nodes - 1} with --nnodes {nodes}")
    host, _, port = (address or "").rpartition(":")
    if nodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(
            f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of node 0 that all nodes reach"
        )
    return ClusterPlace(nodes, rank, address if nodes > 1 else None, 0, "flags")


async def _lead(plan: Plan) -> int:
    _log(f"checking {plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''} from {socket.gethostname()}")
    report = await Leader(plan, _log).run()
    _log(report.text())
    return int(not report.ok)


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Runs until done or SIGTERM, which also stops this node's engine process."""

    async def bounded() -> int:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(bounded())
    except asyncio.CancelledError:
        _log("stopped by SIGTERM")
        return 1


def _log(text: str) -> None:
    print(text, flush=True)
