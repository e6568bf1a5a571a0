"""An echo that needs no Python: it shows that a process runs while its interpreter is held by an import or a compiler.

A beat is sent by a Python thread, and loading a library can hold the interpreter for many seconds, so that during the
start missing beats tell little. Pings are answered here by libzmq alone: a process that does not answer is stopped, or
it or its link is gone.
"""

from __future__ import annotations

import contextlib

import zmq

from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import JobKeys, connect

_PREFIX = b"echo "


def start_echo(address: str, identity: str, keys: JobKeys | None = None) -> None:
    """Answers pings of the leader at `address` from now on, for as long as the process runs.

    Args:
        identity: of the process's link to the leader (`peers.identity_of_process`).
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, _PREFIX + identity.encode())
    socket.setsockopt(zmq.LINGER, 0)
    connect(socket, address, keys)

    def answer() -> None:
        with contextlib.suppress(zmq.ContextTerminated):  # the process ends
            zmq.proxy(socket, socket)

    # Beats go on without the echo, so its failure matters during the start only, and there the leader notices it.
    start_watched("echo", answer, lambda message: None)


def echo_of(identity: bytes) -> bytes:
    """The identity of the echo of a process."""
    return _PREFIX + identity


def echoed(identity: bytes) -> bytes | None:
    """The identity of the process whose echo a message is; None for other messages."""
    return identity.removeprefix(_PREFIX) if identity.startswith(_PREFIX) else None
