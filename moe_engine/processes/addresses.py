"""Addresses of this machine: the IP address that other ranks can reach, and its network interface."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from moe_engine.errors import ConfigError

logger = logging.getLogger("moe_engine")

ELSEWHERE = ("192.0.2.1", 9)
"""An unassigned address (RFC 5737): its route is the default route."""

LOOPBACK = "127.0.0.1"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface of gloo and of the engine's own sockets between nodes."""

NAME_SECONDS = 60.0
"""Time in which a host's name may become known: Kubernetes publishes the name of a pod seconds after its start, and its
DNS remembers for up to 30 s that there was none."""
RETRY_SECONDS = 1.0
NAMES_OF_UNKNOWN = ("EAI_NONAME", "EAI_AGAIN", "EAI_NODATA")  # systems without the last one report the first
UNKNOWN = tuple(getattr(socket, name) for name in NAMES_OF_UNKNOWN if hasattr(socket, name))

NO_PORT = (
    "no port of net.ipv4.ip_local_port_range is free: end programs that hold its ports, or widen it "
    "(sysctl -w net.ipv4.ip_local_port_range='1024 65535')"
)
"""What "Address already in use" means where any port would do."""

Found = TypeVar("Found")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this machine on which no program listens."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for_name(host: str, lookup: Callable[[], Found]) -> Found:
    """The result of a lookup of `host`, tried again for `NAME_SECONDS` while the name is unknown. Raises its error."""
    deadline, is_logged = time.monotonic() + NAME_SECONDS, False
    while True:
        try:
            return lookup()
        except socket.gaierror as error:
            if error.errno not in UNKNOWN or time.monotonic() >= deadline:
                raise
            if not is_logged:
                logger.warning("--dist-init-addr: unknown host %s: %s; trying for %.0f s", host, error, NAME_SECONDS)
            is_logged = True
        time.sleep(RETRY_SECONDS)


def own_address_towards(host: str, port: int = 9) -> str:
    """This machine's IP address on the route to `host`, at which other ranks can reach it.

    Raises:
        ConfigError: the host cannot be resolved.
    """
    try:
        found = wait_for_name(host, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host}, the host of --dist-init-addr, is unknown: {error}") from None
    family, _, _, _, address = found[0]
    own = _source_address(family, address)
    if own.startswith("127.") and own != "127.0.0.1":  # `host` is this machine's own name, in /etc/hosts
        own = network_address() or own
    return own


def network_address() -> str:
    """This machine's IPv4 address for other machines: of the interface in `INTERFACE_VARIABLE`, else of the default
    route, else any that is not loopback. Empty if there is none."""
    chosen = _address_of(os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0])
    return chosen or _source_address(socket.AF_INET, ELSEWHERE) or _first_address()


def _address_of(interface: str) -> str:
    for item in psutil.net_if_addrs().get(interface, ()):
        if item.family == socket.AF_INET:
            return str(item.address)
    return ""


def _source_address(family: int, destination: Any) -> str:
    """Empty if there is no route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)  # UDP: sends nothing, only selects a route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _first_address() -> str:
    """The first IPv4 address that is not loopback."""
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
