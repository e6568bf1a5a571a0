"""Child processes where the system or the caller's folder does not allow them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from moe_engine.errors import EngineDeadError
from moe_engine.processes import child
from moe_engine.processes.child import ChildProcess
from moe_engine.server.bodies import Bodies
from tests.server.fake_engine import FakeClient
from tests.server.harness import post


def test_in_a_removed_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    process = child.start_interpreter("tests.server.waiting_child")
    try:
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
    finally:
        process.kill()
        process.wait()


def test_a_process_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(child.subprocess, "Popen", refused)
    with pytest.raises(EngineDeadError, match=f"engine core: {sys.executable} cannot be started: .*ulimit -u"):
        ChildProcess("engine core", "module", None, lambda how, code: None)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "x")])
def test_requests_that_need_a_process_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def refused(bodies: Bodies, name: str, body: bytes) -> None:
        raise error

    monkeypatch.setattr(Bodies, "_run_here", refused)
    answer = post(FakeClient(), "/generate", {"text": "x"})
    assert answer.status_code == 503 and "raise `ulimit -u`" in answer.text and answer.headers["retry-after"] == "1"
