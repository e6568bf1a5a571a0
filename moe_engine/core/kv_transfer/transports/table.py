"""The transports by name (`--disaggregation-transfer-backend`). Their libraries are imported where one is opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moe_engine.core.kv_transfer.transports.mooncake import MooncakeTransport
from moe_engine.core.kv_transfer.transports.nixl import NixlTransport
from moe_engine.core.kv_transfer.transports.protocol import Send, Transport
from moe_engine.core.kv_transfer.transports.shm import SharedMemoryTransport
from moe_engine.core.kv_transfer.transports.tcp import TcpTransport

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "tcp": TcpTransport,
    "shm": SharedMemoryTransport,
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
    "mooncake_tcp": partial(MooncakeTransport, protocol="tcp"),
}
"""Name -> constructor of (address of this server for peers, `Send`)."""


def open_transport(name: str, host: str, send: Send, devices: str = "") -> Transport:
    """
    Args:
        devices: names of RDMA devices for ``mooncake``, separated by commas; empty: it chooses.

    Raises:
        TransportError: its library is absent, or does not start.
    """
    more = {"devices": devices} if devices and name == "mooncake" else {}
    return TRANSPORTS[name](host, send, **more)
