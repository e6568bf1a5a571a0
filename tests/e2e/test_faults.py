"""Killed and stopped processes, as seen by clients."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import make_checkpoint

LENGTH = 2000  # a second or more of a tiny model: all are running before the first one ends
LONG = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model"), seed=11, max_position_embeddings=8192)


def in_background(server: ServerProcess, count: int) -> tuple[list[threading.Thread], list[object]]:
    answers: list[object] = []

    def ask(i: int) -> None:
        with server.client() as client:
            answers.append(client.post("/generate", json={"text": f"hello {i}", "sampling_params": LONG}))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


def wait_running(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + 60
    while server.state()["num_running"] < count:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def test_killed_core_is_named_to_all_clients(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        threads, answers = in_background(server, 3)
        wait_running(server, 3)
        core = server.core
        core.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert [a.status_code for a in answers] == [503] * 3  # type: ignore[attr-defined]
        expected = f"engine core (pid {core.pid}) was killed by SIGKILL"
        assert all(expected in a.text for a in answers)  # type: ignore[attr-defined]
        assert server.process.wait(60) == 1  # so that a supervisor starts it anew
        assert expected in server.log


def test_sigterm_drains_and_exits_zero(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        threads, answers = in_background(server, 2)
        wait_running(server, 2)
        core = server.core
        assert server.terminate() == 0
        for thread in threads:
            thread.join(60)
        finish = [a.json()["meta_info"]["finish_reason"] for a in answers]  # type: ignore[attr-defined]
        assert finish == [{"type": "length", "length": LENGTH}] * 2
        assert not psutil.pid_exists(core.pid)


def test_core_exits_with_a_killed_front_end(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        core = server.core
        server.process.kill()
        core.wait(60)


def test_refused_configuration_is_one_message_and_exit_2(checkpoint: Path, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--model-path", str(checkpoint), "--page-size", "0")
    assert server.process.wait(60) == 2
    assert "--page-size" in server.log and "Traceback" not in server.log


@pytest.mark.parametrize("asked", [False, True], ids=["idle", "with a request that never arrives"])
def test_stopped_idle_core_is_detected(checkpoint: Path, tmp_path: Path, asked: bool) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint), "--watchdog-timeout", "1") as server:
        core = server.core
        core.suspend()
        threads, answers = in_background(server, 1) if asked else ([], [])
        errors: list[str] = []

        def is_sick() -> bool:
            try:
                response = client.get("/health")
            except httpx.TransportError:  # it reports the error for a second or two, then exits
                return server.process.poll() is not None
            errors.extend([response.text] if response.status_code == 503 else [])
            return bool(errors)

        with server.client() as client:
            wait_for(is_sick)
        assert server.process.wait(60) == 1
        assert "no heartbeat" in server.log and all("no heartbeat" in text for text in errors)
        for thread in threads:
            thread.join(60)
        assert all(a.status_code == 503 and "no heartbeat" in a.text for a in answers)  # type: ignore[attr-defined]
        assert not core.is_running()


def test_sigterm_while_starting(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = ServerProcess(tmp_path, "--model-path", str(checkpoint))
    try:
        wait_for(server.children)
        assert server.terminate(60) == 0
        assert "READY" not in server.log and "Traceback" not in server.log
        assert not list(tmp_path.glob("moe-engine-*"))
    finally:
        server.__exit__()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
