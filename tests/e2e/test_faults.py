"""Killed and stopped cores, and a model folder that disappears, as seen by clients."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import httpx
import pytest

from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.server.bodies import PROCESS_BYTES
from tests.e2e.running_requests import ENDLESS, in_background, wait_running
from tests.e2e.server_process import ServerProcess
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_killed_core_is_named_to_all_clients(checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint)) as server:
        core = server.core
        threads, answers = in_background(server, 3, ENDLESS)
        wait_running(server, 3)
        core.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(180)
            assert not thread.is_alive()
        assert [a.status_code for a in answers] == [503] * 3  # type: ignore[attr-defined]
        expected = f"engine core (pid {core.pid}) was killed by SIGKILL"
        assert all(expected in a.text for a in answers)  # type: ignore[attr-defined]
        assert server.process.wait(180) == 1  # so that a supervisor restarts it
        assert expected in server.log


@pytest.mark.parametrize("asked", [False, True], ids=["idle", "with a request that never arrives"])
def test_stopped_idle_core_is_detected(checkpoint: Path, tmp_path: Path, asked: bool) -> None:
    with ServerProcess(tmp_path, "--model-path", str(checkpoint), "--watchdog-timeout", "3") as server:
        core = server.core
        core.suspend()
        threads, answers = in_background(server, 1) if asked else ([], [])
        errors: list[str] = []

        def is_sick() -> bool:
            try:
                response = client.get("/health")
            except httpx.TransportError:  # the server reports the error for a second or two, then exits
                return server.process.poll() is not None
            errors.extend([response.text] if response.status_code == 503 else [])
            return bool(errors)

        with server.client() as client:
            until(is_sick)
        assert server.process.wait(180) == 1
        assert "no heartbeat" in server.log and all("no heartbeat" in text for text in errors)
        for thread in threads:
            thread.join(180)
        assert all(a.status_code == 503 and "no heartbeat" in a.text for a in answers)  # type: ignore[attr-defined]
        until(lambda: not core.is_running())


def test_a_deleted_model_folder(tmp_path: Path) -> None:
    """Processes for large bodies and grammars start later, and the core opens its grammars at the first one."""
    folder = shutil.copytree(CHECKPOINT_DIR, tmp_path / "model")
    with ServerProcess(tmp_path, "--model-path", str(folder)) as server, server.client() as client:
        shutil.rmtree(folder)
        answer = client.post("/generate", json={"text": "x", "sampling_params": {"regex": "[a-c]{3}"}})
        assert answer.status_code == 200 and set(answer.json()["text"]) <= set("abc"), answer.text
        large = client.post("/tokenize", json={"prompt": "x" * PROCESS_BYTES})
        assert large.status_code == 200 and large.json()["count"] > 1, large.text
