"""The processes of `moe-engine router`: starts, watches and ends them.

A server that dies is restarted after `RESTART_SECONDS`; a server that never became healthy ends the fleet, because its
next start would fail as well. The fleet also ends with the router.
"""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from moe_engine.cli.router.fleet import Fleet
from moe_engine.errors import ConfigError
from moe_engine.processes.child import describe_exit, end_with_parent
from moe_engine.processes.stop_signals import stop_signals
from moe_engine.processes.unblocked_stream import unblocked
from moe_engine.server.listen import bind

POLL_SECONDS = 0.2
RESTART_SECONDS = 1.0
STOP_SECONDS = 30.0
"""Time for running requests and the exit of a process after SIGTERM; then it is killed."""


class Worker:
    """One server on its port."""

    def __init__(self, port: int, flags: list[str]) -> None:
        self.port = port
        self._command = [sys.executable, "-m", "moe_engine.launch_server", "--port", str(port), *flags]
        self.was_healthy = False
        self._restart_at = 0.0
        self.start()

    def start(self) -> None:
        # a session of its own: Ctrl+C reaches this program only, which ends the router first
        self.process = subprocess.Popen(self._command, start_new_session=True, preexec_fn=end_with_parent)
        self.is_healthy = False

    def look(self) -> None:
        """Starts the server again if it died.

        Raises:
            ConfigError: the flags are wrong. ChildProcessError: it died before it was healthy.
        """
        code = self.process.poll()
        if code is None:
            if not self.is_healthy and _is_healthy(f"http://127.0.0.1:{self.port}"):
                self.is_healthy = self.was_healthy = True
                print(f"server on port {self.port} is ready", file=unblocked(sys.stdout), flush=True)
            return
        if code == 2 and not self.was_healthy:
            raise ConfigError(f"the server on port {self.port} refused its flags, see its message above")
        if not self.was_healthy:
            raise ChildProcessError(f"the server on port {self.port} {describe_exit(code)} before it was ready")
        now = time.monotonic()
        if not self._restart_at:
            self._restart_at = now + RESTART_SECONDS
            out = unblocked(sys.stderr)
            print(f"server on port {self.port} {describe_exit(code)}; it is started again", file=out, flush=True)
        elif now >= self._restart_at:
            self._restart_at = 0.0
            self.start()


def run(fleet: Fleet) -> int:
    """Runs until a stop signal or the router's end; the exit code. Raises ConfigError: wrong flags, a port in use."""
    workers: list[Worker] = []
    router: subprocess.Popen[bytes] | None = None
    bind(fleet.host, fleet.port).close()  # a port in use is an error now, not after the servers' start
    with _stop_signal() as stopped:
        try:
            for port, flags in zip(fleet.worker_ports, fleet.worker_flags):
                workers.append(Worker(port, flags))
            shown = False
            while not stopped():
                for worker in workers:
                    worker.look()
                if router is None and any(worker.was_healthy for worker in workers):
                    router = subprocess.Popen(fleet.router, start_new_session=True, preexec_fn=end_with_parent)
                if router is not None and (code := router.poll()) is not None:
                    raise ChildProcessError(f"the router {describe_exit(code)}")
                if not shown and all(worker.was_healthy for worker in workers) and _is_healthy(fleet.url):
                    shown = True
                    print(f"READY: {len(workers)} servers behind {fleet.url}", file=unblocked(sys.stdout), flush=True)
                time.sleep(POLL_SECONDS)
        except ChildProcessError as error:
            print(f"moe-engine router: {error}", file=sys.stderr)
            return 1
        finally:
            _end([router] if router is not None else [])  # first: it finishes its requests
            _end([worker.process for worker in workers])
    return 0


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2, context=_any_certificate(url)) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _any_certificate(url: str) -> ssl.SSLContext | None:
    """The router is a child of this program on this machine; its certificate names the address that clients use."""
    if not url.startswith("https:"):
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
