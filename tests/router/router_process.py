"""sglang-router as a process, in front of servers of a test."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from moe_engine.processes.addresses import free_port

START_SECONDS = 120

needs_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="needs sglang-router: pip install -e '.[router]'"
)


class RouterProcess:
    """Health checks every second; its output is in a file."""

    def __init__(self, folder: Path, urls: list[str], *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._num_workers = len(urls) or flags.count("--prefill") + flags.count("--decode")
        self._log = folder / f"router-{self.port}.log"
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port),
            "--worker-startup-check-interval", "1", "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1", "--health-success-threshold", "1",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), *flags,
        ]  # fmt: skip
        if urls:
            command += ["--worker-urls", *urls]
        self.prometheus = int(command[command.index("--prometheus-port") + 1])
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=180)

    def workers(self) -> list[dict]:
        with self.client() as client:
            return client.get("/workers").json()["workers"]

    def wait_healthy(self, count: int, seconds: float = START_SECONDS) -> None:
        deadline, found = time.monotonic() + seconds, -1
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.HTTPError, KeyError):
                found = sum(worker["is_healthy"] for worker in self.workers())
            if found == count:
                return
            time.sleep(0.1)
        raise AssertionError(f"{found} healthy servers instead of {count}:\n{self.log[-4000:]}")

    def __enter__(self) -> RouterProcess:
        try:
            self.wait_healthy(self._num_workers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
