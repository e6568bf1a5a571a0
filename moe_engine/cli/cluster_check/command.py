"""Command line of ``moe-engine cluster-check``, and its steps."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moe_engine.cli.cluster_check.engine_trial import END_SECONDS, run_part, trial_flags
from moe_engine.cli.cluster_check.exchange import CannotJoin, Exchange
from moe_engine.cli.cluster_check.facts import Reference, differences, own_facts, versions
from moe_engine.cli.cluster_check.links import EchoListener, try_links
from moe_engine.cli.cluster_check.report import Finding, Report
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.planning.inputs.cluster_env import ClusterPlace, find_place
from moe_engine.planning.parallelism.resolve_nodes import check_nodes
from moe_engine.processes.addresses import free_port
from moe_engine.processes.rendezvous_address import RendezvousAddress
from moe_engine.processes.runtime_dir import check_temporary

RESULT_SECONDS = 30.0
"""Time for the other nodes to finish a step after node 0."""
REST_SECONDS = 240.0
"""Time for everything except joining and the start of the engine."""
DAY_SECONDS = 86400
TIME_LIMITS = (("--join-timeout", 60.0, "all nodes to join"), ("--engine-timeout", 180.0, "the engine to be ready"))

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
        if not 0 < seconds <= DAY_SECONDS:
            raise ConfigError(f"{flag} {seconds:g}: must be more than 0 and at most {DAY_SECONDS} seconds")
    place = _place(options, os.environ)
    if place.local_rank:
        print(f"node {place.node_rank}: local rank 0 checks this node, local rank {place.local_rank} exits")
        return 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the check reports lost connections itself
    engine_seconds = 0.0 if options.no_engine else options.engine_timeout
    # also stops this node's engine process
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    limit = 2 * options.join_timeout + engine_seconds + REST_SECONDS
    watchdog = threading.Timer(limit, _give_up, [f"FAILED node {place.node_rank}: the check hangs after {limit:g} s"])
    watchdog.daemon = True
    watchdog.start()
    try:
        return check(place, options.join_timeout, engine_seconds, partial(print, flush=True))
    finally:
        watchdog.cancel()
        signal.signal(signal.SIGTERM, before)


def check(place: ClusterPlace, join_seconds: float, engine_seconds: float, log: Callable[[str], None]) -> int:
    """Checks this node together with the others; returns the exit code, the same on all of them.

    Args:
        engine_seconds: time for the engine to become ready; 0 skips the engine.

    Raises:
        ConfigError: node 0 cannot listen at its address, or there is no temporary directory.
    """
    check_temporary()
    rank, address = place.node_rank, RendezvousAddress(place.leader_address or "127.0.0.1:0")
    names = [place.hosts[node] if place.hosts else f"node {node}" for node in range(place.num_nodes)]
    report = Report(names)
    if rank == 0:
        log(f"checking {len(names)} node{'s' if len(names) > 1 else ''} from {socket.gethostname()}")
    try:
        exchange = Exchange(address, rank, names, join_seconds, log)
        _check_links(exchange, report, rank, join_seconds, address.text)
        _try_engine(exchange, report, rank, engine_seconds)
        ok = exchange.share("verdict", not report.problems)
        if rank == 0:
            log(report.text())
        exchange.gather("end", Finding(), END_SECONDS)  # node 0's store ends last
    except (CannotJoin, RuntimeError) as error:  # RuntimeError: base of the store's errors
        if rank == 0:
            raise
        lost = "" if isinstance(error, CannotJoin) else f"lost node 0 at {address.text}: "
        log(f"FAILED node {rank} ({socket.gethostname()}) {lost}{str(error).partition(chr(10))[0]}")
        return 1
    return int(not ok)


def _check_links(exchange: Exchange, report: Report, rank: int, seconds: float, address: str) -> None:
    """Facts of the nodes and links between them. Only node 0 gathers findings, so only its report has a meaning."""
    with EchoListener(exchange.ip) as echo:
        nodes = exchange.gather("facts", own_facts(echo.address), seconds)
        why = f"it is down, its process did not start, or it cannot reach node 0 at {address} (see its own output)"
        report.add(range(len(report.rows)), nodes, f"did not join within {seconds:g} s: {why}")
        reference = exchange.share("reference", Reference(versions(), time.time(), nodes))
        different = differences(reference)
        found = try_links(rank, reference.nodes)
        found.problems += different
        report.add(nodes, exchange.gather("links", found, RESULT_SECONDS), "lost while testing its links")
        exchange.share("links tested", "")  # until then other nodes need this node's listener


def _try_engine(exchange: Exchange, report: Report, rank: int, seconds: float) -> None:
    """The trial engine on all nodes, if there was no problem before."""
    wanted = seconds and not report.problems
    address = exchange.share("engine", f"{exchange.ip}:{free_port(exchange.ip)}" if wanted else "")
    if address:
        flags = trial_flags(len(report.rows), address, seconds)
        found = run_part(flags, rank, seconds, partial(exchange.begun, "engine parts"))
        ranks, parts = range(len(report.rows)), exchange.gather("engine parts", found, RESULT_SECONDS)
        report.add(ranks, parts, "lost while the engine ran")


def _give_up(problem: str) -> None:
    print(problem, flush=True)
    os._exit(1)


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION)
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of nodes (default: from the launcher)")
    parser.add_argument("--node-rank", type=int, metavar="I", help="this node's rank, from 0")
    parser.add_argument("--dist-init-addr", metavar="HOST:PORT", help="address of node 0, reachable from all nodes")
    for flag, seconds, end in TIME_LIMITS:
        text = f"time limit for {end} ({seconds:g})"
        parser.add_argument(flag, type=float, default=seconds, metavar="SECONDS", help=text)
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
    if nodes < 1:
        raise ConfigError(f"--nnodes {nodes}: must be at least 1")
    check_nodes(nodes, rank, address)
    return ClusterPlace(nodes, rank, address if nodes > 1 else None, 0, "flags")
