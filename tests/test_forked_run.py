"""Test processes: each test runs once, reports reach the main process, and a dead process loses no test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FILES = {
    "test_a.py": """
import os, pytest, signal, time

def test_passes(tmp_path): pass
def test_output(): print("printed by a test"); assert False, "of a"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
@pytest.mark.parametrize("value", range(20))
def test_after(value): pass
""",
    "test_b.py": """
import pytest, time

attempts = []

@pytest.fixture(scope="module")
def made():
    yield "made"

@pytest.mark.timeout(2)
@pytest.mark.flaky(reruns=0)  # pytest-timeout does not limit a second attempt
def test_hangs(made):
    time.sleep(60)
def test_skipped(made): pytest.skip("for a reason")
def test_at_second_attempt(made):
    attempts.append(1)
    assert len(attempts) > 1
""",
    "test_c.py": "import os\ndef test_exit(): os._exit(7)\n",
    "test_d.py": "def test_last(): pass\n",
    "conftest.py": "from tests.forked_run import pytest_addoption, pytest_runtestloop\n",
    "pytest.ini": "[pytest]\n",
}


def run(folder: Path, *options: str) -> str:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    settings = ["-q", "-ra", "-p", "no:cacheprovider", "--timeout", "120", "--reruns", "1"]
    command = [sys.executable, "-m", "pytest", *settings]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    ).stdout  # fmt: skip


def test_two_processes(tmp_path: Path) -> None:
    shown = run(tmp_path, "--processes", "2")
    assert "4 failed, 23 passed, 1 skipped, 2 rerun" in shown
    assert "the test process died, by signal 9" in shown
    assert "the test process died, with exit code 7" in shown
    assert "printed by a test" in shown and "AssertionError: of a" in shown
    assert re.search(r"SKIPPED \[1\] test_b.py:\d+: for a reason", shown)
    assert re.search(r"FAILED test_b.py::test_hangs - Failed: Timeout", shown)


def test_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    assert "stopping after 1 failures" in run(tmp_path, "--processes", "2", "-x")
