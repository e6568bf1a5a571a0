"""A real server in its own process, on a free port of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from moe_engine.processes import child
from moe_engine.processes.addresses import free_port
from tests.fork_server import ForkedProcess, Starter, children
from tests.waiting import until

START_SECONDS = 180
"""Limits are for the busiest machine: nothing waits for them in a test that passes."""


def start_server(log_path: Path, *arguments: str) -> subprocess.Popen[bytes] | ForkedProcess:
    """Starts ``moe-engine serve``: forked with the fixture `forked_processes`, else as a new interpreter."""
    start = child.start_interpreter
    with open(log_path, "wb") as log:
        if isinstance(start, Starter):
            return start.start_program(["moe_engine.cli.main", "serve", *arguments], log)
        command = [sys.executable, "-m", "moe_engine.launch_server", *arguments]
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ, preexec_fn=child.end_with_parent
        )


def runs(process: psutil.Process, *modules: str) -> bool:
    """Whether the process runs one of the modules. A child that it forks has its command line until the exec."""
    try:
        command, parent = process.cmdline(), process.parent()
        named = any(module in part for part in command for module in modules)
        return named and (parent is None or parent.cmdline() != command)
    except psutil.Error:  # a short-lived process that probes the machine
        return False


class ServerProcess:
    """``python -m moe_engine.launch_server`` with its output in a file; its processes end with it.

    With the fixture `forked_processes` it is forked from a server that has imported its modules."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / f"server-{self.port}.log"
        self.process = start_server(self._log_path, "--port", str(self.port), *flags)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> ServerProcess:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"server ended with {self.process.returncode}:\n{self.log}")
            if "READY" in self.log:
                return self
            time.sleep(0.05)
        self.__exit__()
        raise AssertionError(f"server not ready in {START_SECONDS} s:\n{self.log}")

    def __exit__(self, *_: object) -> None:
        for process in self.children():
            with suppress(psutil.NoSuchProcess):  # some processes end with their parent
                process.kill()
        self.process.kill()
        self.process.wait()

    def children(self) -> list[psutil.Process]:
        try:
            return children(psutil.Process(self.process.pid), recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def core(self) -> psutil.Process:
        (core,) = [child for child in self.children() if runs(child, "core_main")]
        return core

    def terminate(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_SECONDS)

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=START_SECONDS, **options)  # type: ignore[arg-type]

    def state(self) -> dict:
        with self.client() as client:
            return client.get("/server_info").json()["internal_states"][0]

    def wait_idle(self) -> dict:
        """Waits until the scheduler is idle; returns its state."""
        return self._wait_for(lambda state: not state["num_running"] and not state["num_waiting"])

    def wait_free(self) -> dict:
        """Waits until the scheduler is idle and no request holds KV: on servers with transfers a request may end before
        the other side's last report frees its KV."""
        return self._wait_for(lambda state: not any(state[name] for name in ("num_running", "num_waiting", "num_used")))

    def _wait_for(self, condition: Callable[[dict], bool]) -> dict:
        states: list[dict] = []

        def holds() -> bool:
            states.append(self.state())
            return condition(states[-1])

        try:
            until(holds)
        except AssertionError:
            raise AssertionError(f"not idle: {states[-1]}") from None
        return states[-1]
