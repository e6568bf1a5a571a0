"""Rendezvous address (--dist-init-addr): the form that its node binds, and the form that other nodes connect to."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.processes.addresses import network_address, wait_for_name

logger = logging.getLogger("moe_engine")


@dataclass(frozen=True)
class RendezvousAddress:
    """``HOST:PORT`` of the node that other nodes connect to. Port 0: any free port, known after binding."""

    text: str

    @property
    def host(self) -> str:
        return self.text.rpartition(":")[0].strip("[]")

    def check(self) -> None:
        """Raises ConfigError: not ``HOST:PORT`` with a port that other nodes can connect to."""
        if not self.host or "/" in self.host or not self.port.isdecimal() or not 0 < int(self.port) < 65536:
            raise ConfigError(f"--dist-init-addr {self.text}: must be HOST:PORT, as in node0:20000")

    def tcp(self) -> str:
        """``tcp://IP:PORT``.

        Raises:
            ConfigError: the host cannot be resolved.
        """
        return f"tcp://{self._ip()}:{self.port}"

    def bind(self, port: str | None = None) -> str:
        """The address that the node binds. If its own name resolves to loopback only on itself (Debian's ``127.0.1.1
        node0`` in /etc/hosts), its network address (`network_address`).

        Raises:
            ConfigError: as in `tcp`.
        """
        ip = self._ip()
        if ip.startswith("127.") and not self._is_loopback:
            own = network_address() or ip
            if port is None:
                logger.info("%s resolves to %s on this host: listening for nodes at %s", self.host, ip, own)
            ip = own
        return f"tcp://{ip}:{port or self.port}"

    @property
    def port(self) -> str:
        return self.text.rpartition(":")[2]

    @property
    def _is_loopback(self) -> bool:
        """Whether the host is loopback on every machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    def _ip(self) -> str:
        try:
            return wait_for_name(self.host, lambda: socket.gethostbyname(self.host))
        except (OSError, UnicodeError) as error:
            hint = "; IPv6 addresses are not supported, give an IPv4 address or a name" if ":" in self.host else ""
            raise ConfigError(f"--dist-init-addr {self.text}: unknown host: {error}{hint}") from None


def host_of(address: str) -> str:
    """Host of ``tcp://HOST:PORT``."""
    return address.removeprefix("tcp://").rpartition(":")[0]
