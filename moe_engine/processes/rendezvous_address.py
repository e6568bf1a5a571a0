"""The one address that all nodes must know, as those who listen there and those who come see it."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.processes.addresses import network_address

logger = logging.getLogger("moe_engine")


@dataclass(frozen=True)
class RendezvousAddress:
    """``HOST:PORT`` of a node that the others reach. Port 0 is any free one, which is learnt by binding it."""

    text: str

    @property
    def host(self) -> str:
        return self.text.rpartition(":")[0].strip("[]")

    def tcp(self, port: str | None = None) -> str:
        """``tcp://IP:PORT``, or another `port` of the node.

        Raises:
            ConfigError: the host cannot be resolved.
        """
        return f"tcp://{self._ip()}:{port or self.port}"

    def bind(self, port: str | None = None) -> str:
        """Where that node listens: one address. Its own name may mean loopback to it (Debian's ``127.0.1.1 node0`` in
        /etc/hosts) and not to others; the address is then that of its network (`network_address`).

        Raises:
            ConfigError: as `tcp`.
        """
        ip = self._ip()
        if ip.startswith("127.") and not self._is_loopback:
            own = network_address() or ip
            if port is None:
                logger.info("%s is %s to this host itself: nodes are expected at %s", self.host, ip, own)
            ip = own
        return f"tcp://{ip}:{port or self.port}"

    @property
    def port(self) -> str:
        return self.text.rpartition(":")[2]

    @property
    def _is_loopback(self) -> bool:
        """Whether the host means loopback to every machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")

    def _ip(self) -> str:
        try:
            return socket.gethostbyname(self.host)
        except (OSError, UnicodeError) as error:
            hint = "; an IPv6 address does not serve, give an IPv4 address or a name" if ":" in self.host else ""
            raise ConfigError(f"--dist-init-addr {self.text}: unknown host: {error}{hint}") from None


def host_of(address: str) -> str:
    """Of ``tcp://HOST:PORT``."""
    return address.removeprefix("tcp://").rpartition(":")[0]
