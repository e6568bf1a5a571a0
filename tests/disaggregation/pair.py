"""A prefill and a decode server, and a router's requests: the same body to both."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from moe_engine.processes.addresses import free_port
from tests.e2e.server_process import ServerProcess

FLAGS = (
    *("--dtype", "float32", "--context-length", "512", "--chunked-prefill-size", "32", "--max-total-tokens", "2048"),
    *("--max-running-requests", "8", "--cpu-threads", "1", "--host", "127.0.0.1"),
)


class Pair:
    def __init__(self, folder: Path, *flags: str, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        mode = ("--disaggregation-bootstrap-port", str(self.port), "--disaggregation-mode")
        self.prefill = ServerProcess(folder, *FLAGS, *flags, *prefill, *mode, "prefill")
        self.decode = ServerProcess(folder, *FLAGS, *flags, *decode, *mode, "decode")
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        self._stack.enter_context(self.prefill)
        self._stack.enter_context(self.decode)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rooms(self, count: int | None = None) -> dict[str, Any]:
        if count is None:
            return {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": self.port,
                "bootstrap_room": random.getrandbits(63),
            }
        return {
            "bootstrap_host": ["127.0.0.1"] * count,
            "bootstrap_port": [self.port] * count,
            "bootstrap_room": [random.getrandbits(63) for _ in range(count)],
        }

    def post(self, path: str, body: dict[str, Any], rooms: dict[str, Any] | None = None) -> httpx.Response:
        """The decode server's answer."""
        whole = body | (self.rooms() if rooms is None else rooms)
        thread = threading.Thread(target=self._prefill, args=(path, whole))
        thread.start()
        try:
            return httpx.post(self.decode.url + path, json=whole, timeout=180)
        finally:
            thread.join()

    def _prefill(self, path: str, body: dict[str, Any]) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(self.prefill.url + path, json=body, timeout=180)
