"""sglang-router with the flags of `moe-engine router`, in front of servers without an engine: lost and returning
servers, and clients whose requests are wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from moe_engine.cli.router.fleet import parse
from moe_engine.processes.addresses import free_port
from tests.router.router_process import needs_router
from tests.waiting import until

pytestmark = needs_router
MODEL = {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "disaggregation_mode": "null"}


class Backend:
    """A server on a port, which answers requests with `status` and can be killed and started again."""

    def __init__(self, port: int) -> None:
        self.port, self.status, self.num_requests = port, 200, 0
        self.start()

    def start(self) -> None:
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, MODEL)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                backend.num_requests += 1
                self.answer(backend.status, {"text": "answer"})

            def answer(self, status: int, value: object) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: socket.socket, address: object) -> None:  # type: ignore[override]
                backend._connections.append(request)
                super().process_request(request, address)

        self._connections: list[socket.socket] = []
        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kill(self) -> None:
        """Closes the port and all connections."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def routed() -> Iterator[tuple[httpx.Client, list[Backend]]]:
    """A client of the router, and its servers."""
    first = free_port()
    words = ["--port", str(free_port()), "--worker-port", str(first), "--prometheus-port", str(free_port()), "--"]
    fleet = parse(words)
    backends = [Backend(port) for port in fleet.worker_ports]
    router = subprocess.Popen(fleet.router, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{fleet.port}", timeout=60) as client:
            wait_healthy(client, 2)
            yield client, backends
    finally:
        router.kill()
        router.wait()
        for backend in backends:
            backend.kill()


def wait_healthy(client: httpx.Client, count: int) -> None:
    def holds() -> bool:
        with suppress(httpx.HTTPError, KeyError):
            return sum(worker["is_healthy"] for worker in client.get("/workers").json()["workers"]) == count
        return False

    until(holds)


def ask(client: httpx.Client, count: int) -> dict[int, int]:
    """The number of answers by status."""
    bodies = ({"text": f"{i} {i * 7919} words"} for i in range(count))
    return dict(Counter(client.post("/generate", json=body).status_code for body in bodies))


def test_a_killed_server_loses_no_request_and_is_used_when_it_returns(
    routed: tuple[httpx.Client, list[Backend]],
) -> None:
    """Each of both servers in turn: also the one that has just returned takes over."""
    client, backends = routed
    for lost, other in (backends, backends[::-1]):
        assert ask(client, 10) == {200: 10}
        lost.kill()
        before = other.num_requests
        assert ask(client, 20) == {200: 20}
        assert other.num_requests == before + 20
        wait_healthy(client, 1)
        lost.start()
        wait_healthy(client, 2)


def test_wrong_requests_of_a_client_close_no_server(routed: tuple[httpx.Client, list[Backend]]) -> None:
    client, backends = routed
    for backend in backends:
        backend.status = 400
    assert ask(client, 30) == {400: 30}
    for backend in backends:
        backend.status = 200
    assert ask(client, 10) == {200: 10}
