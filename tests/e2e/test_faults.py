"""Killed and stopped cores, as seen by clients."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

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
