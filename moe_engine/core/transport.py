"""ZeroMQ transport between an engine core and the frontend."""

from __future__ import annotations

import socket
from contextlib import suppress

import zmq

from moe_engine.core import messages
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect


class ZmqTransport:
    """Implements `core.loop.CoreTransport` over PULL and PUSH sockets. No message is dropped because of a slow reader;
    malformed frames are dropped with a warning.

    Args:
        to_core_address: bind address, ``ipc://PATH`` or ``tcp://IP:*``; the attribute `address` is the one to connect
            to.
        wake: another socket whose messages end a wait; read by its owner.
        keys: CURVE keys of sockets between nodes.
    """

    def __init__(
        self,
        to_core_address: str,
        from_core_address: str,
        wake: zmq.Socket[bytes] | None = None,
        keys: JobKeys | None = None,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._in = context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self.address = bind(self._in, to_core_address, keys)
        self._frames: FrameReader[messages.ToCore] = FrameReader("engine core", messages.decode_to_core)
        self._poller = zmq.Poller()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        for receiver in (self._in,) if wake is None else (self._in, wake):
            self._poller.register(receiver, zmq.POLLIN)
        self._out = context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.LINGER, 1000)
        connect(self._out, from_core_address, keys)

    def receive(self, timeout: float) -> list[messages.Message]:
        if timeout:
            ready = self._poller.poll(int(timeout * 1000))
            if not ready:
                return []
            if any(source == self._woken.fileno() for source, _ in ready):
                self._woken.recv(4096)
        return list(self._frames.drain(self._in))

    def send(self, message: messages.Message) -> None:
        self._out.send(messages.encode(message))

    def wake(self) -> None:
        """Ends a wait of `receive`, or the next one; no effect after `close`. Thread-safe."""
        with suppress(OSError):  # also BlockingIOError: the socket already holds unread wake-ups
            self._wake.send(b".")

    def close(self) -> None:
        self._woken.close()
        self._wake.close()
        self._in.close(0)
        self._out.close(1000)
