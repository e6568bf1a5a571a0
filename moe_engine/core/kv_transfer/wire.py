"""Messages between two servers, the control connection: ZeroMQ multipart, a header in msgpack and for ``bytes`` them.

A decode server connects a DEALER socket to the ROUTER socket of a prefill server, `--disaggregation-bootstrap-port`.
With a secret (`--dist-secret-file`) the connection is encrypted and closed to others.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import zmq

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A peer that sends no message for this long is lost: stopped, or behind a cut cable. A process that dies closes its
connection, which is detected immediately."""
MEET_SECONDS = 30.0
"""Time limit for the other half of a transfer to arrive: the router sends a request to both servers at the same
time."""
TRANSFER_SECONDS = 120.0
"""Deadline of a transfer, its prefill included."""

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])


def decode(header: bytes) -> list[Any]:
    """Raises msgspec.MsgspecError: not a message."""
    return _decoder.decode(header)


def checksum(payload: Any) -> int:
    return zlib.crc32(payload)


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a lost peer is an error
    _unbounded(socket)
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    _unbounded(socket)
    return socket


def _unbounded(socket: zmq.Socket[bytes]) -> None:
    socket.set_hwm(0)  # the window of each transfer is the bound
    socket.setsockopt(zmq.LINGER, 200)
