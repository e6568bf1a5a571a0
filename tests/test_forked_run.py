"""Test processes: each test runs once, reports reach the main process, and a dead process loses no test."""

from __future__ import annotations

import json
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
    "test_c_once.py": """
import os

def test_exits_once(request):
    if not getattr(request.node, "deaths", 0):
        os._exit(9)
def test_before_the_interrupt(): pass
def test_interrupted(request):
    if not getattr(request.node, "deaths", 0):
        raise KeyboardInterrupt
""",
    "test_d.py": "def test_last(): pass\n",
    "test_e.py": """
import pytest, signal, time

@pytest.mark.timeout(1)
@pytest.mark.flaky(reruns=0)
def test_waits_in_a_call():  # as for a kernel: no signal ends it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)
def test_after_it(): pass
""",
    "conftest.py": """
from tests import forked_run
from tests.forked_run import pytest_addoption, pytest_configure, pytest_runtestloop
from tests.random_seed import pytest_terminal_summary
forked_run.LATE_S = 5.0
""",
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
    assert "5 failed, 27 passed, 1 skipped, 6 rerun" in shown
    assert "no end after 6 s" in shown
    assert "the test process died, by signal 9" in shown
    assert "the test process died, with exit code 7" in shown
    assert re.search(r"RERUN test_c_once.py::test_exits_once .*with exit code 9\n(.*\n)+?.* test_exits_once\n", shown)
    assert re.search(r"RERUN test_c_once.py::test_interrupted .*with exit code 1\n(.*\n)+?KeyboardInterrupt\n", shown)
    assert "printed by a test" in shown and "AssertionError: of a" in shown
    assert re.search(r"SKIPPED \[1\] test_b.py:\d+: for a reason", shown)
    assert re.search(r"FAILED test_b.py::test_hangs - Failed: Timeout", shown)


def test_a_run_that_is_cut_keeps_its_results_and_continues(tmp_path: Path) -> None:
    """The run ends at its time limit, with its reports; the next one leaves out what has passed."""
    options, file = ("--processes", "2", "--results", "results.jsonl"), tmp_path / "results.jsonl"

    def lines() -> list[dict[str, str]]:
        return [json.loads(line) for line in file.read_text().splitlines()]

    (tmp_path / "test_0.py").write_text("import time\ndef test_long(): time.sleep(100)\n")
    shown = run(tmp_path, *options, "--session-timeout", "12")
    assert re.search(r"12 s are over: \d+ tests did not end", shown)
    passed = [line["test"] for line in lines() if line["outcome"] == "passed"]
    (tmp_path / "test_0.py").write_text("def test_long(): pass\n")
    with file.open("a") as cut:
        cut.write('\n{"test": "test_0.py::te')
    shown = run(tmp_path, *options)
    assert f"{len(passed)} deselected" in shown or not passed
    file.write_text(file.read_text().replace('\n{"test": "test_0.py::te\n', "\n"))
    found = {line["test"]: line for line in lines()}
    assert len(found) == 34 and "AssertionError: of a" in found["test_a.py::test_output"]["why"]
    assert sum(line["outcome"] == "passed" for line in found.values()) == 28


def test_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    assert "stopping after 1 failures" in run(tmp_path, "--processes", "2", "-x")
