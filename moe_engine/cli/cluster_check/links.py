"""Link tests between nodes: a listener that echoes blocks, and the client that measures round trips."""

from __future__ import annotations

import os
import socket
import socketserver
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moe_engine.cli.cluster_check.report import Finding
from moe_engine.processes.watched_thread import start_watched

BLOCK_BYTES = 1 << 16
"""Larger than any network's packet: detects paths that connect but drop full-sized packets (MTU problems)."""
TRY_SECONDS = 3.0
AT_ONCE = 64


class _Echo(socketserver.StreamRequestHandler):
    timeout = TRY_SECONDS

    def handle(self) -> None:
        self.wfile.write(self.rfile.read(BLOCK_BYTES))


class EchoListener(socketserver.ThreadingTCPServer):
    """Echoes one block per connection, at a free port of `ip`, until it is closed."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, ip: str) -> None:
        super().__init__((ip, 0), _Echo)
        self.address = f"{ip}:{self.server_address[1]}"
        start_watched("link echo", self.serve_forever, lambda message: None)  # other nodes report the broken links

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The connecting node reports the error."""

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()


def try_links(own_rank: int, nodes: Mapping[int, Finding]) -> Finding:
    """Tests the links from this node to all others, concurrently."""
    others = [node for rank, node in nodes.items() if rank != own_rank]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda node: _round_trip(node.address), others))
    broken = [
        f"link {socket.gethostname()} -> {node.cells['node']} at {node.address}: {reason}"
        for node, reason in zip(others, results)
        if isinstance(reason, str)
    ]
    slowest = max((result for result in results if isinstance(result, float)), default=None)
    return Finding({} if slowest is None else {"slowest link": f"{slowest * 1000:.1f} ms"}, broken)


def _round_trip(address: str) -> float | str:
    """Seconds, or the reason of a failure."""
    host, _, port = address.rpartition(":")
    block, began = os.urandom(BLOCK_BYTES), time.monotonic()
    try:
        with socket.create_connection((host, int(port)), TRY_SECONDS) as link, link.makefile("rb") as echo:
            link.sendall(block)
            if echo.read(BLOCK_BYTES) != block:
                return "another program or host has that address"
    except OSError as error:
        return reason_of(error)
    return time.monotonic() - began


def reason_of(error: OSError) -> str:
    """``connection refused``: without addresses and error numbers, which the caller adds."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TRY_SECONDS:g} s"
    return (error.strerror or str(error)).lower()
