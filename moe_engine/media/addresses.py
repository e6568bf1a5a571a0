"""Reads http and https addresses with limits on size, time and place. Blocking; runs in threads.

A server must not give clients access to hosts that only the server can reach. So each host, also of a redirect, is
resolved once, all its addresses are checked, and the connection uses a checked address.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from moe_engine.media.settings import MediaSettings

MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 1 << 16
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a gateway (RFC 6052)."""
HEADERS = {"User-Agent": "moe-engine", "Accept": "image/*", "Accept-Encoding": "identity"}


class MediaError(Exception):
    """The reason why an image cannot be read; the message completes "FIELD: "."""


def fetch(address: str, settings: MediaSettings) -> bytes:
    """The body at an address. Raises MediaError."""
    deadline = time.monotonic() + settings.media_fetch_timeout
    for _ in range(MAX_REDIRECTS + 1):
        parts = _split(address)
        try:
            found = _get(parts, settings, deadline)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise MediaError(
                    f"{parts.hostname} did not send the image within {settings.media_fetch_timeout:g} s "
                    "(--media-fetch-timeout)"
                ) from None
            raise MediaError(f"cannot be read from {parts.hostname}: {error or type(error).__name__}") from None
        if isinstance(found, bytes):
            return found
        address = urljoin(address, found)
    raise MediaError(f"{parts.hostname} redirects more than {MAX_REDIRECTS} times")


def _split(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise MediaError(f"is not a valid address ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise MediaError(f"addresses of {parts.scheme!r:.20} are not read; use http, https or data")
    if not parts.hostname or port == 0 or parts.username is not None:
        raise MediaError("is not a valid address: it needs a host, and must not contain a user name")
    return parts


def _get(parts: SplitResult, settings: MediaSettings, deadline: float) -> bytes | str:
    """The body, or the address of a redirect."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    place = _checked_place(host, port, settings)
    with socket.create_connection(place, _left(deadline)) as plain, _closed_at(deadline, plain):
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=HEADERS)
        response = connection.getresponse()
        if response.status in REDIRECTS and (there := response.getheader("Location")):
            return there
        if response.status != 200:
            raise MediaError(f"{host} answers with status {response.status}")
        return _body(response, settings, deadline)


def _body(response: http.client.HTTPResponse, settings: MediaSettings, deadline: float) -> bytes:
    length = response.getheader("Content-Length") or ""
    found = bytearray()
    while True:
        if len(found) > settings.max_bytes or (length.isdigit() and int(length) > settings.max_bytes):
            raise MediaError(f"the image has more than {settings.max_media_mb} MB (--max-media-mb)")
        part = response.read1(CHUNK)
        if time.monotonic() >= deadline:  # which ends the connection, as the end of a body does
            raise TimeoutError
        if not part:
            break
        found += part
    if length.isdigit() and len(found) != int(length):
        raise http.client.IncompleteRead(bytes(0), int(length) - len(found))
    return bytes(found)


def _checked_place(host: str, port: int, settings: MediaSettings) -> tuple[str, int]:
    allowed = settings.allowed_media_domains.lower().split()
    if allowed and host.lower().rstrip(".") not in allowed:
        raise MediaError(f"images are not read from {host:.80}; this server reads from {', '.join(allowed)} only "
                         "(--allowed-media-domains)")  # fmt: skip
    try:
        places = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise MediaError(f"the host {host!r:.80} is not known") from None
    if not settings.allow_private_media_urls and not all(map(is_public, places)):
        raise MediaError(
            f"{host} is a private address, which this server does not read for requests (--allow-private-media-urls)"
        )
    return places[0], port


def is_public(place: str) -> bool:
    """Whether an IP address is reachable from everywhere."""
    address = ipaddress.ip_address(place.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            address = inner
    return address.is_global and not address.is_multicast


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


@contextmanager
def _closed_at(deadline: float, connection: socket.socket) -> Iterator[None]:
    """Ends all reads at the deadline, also of a host that sends a byte from time to time."""
    timer = threading.Timer(_left(deadline), _shut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)
