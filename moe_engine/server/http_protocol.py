"""uvicorn's HTTP/1.1 connection, with bodies of requests that offer an upgrade.

Clients such as Java's HttpClient and ``curl --http2`` send ``Upgrade: h2c`` with every first request on a plain
connection. A server that does not take the offer answers in HTTP/1.1 as if the header were not there (RFC 9110, 7.8);
httptools, however, stops reading at the end of such a head and leaves the body to the new protocol.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class Connection(HttpToolsProtocol):
    """Ignores offers to upgrade: what follows such a head is read as its body."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self.cycle.more_body = True  # httptools has just called it complete
                self.parser = httptools.HttpRequestParser(_Rest(self))
                self.parser.feed_data(_head_again(self.headers))
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return


def _head_again(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head that promises the same body and offers nothing."""
    lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in headers if name in _FRAMING)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Rest:
    """A connection's callbacks for a head it has seen already: nothing of it is told twice, all that follows is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen = False
        self.on_body = connection.on_body

    def on_message_begin(self) -> None:
        if self._seen:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._seen:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._seen:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> Any:
        if self._seen:
            self._connection.on_headers_complete()
        self._seen = True

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()
