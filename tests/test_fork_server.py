"""Forked processes end, and are reaped, like interpreters."""

from __future__ import annotations

import pytest

from moe_engine.processes import child
from tests.fork_server import ForkedProcess
from tests.waiting import until

CORE = "moe_engine.cluster.core_main"


def test_a_killed_process(forked_processes: None) -> None:
    ends: list[tuple[str, int]] = []

    process = child.start_interpreter(CORE)
    assert isinstance(process, ForkedProcess) and process.poll() is None
    process.kill()
    assert process.wait() == process.poll() == -9
    watched = child.ChildProcess("core", CORE, None, lambda *how: ends.append(how))  # a specification without fields
    until(lambda: watched.returncode is not None)
    assert ends == [(f"core (pid {watched.pid}) exited with code 1", 1)] and watched.returncode == 1


def test_standard_error_is_that_of_the_test(forked_processes: None, capfd: pytest.CaptureFixture[str]) -> None:
    process = child.start_interpreter(CORE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait() == 1
    assert "EOFError" in capfd.readouterr().err


def test_other_variables_of_imports_start_an_interpreter(
    forked_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    process = child.start_interpreter(CORE)
    assert not isinstance(process, ForkedProcess)
    process.kill()
    assert process.wait() == -9
