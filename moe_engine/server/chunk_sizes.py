"""Sizes that the chunk headers of a request body declare (RFC 9112, 7.1), which httptools does not report.

A client may declare a chunk of any size and then send little or nothing. A server that reads the size refuses such a
body immediately, as it does for a large Content-Length.
"""

from __future__ import annotations

SIZE_DIGITS = 16
"""Max hexadecimal digits of a size that is read; a longer one has leading zeros."""
HEADER_BYTES = 2 * SIZE_DIGITS
"""Bytes kept of an incomplete chunk header: its size and the beginning of its extensions."""
LINE_END = b"\r\n"


class ChunkSizes:
    """Follows the bytes of one chunked body, which the parser has accepted before.

    Attributes:
        declared: size of all chunks begun so far, in bytes.
        has_ended: the last chunk has begun, or the body cannot be followed.
    """

    __slots__ = ("_header", "_skip", "declared", "has_ended")

    def __init__(self) -> None:
        self.declared = 0
        self.has_ended = False
        self._header = b""
        self._skip = 0
        """Bytes to the next chunk header: the rest of a chunk and its line end."""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body."""
        at = 0
        while at < len(data) and not self.has_ended:
            if self._skip:
                step = min(self._skip, len(data) - at)
                at, self._skip = at + step, self._skip - step
                continue
            end = data.find(LINE_END[1:], at)
            self._header += data[at : at + HEADER_BYTES if end < 0 else min(end, at + HEADER_BYTES)]
            if end < 0:
                self._header = self._header[:HEADER_BYTES]
                return
            self._begin_chunk()
            at = end + 1

    def _begin_chunk(self) -> None:
        digits, self._header = self._header.partition(b";")[0].strip(), b""
        try:
            size = int(digits, 16) if len(digits) <= SIZE_DIGITS else 0
        except ValueError:
            size = 0
        self.declared += size
        self.has_ended = not size
        self._skip = size + len(LINE_END)
