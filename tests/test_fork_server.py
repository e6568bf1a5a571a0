"""Forked processes end, and are reaped, like interpreters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moe_engine.processes import child
from tests.fork_server import ForkedProcess, become
from tests.waiting import until

CORE = "moe_engine.cluster.core_main"
STARTS_PROCESSES = re.compile(
    r"^from moe_engine import .*\bEngine\b|^from tests\.e2e\.server_process import .*\bServerProcess\b"
    r"|^from tests\.models\.family_parity import .*\b(serve|run_family)\b",
    re.MULTILINE,
)
OF_INTERPRETERS = {"e2e/test_quickstart.py", "e2e/test_shutdown.py", "e2e/test_states.py"}
"""Files about the start of interpreters, their process trees, or an installed package that they find."""


def test_engines_of_tests_are_forked() -> None:
    """An interpreter for each process of an engine takes 2.5 CPU seconds."""
    folder = Path(__file__).parent
    sources = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("test_*.py")}
    starting = {name for name, source in sources.items() if STARTS_PROCESSES.search(source)}
    found = {name for name in starting if "forked_processes" not in sources[name]}
    assert len(starting) > 40 and found == OF_INTERPRETERS, "use the fixture forked_processes of tests/fork_server.py"


TESTS = """
import os, sys, time
from pathlib import Path
from moe_engine.processes import child
from tests.e2e.server_process import ServerProcess
from tests.fork_server import ENGINE_SERVER, Starter
interpreter = ServerProcess(Path(sys.argv[1]))
child.start_interpreter = Starter(ENGINE_SERVER.address, dict(os.environ), child.start_interpreter)
forked = ServerProcess(Path(sys.argv[1]))
print(interpreter.process.pid, forked.process.pid, flush=True)
time.sleep(600)
"""


def test_servers_end_with_killed_tests(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", TESTS, str(tmp_path)], stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        running = [psutil.Process(pid) for pid in pids]
        tests.kill()
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in running))


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


def test_a_forked_process_has_the_parent_that_an_interpreter_has() -> None:
    """A rank that hears nothing asks whether its parent gets processor time."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        become([os.dup(number) for number in range(3)], dict(os.environ), os.getcwd(), 4321)
        os.write(write, str(os.getppid()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 9) == b"4321"
    os.close(read)
    os.close(write)


def test_other_variables_of_imports_start_an_interpreter(
    forked_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    process = child.start_interpreter(CORE)
    assert not isinstance(process, ForkedProcess)
    process.kill()
    assert process.wait() == -9
