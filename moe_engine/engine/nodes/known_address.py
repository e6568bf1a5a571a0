"""The one address that all nodes must know, as those who listen there and those who come see it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import zmq

from moe_engine.errors import ConfigError


@dataclass(frozen=True)
class KnownAddress:
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
        try:
            ip = socket.gethostbyname(self.host)
        except OSError as error:
            raise ConfigError(f"--dist-init-addr {self.text}: unknown host: {error}") from None
        return f"tcp://{ip}:{port or self.text.rpartition(':')[2]}"

    def bind(self, port: str | None = None) -> str:
        """Where that node listens, as `tcp`; on every interface where its own name means the machine itself to it
        (Debian's ``127.0.1.1 node0`` in /etc/hosts)."""
        scheme, _, rest = self.tcp(port).partition("//")
        return f"{scheme}//*:{rest.rpartition(':')[2]}" if rest.startswith("127.") else f"{scheme}//{rest}"

    def advertised(self, bound: str) -> str:
        """What others call an address that the node has bound by `bind`."""
        return f"tcp://{self.host}:{bound.rpartition(':')[2]}"


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """What a socket was last bound to, with the port that it got."""
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def host_of(address: str) -> str:
    """Of ``tcp://HOST:PORT``."""
    return address.removeprefix("tcp://").rpartition(":")[0]
