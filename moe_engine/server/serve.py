"""Runs the HTTP application: listens, calls the ready hook, drains on SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from moe_engine import logs
from moe_engine.processes.stop_signals import stop_signals
from moe_engine.server import access_log
from moe_engine.server.http_protocol import Connection
from moe_engine.server.listen import cannot_listen, listen
from moe_engine.server.stop import SecondSignal, StopSwitch
from moe_engine.server.tls import Certificate

Hook = Callable[..., Awaitable[None] | None]

BACKLOG = 4096


class GracefulServer(uvicorn.Server):
    """uvicorn server with a ready hook; the first signal drains running requests, the second exits immediately.

    With `second`, the handlers stay: a signal after the server's end is the second one too.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Hook | None, second: SecondSignal | None, on_stop: Hook | None = None
    ) -> None:
        super().__init__(config)
        self._on_ready, self._on_stop = on_ready, on_stop
        self._second = second
        self._ready_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None and not self.should_exit and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready_task = asyncio.create_task(_call(self._on_ready, host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop is not None:
            self._stop_task = asyncio.create_task(_call(self._on_stop))
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGHUP and self.should_exit:
            return  # both the kernel and a shell send it when a terminal closes
        if self.should_exit and self._second is not None:
            self._second.take(sig)
        self.stop()

    def stop(self) -> None:
        """Ends the server after its running requests; called again, without them."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    def disconnect_clients(self, error: Exception) -> None:
        """Closes all connections without the rest of their responses (`Connection.end`)."""
        for connection in list(self.server_state.connections):
            connection.end(error)  # type: ignore[union-attr]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but does not re-raise the signal afterwards: a drained server exits with code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in stop_signals()}
        try:
            yield
        finally:
            if self._second is None:
                for sig, handler in before.items():
                    signal.signal(sig, handler)


async def _call(hook: Hook, *args: Any) -> None:
    result = hook(*args)
    if inspect.isawaitable(result):
        await result


def http_config(
    app: Any,
    *,
    log_level: str = "info",
    log_level_http: str | None = None,
    keep_alive_seconds: int = 60,
    drain_seconds: int | None = None,
    quiet_paths: tuple[str, ...] = (),
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """
    Args:
        keep_alive_seconds: time for which a connection without a request stays open (`--timeout-keep-alive`).
        drain_seconds: max wait for running requests; None: no limit (`--timeout-graceful-shutdown`). A second
            signal, other than SIGHUP, ends the wait.
        quiet_paths: path prefixes excluded from the access log.
        certificate: for HTTPS.
    """
    http_level = logging.getLevelNamesMapping().get((log_level_http or log_level).upper(), logging.INFO)
    return uvicorn.Config(
        app,
        log_config=logs.uvicorn_config(log_level, log_level_http, quiet_paths),
        log_level=http_level,
        access_log=http_level <= logging.INFO,
        http=Connection,
        ws="none",
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=keep_alive_seconds,
        timeout_graceful_shutdown=drain_seconds,
        server_header=False,
        ssl_certfile=certificate.certfile if certificate is not None else None,
        ssl_keyfile=certificate.keyfile if certificate is not None else None,
        ssl_keyfile_password=certificate.password if certificate is not None else None,
    )


async def serve(
    config: uvicorn.Config,
    sock: socket.socket,
    *,
    on_ready: Hook | None = None,
    on_stop: Hook | None = None,
    stop: StopSwitch | None = None,
    second: SecondSignal | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then stops accepting, drains running requests, and returns.

    Args:
        config: from `http_config`.
        sock: from `bind`.
        on_ready: called with (host, port) once the server accepts requests; may be async.
        on_stop: called when the drain begins; may be async.
        stop: stops the server from inside the process.
        second: gets the signals after the first one, from then on until the process ends.

    Raises:
        ConfigError: another process has started to listen there since the socket was bound.
    """
    try:
        listen(sock, BACKLOG)
    except OSError as exc:  # another program listens already
        host, port = sock.getsockname()[:2]
        raise cannot_listen(host, port, exc) from None
    server = GracefulServer(config, on_ready, second, on_stop)
    if stop is not None:
        stop.connect(server.stop, server.disconnect_clients)
    try:
        await server.serve(sockets=[sock])
    finally:
        access_log.flush()
