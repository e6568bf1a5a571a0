"""An echo that needs no Python: it shows that a process runs while its interpreter is held by an import or a compiler.

A beat is sent by a Python thread, and loading a library can hold the interpreter for many seconds, so that during the
start missing beats tell little. Pings are answered here by libzmq alone: a process that does not answer is stopped, or
it or its link is gone.
"""

from __future__ import annotations

import contextlib
import threading

import zmq

_PREFIX = b"echo"


def start_echo(address: str, rank: int) -> None:
    """Answers pings of the leader at `address` from now on, for as long as the process runs."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, _PREFIX + str(rank).encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(b"")  # the leader learns whom it can ping

    def answer() -> None:
        with contextlib.suppress(zmq.ZMQError):  # the process ends
            zmq.proxy(socket, socket)

    threading.Thread(target=answer, name="echo", daemon=True).start()


def echoing_rank(identity: bytes) -> int | None:
    """The rank whose echo a message is; None for other messages."""
    number = identity.removeprefix(_PREFIX)
    return int(number) if identity.startswith(_PREFIX) and number.isdigit() else None
