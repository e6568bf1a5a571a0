"""The server's listening socket, bound before anything slow starts. Imports no HTTP library."""

from __future__ import annotations

import errno
import socket
from typing import Any

from moe_engine.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Binds a socket, not listening yet; `listen` starts it.

    Args:
        host: an address or a name; IPv4 addresses of a name are preferred. An IPv6 address may have brackets.

    Raises:
        ConfigError: unknown host, or the address is in use or not of this machine.
    """
    family, address = find_address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind_alone(sock, address)
    except OSError as exc:
        sock.close()
        raise cannot_listen(host, port, exc) from None
    return sock


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    fix = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror}{fix}")


def _bind_alone(sock: socket.socket, address: Any) -> None:
    """Two sockets with SO_REUSEADDR that do not listen yet could both bind a port, and the second server would load its
    model in vain. The option is needed only where connections of an earlier server have not expired yet."""
    try:
        sock.bind(address)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def listen(sock: socket.socket, backlog: int) -> None:
    """Starts a socket of `bind`. Its connections inherit SO_REUSEADDR: expiring ones leave the port to the next server.

    Raises:
        OSError: another process listens there since the socket was bound.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.listen(backlog)


def find_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The address of a host and port, and its family. Arguments and errors as of `bind`."""
    flags = f"--host {host} --port {port}"
    host = host.removeprefix("[").removesuffix("]")  # as in a URL
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"{flags}: no address of that name: {exc.strerror}") from None
    except ValueError:  # not encodable as a host name, or with a null byte
        raise ConfigError(f"{flags}: not the name of a host") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def url_host(host: str) -> str:
    """The host in a URL for clients on this machine."""
    host = host.removeprefix("[").removesuffix("]")
    if host in ("", "0.0.0.0", "::", "127.0.0.1"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
