"""Liveness echo without Python: shows that a process is alive while an import or a compiler holds its GIL.

Beats are sent by a Python thread, and loading a library can hold the GIL for many seconds, so missing beats during
startup mean little. libzmq alone answers the pings here: a process that does not answer is stopped or dead, or its
network link is down.
"""

from __future__ import annotations

import contextlib

import zmq

from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import JobKeys, connect

_PREFIX = b"echo "


def start_echo(address: str, identity: str, keys: JobKeys | None) -> None:
    """Answers pings of the leader at `address` until the process exits.

    Args:
        identity: socket identity of the process's heartbeat client (`peers.identity_of_process`).
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, _PREFIX + identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    connect(socket, address, keys)

    def answer() -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # the process exits
            zmq.proxy(socket, socket)

    # A failed echo matters only during startup, where the leader detects it; beats continue without it.
    start_watched("echo", answer, lambda message: None)


def echo_of(identity: bytes) -> bytes:
    """Socket identity of a process's echo."""
    return _PREFIX + identity


def echoed(identity: bytes) -> bytes | None:
    """Identity of the process whose echo sent a message; None for other messages."""
    return identity.removeprefix(_PREFIX) if identity.startswith(_PREFIX) else None
