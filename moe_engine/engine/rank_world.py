"""Joins the ranks by torch.distributed: a store on the leader, one generation of process groups over it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil

from moe_engine.engine.rank_options import RankGroupOptions, RankPlace

ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737): the way there is the default route."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def quieten_torch() -> None:
    """Before torch is imported. What its C++ parts say about ranks, the watch says better."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_store(options: RankGroupOptions) -> Any:
    """The leader's store, on a free port (`.port`); lives as long as the object."""
    import torch.distributed as dist

    timeout = timedelta(seconds=options.limits.start)
    return dist.TCPStore(options.leader_host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def join_world(options: RankGroupOptions, place: RankPlace, host: str, port: int, store: Any = None) -> None:
    """Makes this process a rank of torch.distributed's world. Returns when all ranks have joined.

    Args:
        host: of the leader's store, at `port`; the leader itself hands in its `store`.

    Raises:
        PeerLost: another rank went meanwhile, or cannot be reached.
    """
    import torch.distributed as dist

    from moe_engine.parallel.collectives import PeerLost

    os.environ.setdefault(INTERFACE_VARIABLE, interface_towards(host, port))
    try:
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=options.limits.start))
        dist.init_process_group(
            options.backend,
            store=dist.PrefixStore(f"generation{options.generation}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=options.collective_timeout),
        )
    except RuntimeError as error:  # torch's errors of stores and backends derive from it
        reason = str(error).strip().partition("\n")[0]
        raise PeerLost(f"joining the other ranks at {host}:{port}: {reason}") from error


def own_address_towards(host: str, port: int = 9) -> str:
    """This machine's IP address on the way to `host`: the one the other ranks can reach it by, too."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    own = _source_address(family, address)
    if own.startswith("127.") and own != "127.0.0.1":  # `host` is this machine's own name, in /etc/hosts
        own = _source_address(socket.AF_INET, ELSEWHERE) or _first_address() or own
    return own


def _source_address(family: int, destination: Any) -> str:
    """Empty where no route leads there."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)  # sends nothing: the system only picks a route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _first_address() -> str:
    """An address of this machine that is not its own loop."""
    for addresses in psutil.net_if_addrs().values():
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127."):
                return str(item.address)
    return ""


def interface_towards(host: str, port: int) -> str:
    """The network interface of `own_address_towards`."""
    own = own_address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == own for item in addresses):
            return name
    return "lo"
