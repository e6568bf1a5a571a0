"""Two hosts with a cable between them on this machine: kernel namespaces, joined by a bridge in a third namespace."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.ranks.drill import PATIENCE, until

PROGRAMS = ("ip", "unshare", "nsenter")
ADDRESSES = ("10.77.1.1", "10.77.1.2")


def why_not() -> str | None:
    """The reason why this machine does not support namespaces, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.getuid() or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "hosts of one's own need root and network namespaces"
    return None


@dataclass(frozen=True)
class Parted:
    """Result of two hosts whose cable was pulled at `struck`, in seconds of time.monotonic.

    `flag`: content at that time; `report`: of the front on host 0; `log`: of both.
    """

    struck: float
    flag: str
    report: Any
    log: str


class TwoHosts:
    """Hosts 0 and 1 reach only each other, at `ADDRESSES`; files and processes are the machine's."""

    def __init__(self, holders: list[subprocess.Popen[bytes]]) -> None:
        self._holders = holders
        *hosts, switch = (holder.pid for holder in holders)
        self._run(switch, "ip", "link", "add", "br0", "type", "bridge")
        self._run(switch, "ip", "link", "set", "br0", "up")
        for number, pid in enumerate(hosts):
            end = f"v{number}"
            self._run(switch, "ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            self._run(switch, "ip", "link", "set", end, "master", "br0", "up")
            self._run(pid, "ip", "addr", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                self._run(pid, "ip", "link", "set", name, "up")

    def start(self, host: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        full = ["nsenter", "-t", str(self._holders[host].pid), "-n", *command]
        return subprocess.Popen(full, text=True, **options)

    def part(self, front: Sequence[str], node: Sequence[str], flag: Path) -> Parted:
        """Runs two modules as programs, and pulls the cable when one has written `flag`. The front on host 0 prints a
        report as JSON; the node on host 1 must end with 1. No process remains."""
        log = flag.with_suffix(".log")
        with open(log, "w") as writing:
            running = [
                self.start(0, sys.executable, "-m", *front, stdout=subprocess.PIPE, stderr=writing),
                self.start(1, sys.executable, "-m", *node, stdout=writing, stderr=writing),
            ]
        try:
            asyncio.run(until(lambda: flag.exists() and flag.read_text() != "", PATIENCE))
            struck = time.monotonic()
            self._pull_cable()
            report = json.loads(running[0].communicate(timeout=PATIENCE)[0])
            assert running[1].wait(PATIENCE) == 1
        finally:
            print(log.read_text())
            for process in running:
                process.kill()
                process.wait()
        return Parted(struck, flag.read_text(), report, log.read_text())

    def _pull_cable(self) -> None:
        """Pulls host 1's cable at the switch: neither host is notified."""
        self._run(self._holders[2].pid, "ip", "link", "set", "v1", "down")

    def _run(self, pid: int, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True, timeout=60)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    holders = []
    try:
        for _ in range(3):  # each process reports that it is in its namespace
            hold = ["unshare", "--net", "sh", "-c", "echo there; exec sleep 300"]
            holder = subprocess.Popen(hold, stdout=subprocess.PIPE)
            holders.append(holder)
            assert holder.stdout is not None and holder.stdout.readline()
        yield TwoHosts(holders)
    finally:
        for holder in holders:  # a namespace ends with its last process
            holder.kill()
            holder.wait()
