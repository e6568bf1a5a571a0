"""The socket the server will listen on, taken before anything slow begins. Imports no HTTP library."""

from __future__ import annotations

import socket

from moe_engine.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, not listening yet.

    Args:
        host: an address or a name; of a name's addresses an IPv4 one is preferred.

    Raises:
        ConfigError: no such host, or the address is taken or not this machine's.
    """
    flags = f"--host {host} --port {port}"
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"{flags}: no address of that name: {exc.strerror}") from None
    except ValueError:  # no encoding of a host's name, or a null byte in it
        raise ConfigError(f"{flags}: not the name of a host") from None
    family, kind, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"{flags}: cannot listen there: {exc.strerror}") from None
    return sock


def url_host(host: str) -> str:
    """How a client on this machine writes the host in a URL."""
    if host in ("", "0.0.0.0", "::", "127.0.0.1"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
