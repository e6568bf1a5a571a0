"""Runs the application: listens, says when it is ready, drains on SIGTERM."""

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
from moe_engine.errors import ConfigError
from moe_engine.server.http_protocol import Connection
from moe_engine.server.stop import StopSwitch

Hook = Callable[..., Awaitable[None] | None]

BACKLOG = 4096


class GracefulServer(uvicorn.Server):
    """uvicorn that tells when it listens, finishes what runs on the first signal and leaves at once on the second."""

    def __init__(self, config: uvicorn.Config, on_ready: Hook | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._ready_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None and not self.should_exit and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready_task = asyncio.create_task(_call(self._on_ready, host, port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but does not raise the signal again afterwards: a drained server has exited well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


async def _call(hook: Hook, *args: Any) -> None:
    result = hook(*args)
    if inspect.isawaitable(result):
        await result


async def serve(
    app: Any,
    sock: socket.socket,
    *,
    log_level: str = "info",
    log_level_http: str | None = None,
    on_ready: Hook | None = None,
    keep_alive_seconds: int = 60,
    drain_seconds: int | None = None,
    quiet_paths: tuple[str, ...] = (),
    stop: StopSwitch | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; then stops accepting, lets running requests end, and returns.

    Args:
        sock: from `bind`.
        on_ready: called with (host, port) once requests are answered; may be async.
        keep_alive_seconds: how long a connection without a request stays open (`--timeout-keep-alive`).
        drain_seconds: longest wait for running requests; None waits for all (`--timeout-graceful-shutdown`). A second
            signal ends the wait.
        quiet_paths: requests whose path begins with one of these are left out of the access log.
        stop: ends the server from inside.

    Raises:
        ConfigError: another process listens there since the socket was bound.
    """
    http_level = logging.getLevelNamesMapping().get((log_level_http or log_level).upper(), logging.INFO)
    config = uvicorn.Config(
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
    )
    try:
        sock.listen(BACKLOG)
    except OSError as exc:  # another server that was starting too was quicker
        host, port = sock.getsockname()[:2]
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {exc.strerror}") from None
    server = GracefulServer(config, on_ready)
    if stop is not None:
        stop.connect(lambda: server.handle_exit(signal.SIGTERM, None))
    await server.serve(sockets=[sock])
