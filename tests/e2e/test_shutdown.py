"""The end of a server whose launch is refused, that gets signals or loses its frontend; in separate interpreters."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.running_requests import ENDLESS, LENGTH, in_background, wait_running
from tests.e2e.server_process import ServerProcess
from tests.waiting import until

pytestmark = pytest.mark.drawn(2)


def test_sigterm_drains_and_exits_zero(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        core = server.core
        threads, answers = in_background(server, 1, batch=2)
        wait_running(server, 2)
        assert server.terminate() == 0
        for thread in threads:
            thread.join(180)
        finish = [output["meta_info"]["finish_reason"] for output in answers[0].json()]  # type: ignore[attr-defined]
        assert finish == [{"type": "length", "length": LENGTH}] * 2
        assert not psutil.pid_exists(core.pid)


@pytest.mark.parametrize("released", [False, True])
def test_sigterm_ends_a_pause_of_generation(checkpoint: Path, tmp_path: Path, released: bool) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint), "--enable-memory-saver") as server:
        threads, answers = in_background(server, 1, ENDLESS if released else LENGTH)
        wait_running(server, 1)
        with server.client() as client:
            client.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
            if released:
                client.post("/release_memory_occupation", json={}).raise_for_status()
        assert server.terminate() == 0
        threads[0].join(180)
        finish = answers[0].json()["meta_info"]["finish_reason"]  # type: ignore[attr-defined]
        assert finish["type"] == "abort" and "is shutting down" in finish["message"] if released else finish["length"]


def test_a_profiled_server_ends_without_a_list_of_leaks(checkpoint: Path, tmp_path: Path) -> None:
    """torch's profiler imports Triton, whose bindings print such a list at the end of an interpreter."""
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        with server.client() as client:
            assert client.post("/start_profile", json={"output_dir": str(tmp_path)}).status_code == 200
            client.post("/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 2}})
            assert client.post("/stop_profile").status_code == 200
        assert server.terminate() == 0
        assert "leaked" not in server.log


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("flags", [(), ("--tp", "2")], ids=["tp1", "tp2"])
def test_second_interrupt_ends_the_drain(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Exit code 0 means a drain, others an interruption."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ServerProcess(tmp_path, "--model-path", str(checkpoint), *flags) as server:
        processes = server.children()
        threads, _ = in_background(server, 2, ENDLESS)
        wait_running(server, 2)
        server.process.send_signal(signal.SIGINT)
        # A slow start logs "Waiting for ranks": a signal sent then would merge with the first one.
        until(lambda: "Waiting for connections to close" in server.log, "the drain does not begin")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(180) == 130, server.log
        assert len(processes) >= 1 + len(flags) // 2
        until(lambda: not any(map(lives, processes)), "a process is left")
        for thread in threads:
            thread.join(180)
        assert not list(tmp_path.glob("moe-engine-*"))
        assert flags or "Traceback" not in server.log  # a rank may still report that its leader is gone


def test_core_exits_with_a_killed_front_end(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        core = server.core
        server.process.kill()
        core.wait(180)


def test_refused_configuration_is_one_message_and_exit_2(checkpoint: Path, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--model-path", str(checkpoint), "--page-size", "0")
    assert server.process.wait(180) == 2
    assert "--page-size" in server.log and "Traceback" not in server.log


def test_sigterm_while_starting(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = ServerProcess(tmp_path, "--model-path", str(checkpoint))
    try:
        until(server.children)
        assert server.terminate() == 0
        assert "READY" not in server.log and "Traceback" not in server.log
        assert not list(tmp_path.glob("moe-engine-*"))
    finally:
        server.__exit__()
