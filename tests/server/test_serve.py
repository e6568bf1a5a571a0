"""The server process: ready hook, draining on SIGTERM, exit on the second signal, a port in use."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
import uvicorn

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.planning.prepare import prepare
from moe_engine.server import launch, stop
from moe_engine.server.listen import bind, listen
from moe_engine.server.serve import GracefulServer, http_config, serve
from tests.server.fake_engine import POOLING, FakeClient
from tests.server.harness import make_app, post
from tests.waiting import until

PROGRAM = """
import asyncio, sys
from tests.server.fake_engine import FakeClient
from tests.server.harness import make_app
from moe_engine.server.listen import bind
from moe_engine.server.serve import http_config, serve
client = FakeClient()
client.delay = float(sys.argv[1])
drain = float(sys.argv[2]) if len(sys.argv) > 2 else None
config = http_config(make_app(client), log_level="warning", drain_seconds=drain)
asyncio.run(serve(config, bind("127.0.0.1", 0),
                  on_ready=lambda host, port: print("READY", port, flush=True)))
print("BYE", len(client.running), flush=True)
"""


@pytest.fixture
def start():
    started = []

    def run(*arguments, hangup=signal.SIG_DFL):
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        before = signal.signal(signal.SIGHUP, hangup)  # inherited; a suite started by nohup ignores it
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGHUP, before)
        started.append(process)
        assert process.stdout is not None
        word, port = process.stdout.readline().split()
        assert word == "READY"
        return process, f"http://127.0.0.1:{port}"

    yield run
    for process in started:
        process.kill()
        process.wait()


def ask_in_background(address):
    answers: list[Any] = []

    def ask():
        try:
            answers.append(httpx.post(address + "/generate", json={"text": "x"}, timeout=60))
        except httpx.HTTPError as exc:
            answers.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: answers or httpx.get(address + "/get_load", timeout=60).json()[0]["num_reqs"])
    return thread, answers


def refuses(address):
    try:
        return httpx.get(address + "/health", timeout=1).status_code >= 500
    except httpx.TransportError:
        return True


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=["TERM", "HUP twice"])
def test_a_stop_signal_drains(start, numbers):
    process, address = start(0.2)
    assert httpx.get(address + "/health").status_code == 200
    thread, answers = ask_in_background(address)
    for number in numbers:  # both the kernel and a shell send SIGHUP when a terminal closes
        process.send_signal(number)
        until(lambda: refuses(address))
    thread.join(60)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "stop"
    assert process.wait(60) == 0
    assert process.stdout.read() == "BYE 0\n"


def test_nohup(start):
    """A program that inherits an ignored SIGHUP keeps it so."""
    process, address = start(0, hangup=signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    for _ in range(3):
        assert httpx.post(address + "/generate", json={"text": "x"}, timeout=60).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_drain_has_a_limit(start):
    """--timeout-graceful-shutdown: a request of 45 s does not delay the exit."""
    process, address = start(5, 1)
    thread, answers = ask_in_background(address)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    thread.join(60)
    assert isinstance(answers[0], httpx.HTTPError) or answers[0].status_code >= 500
    assert process.stdout.read() == "BYE 0\n"


def test_second_signal_forces(start):
    process, address = start(5)
    thread, answers = ask_in_background(address)
    process.send_signal(signal.SIGTERM)
    until(lambda: refuses(address))
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    thread.join(60)
    assert isinstance(answers[0], httpx.HTTPError) or answers[0].status_code >= 500


def test_signals_behind_the_first(monkeypatch):
    """The second kills the engine's processes at once, in the handler; a third ends this process."""
    exits, killed = [], []
    monkeypatch.setattr(stop.os, "_exit", exits.append)
    for numbers, code in (((signal.SIGINT,) * 3, 130), ((signal.SIGTERM, signal.SIGTERM, signal.SIGINT), 1)):
        killed.clear()
        second = stop.SecondSignal(lambda: killed.append(True))
        server = GracefulServer(uvicorn.Config(None), None, second)
        server.handle_exit(numbers[0], None)
        assert server.should_exit and not server.force_exit and not killed and not second.has_come
        server.handle_exit(numbers[1], None)
        assert server.force_exit and killed and second.has_come and not exits
        server.handle_exit(numbers[2], None)
        assert exits.pop() == code
    dead = GracefulServer(uvicorn.Config(None), None, stop.SecondSignal(lambda: killed.append(True)))
    killed.clear()
    for _ in range(3):  # the engine has died: no signal
        dead.stop()
    assert dead.force_exit and not killed and not exits


@pytest.mark.parametrize("listens", [False, True])
def test_taken_port(listens):
    """Also of a server that starts, and on a port with connections of an earlier one that have not expired."""
    port = 0
    for _ in range(3):
        sock = bind("127.0.0.1", port)
        port = sock.getsockname()[1]
        if listens:
            listen(sock, 1)
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: cannot listen"):
            bind("127.0.0.1", port)
        if not listens:
            listen(sock, 1)
        client = socket.create_connection(("127.0.0.1", port))
        sock.accept()[0].close()  # this end waits for late packets
        assert client.recv(1) == b""
        client.close()
        sock.close()


def test_flags_reach_the_http_server(monkeypatch):
    given: dict[str, Any] = {}

    async def serve_http(config, sock, **hooks):
        pass

    fake = FakeClient()
    fake.cause_of_death = lambda: None
    monkeypatch.setattr("moe_engine.frontend.client.CoreClient", lambda *_, **__: fake)
    monkeypatch.setattr("moe_engine.server.serve.serve", serve_http)
    monkeypatch.setattr("moe_engine.server.serve.http_config", lambda app, **options: given.update(options))
    flags = ["--timeout-keep-alive", "7", "--timeout-graceful-shutdown", "3"]
    flags += ["--uvicorn-access-log-exclude-prefixes", "/health", "/metrics"]
    config = prepare(EngineArgs.from_cli(flags))
    settings = launch.server_settings(config, 8123)
    assert asyncio.run(launch._serve(config, [], fake.info, fake.tokenizer, settings, None, 0.0)) == 0
    assert (given["keep_alive_seconds"], given["drain_seconds"]) == (7, 3)
    assert given["quiet_paths"] == ("/health", "/metrics")
    assert settings.server_args["port"] == 8123  # the bound port, not that of the flags


def test_server_info_shows_the_bound_port(monkeypatch):
    ports: dict[str, int] = {}

    async def served(config, cores, info, tokenizer, settings, sock, began):
        ports.update(shown=settings.server_args["port"], bound=sock.getsockname()[1])
        return 0

    monkeypatch.setattr(launch, "start_cores", lambda config: [])
    monkeypatch.setattr(launch, "wait_ready", lambda cores: FakeClient().info)
    monkeypatch.setattr(launch, "_serve", served)
    assert launch.serve(EngineArgs.from_kwargs(port=0)) == 0
    assert ports["shown"] == ports["bound"] > 0


HALF = b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"text"'
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
LONG_NAME = "x" * 50_000_000
"""A response with it is larger than what sockets hold."""


@pytest.mark.parametrize("sent", [HALF, MODELS], ids=["sends its request", "reads nothing"])
def test_a_slow_client_does_not_hold_up_the_exit_of_a_dead_engine(sent, capfd):
    """A supervisor waits for the exit, to start the server again."""

    async def main(sock):
        ready, switch = asyncio.Event(), stop.StopSwitch()
        app = make_app(FakeClient(served_model_name=LONG_NAME))
        serving = serve(http_config(app, log_level="warning"), sock, stop=switch, on_ready=lambda *_: ready.set())
        served = asyncio.create_task(serving)
        await ready.wait()
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2], limit=1024)
        writer.write(sent)
        if sent is MODELS:
            assert await reader.readuntil(b"\r\n\r\n")
        switch.stop_after(0.2, 0.3, EngineDeadError("engine core (pid 7) was killed by SIGKILL"))
        await asyncio.wait_for(served, 60)
        if sent is HALF:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"not running: engine core (pid 7) was killed" in answer
        writer.close()

    asyncio.run(main(bind("127.0.0.1", 0)))
    assert not capfd.readouterr().err


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("kind", ["chat", "text", "vectors"])
def test_the_example_behind_the_ready_line_is_answered(kind: str, ids: bool, monkeypatch: pytest.MonkeyPatch):
    client = FakeClient(pooling=POOLING) if kind == "vectors" else FakeClient()
    if kind == "text":
        monkeypatch.setattr(client.tokenizer, "chat_template", None)
    path, body = launch.example_request(make_app(client, skip_tokenizer_init=ids).state.server)
    assert post(client, path, body, skip_tokenizer_init=ids).status_code == 200
