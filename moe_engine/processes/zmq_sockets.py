"""Bind and connect of the engine's ZeroMQ sockets; CURVE authentication between nodes.

Processes of one node use ``ipc://`` paths in a directory of mode 0700 (`runtime_dir`), which needs no further
protection. Nodes use TCP ports. With a job secret (--dist-secret-file) every TCP socket uses CURVE (libzmq: Curve25519,
encrypted, mutually authenticated); without one, plain ZMTP.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket as sockets
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from moe_engine.errors import ConfigError
from moe_engine.processes.dist_secret import DistSecret

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SECRET_HINT = "--dist-secret-file or MOE_ENGINE_DIST_SECRET must hold the same secret on every node, or on none"
SALT = b"moe-engine job secret 1"


class JobKeys:
    """The Curve25519 key pairs of a job: one for sockets that bind, one for sockets that connect.

    Both are derived from the job's secret (HKDF-SHA256, RFC 5869). To connect, a peer needs the public key of the
    binding side. That key is never sent over the network, so only processes with the secret can connect; a client list
    (ZAP) would add a thread and no protection.
    """

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise ConfigError("--dist-secret-file needs pyzmq with CURVE, which its wheels include: pip install pyzmq")
        self.bind_secret, self.connect_secret = _derive(secret, b"bind"), _derive(secret, b"connect")
        self.bind_public = zmq.curve_public(self.bind_secret)
        self.connect_public = zmq.curve_public(self.connect_secret)

    def __repr__(self) -> str:
        return "JobKeys(...)"  # options that contain it are printed in logs and errors


def job_keys(secret: DistSecret | None) -> JobKeys | None:
    return None if secret is None else JobKeys(secret.value)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    """A Curve25519 secret key, in Z85."""
    extracted = hmac.new(SALT, secret, hashlib.sha256).digest()
    return z85.encode(hmac.new(extracted, purpose + b"\1", hashlib.sha256).digest())


def bind(socket: Any, address: str, keys: JobKeys | None = None, flag: str = "") -> str:
    """Binds a ZeroMQ socket; returns the address with the actual port.

    Args:
        address: ``ipc://PATH``, or ``tcp://IP:PORT`` with ``*`` for any free port.
        flag: the flag of the address, with its value, for error messages.

    Raises:
        ConfigError: the address cannot be bound.
    """
    encrypts = keys is not None and address.startswith("tcp://")
    if encrypts:
        assert keys is not None
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.bind_secret)
    socket.setsockopt(zmq.CURVE_SERVER, int(encrypts))  # for this address only: the socket may also bind an ipc address
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(_why_not_bound(address, error, flag)) from None
    return bound_address(socket)


def connect(socket: Any, address: str, keys: JobKeys | None = None) -> None:
    """Connects a ZeroMQ socket, now or once the other side has bound. `address` as it was bound."""
    if keys is not None and address.startswith("tcp://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.bind_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.connect_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.connect_secret)
    socket.connect(address)


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """The address last bound by a socket, with the actual port."""
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def _why_not_bound(address: str, error: zmq.ZMQError, flag: str) -> str:
    head = f"{flag}: cannot listen there ({address})" if flag else f"cannot listen at {address}"
    reason = os.strerror(error.errno) if error.errno else str(error)
    of_nodes = flag.startswith("--dist-init-addr")
    if error.errno == errno.EADDRNOTAVAIL or error.errno == errno.ENODEV:
        fix = "; it must be one of node 0's own (is this --node-rank 0?)" if of_nodes else ""
        return f"{head}: not an address of this host ({sockets.gethostname()}){fix}"
    if error.errno == errno.EADDRINUSE:
        fix = ", the same on all nodes; if node 0 has it, this node needs another --node-rank" if of_nodes else ""
        return f"{head}: the port is in use; give a free one{fix}"
    if address.startswith("ipc://"):
        return f"{head}: {reason}; set TMPDIR to a writable directory with a shorter path"
    return f"{head}: {reason}"


class ConnectionMonitor:
    """Counts failed handshakes of peers, so that a wrong secret can be reported. Belongs to its socket's thread.

    Must be read often: libzmq blocks when a thousand events are unread.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(
            HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.connected = False
        """Whether the socket's only peer was connected at the last call of `num_failed`."""

    def num_failed(self) -> int:
        """Handshakes that failed since the last call."""
        count = 0
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            count += bool(event & HANDSHAKE_FAILED)
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return count

    def close(self) -> None:
        """Call before the socket is closed."""
        self._socket.disable_monitor()
