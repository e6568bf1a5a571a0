"""`moe-engine router`: its command line, and the loss of a server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

from moe_engine.cli.router import processes
from moe_engine.cli.router.fleet import parse
from moe_engine.errors import ConfigError
from moe_engine.processes.addresses import free_port
from moe_engine.server.listen import bind
from tests.router.router_process import needs_router
from tests.waiting import children_with, is_running, until

PROGRAM = ("--router-program", "python -m sglang_router.launch_router")
TINY = "--context-length 256 --max-total-tokens 1024 --max-running-requests 4 --device cpu"


def test_flags_go_to_their_side() -> None:
    fleet = parse(
        [
            *PROGRAM,
            "--workers",
            "3",
            "--port",
            "8000",
            "--cache-threshold",
            "0.5",
            "--",
            *TINY.split(),
            "--api-key",
            "k",
        ]
    )
    assert fleet.worker_ports == [8001, 8002, 8003] and fleet.url == "http://localhost:8000"
    router = " ".join(fleet.router)
    assert "--policy cache_aware" in router and router.endswith("--cache-threshold 0.5 --api-key k")
    assert "http://127.0.0.1:8001 http://127.0.0.1:8002 http://127.0.0.1:8003" in router
    assert "--retry-max-retries 10 --disable-circuit-breaker" in router
    assert "--disable-circuit-breaker" not in parse([*PROGRAM, "--cb-failure-threshold", "9", "--"]).router
    assert all(flags[: len(TINY.split())] == TINY.split() for flags in fleet.worker_flags)
    assert all("--cpu-threads" in flags for flags in fleet.worker_flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 0 --", "--workers 0: at least 1"),
        ("-- --port 9", "--host and --port behind --"),
        ("-- --nnodes 2 --node-rank 0 --dist-init-addr a:1", "--nnodes"),
        ("--worker-port 29999 --", "--worker-port 29999"),
        ("-- --no-such-flag", "--no-such-flag"),
        ("-- --ssl-certfile f", "--ssl-certfile"),
        ("--policy best --", "--policy"),
        ("--worker-urls http://a:1 --", "--worker-urls"),
    ],
)
def test_wrong_flags_are_named(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse([*PROGRAM, *words.split()])


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[router\]'"):
        parse(["--"])


def test_hosts_of_the_router() -> None:
    for host, given, url in (
        ("::1", "[::1]", "http://[::1]:9"), ("[::1]", "[::1]", "http://[::1]:9"), ("::", "[::]", "http://localhost:9"),
        ("localhost", "127.0.0.1", "http://localhost:9"), ("10.1.2.3", "10.1.2.3", "http://10.1.2.3:9"),
    ):  # fmt: skip
        fleet = parse([*PROGRAM, "--host", host, "--port", "9", "--", *TINY.split()])
        assert fleet.router[fleet.router.index("--host") + 1] == given and fleet.url == url


def test_the_router_is_looked_for_over_https(tmp_path: Path) -> None:
    """Its certificate names another host, as that of a public address does."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=example.org"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Healthy)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = ["--port", str(server.server_port), f"--tls-cert-path={cert}", "--tls-key-path", key]
    fleet = parse([*PROGRAM, *words, "--", *TINY.split()])
    try:
        assert fleet.url == f"https://localhost:{server.server_port}" and key in fleet.router
        assert processes._is_healthy(fleet.url)
        assert not processes._is_healthy(fleet.url.replace("https", "http"))
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_in_use_is_refused_before_the_servers_start() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen there: Address already in use; choose another --port"):
            processes.run(parse([*PROGRAM, "--port", str(taken.getsockname()[1]), "--", *TINY.split()]))


@pytest.mark.skipif(sys.platform != "linux", reason="a program learns of its parent's end on Linux only")
def test_the_servers_end_with_a_killed_router(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_engine", "router", "--port", str(free_port()), "--workers", "2"]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen([*command, *PROGRAM, "--", *TINY.split()], stdout=log, stderr=log) as fleet,
    ):
        until(lambda: len(children_with(fleet.pid, "moe_engine.launch_server")) == 2)
        servers = children_with(fleet.pid, "moe_engine.launch_server")
        fleet.kill()
    until(lambda: not any(map(is_running, servers)), "servers run without their parent")


@needs_router
def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = [
        sys.executable, "-m", "moe_engine.cli.main", "router", "--port", str(port), "--workers", "2",
        "--health-check-interval-secs", "1", "--prometheus-port", str(free_port()), "--", *TINY.split(),
    ]  # fmt: skip
    with open(log, "wb") as file:
        fleet = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
    body = {"text": "The capital of Japan is", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    try:
        _wait(log, "READY: 2 servers", 120)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=180) as client:
            _wait_healthy(client)
            first = client.post("/generate", json=body).raise_for_status().json()
            servers = [c for c in psutil.Process(fleet.pid).children() if "launch_server" in " ".join(c.cmdline())]
            servers[0].kill()
            for _ in range(6):  # the router also tries the other server
                again = client.post("/generate", json=body).raise_for_status().json()
                assert again["output_ids"] == first["output_ids"]
            _wait(log, "was killed by SIGKILL; it is started again", 120)
            _wait_healthy(client)
        fleet.send_signal(signal.SIGTERM)
        assert fleet.wait(60) == 0
    finally:
        for process in psutil.Process(fleet.pid).children(recursive=True) if fleet.poll() is None else []:
            process.kill()
        fleet.kill()
        fleet.wait()


def _wait(log: Path, text: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def _wait_healthy(client: httpx.Client) -> None:
    """Waits for two healthy servers."""
    deadline = time.monotonic() + 120
    while sum(w["is_healthy"] for w in client.get("/workers").json()["workers"]) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
