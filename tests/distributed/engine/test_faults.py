"""Ranks of a real server are killed or stopped: the named rank, the delay, results of requests, leftover processes."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.distributed.ranks.drill import ended
from tests.e2e.server_process import ServerProcess, runs

pytestmark = pytest.mark.usefixtures("forked_processes")

GROUPS = ("--tp", "2", "--attn-dp-size", "2")
REPLICAS = ("--dp", "2", "--watchdog-timeout", "4")
PATIENCE = 120.0
"""Time limit in seconds, far above the real durations, which are printed."""
LONG, LONG_PROMPT = 500, 1500


@dataclass
class Ask:
    """A request and its result: HTTP status, received tokens, reason of the end. With `again` it is sent again after
    its last token, so that a request runs at the kill even if this process is slow."""

    rank: int
    length: int
    max_new_tokens: int
    stream: bool = True
    again: bool = False
    status: int = 0
    tokens: int = 0
    fate: str = ""
    thread: threading.Thread = field(init=False)

    def send(self, server: ServerProcess) -> Ask:
        self.thread = threading.Thread(target=self._run, args=(server,), daemon=True)
        self.thread.start()
        return self

    def _run(self, server: ServerProcess) -> None:
        self._ask(server)
        while self.again and self.fate == "length":
            try:
                self._ask(server)
            except httpx.ConnectError:  # the server has exited since the last answer, which was complete
                self.fate = "length"
                return

    def _ask(self, server: ServerProcess) -> None:
        self.tokens, self.fate = 0, ""
        body = {
            "input_ids": [5 + (7 * self.rank + 3 * i + self.length) % 200 for i in range(self.length)],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": self.max_new_tokens, "ignore_eos": True},
            "stream": self.stream,
            "routed_dp_rank": self.rank,
        }
        with server.client() as client, client.stream("POST", "/generate", json=body) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if not line.strip() or line.endswith("[DONE]"):
                    continue
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    self.fate = data["error"]["message"]
                    continue
                self.tokens = data["meta_info"]["completion_tokens"]
                if (finish := data["meta_info"]["finish_reason"]) is not None:
                    self.fate = finish.get("message") or finish["type"]

    def fate_within(self, seconds: float) -> str:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"a request of rank {self.rank} did not end"
        return self.fate


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes of all ranks in the order of their start."""
    ranks = [child for child in server.children() if runs(child, "core_main", "rank_main")]
    return sorted(ranks, key=lambda process: process.create_time())


def until(condition: Callable[[], Any], server: ServerProcess, seconds: float = PATIENCE) -> float:
    """Returns the seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, server.log
        time.sleep(0.01)
    return time.monotonic() - began


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[ServerProcess, list[psutil.Process]]]:
    with ServerProcess(folder, *flags, "--cpu-threads", "1", "--context-length", "2048") as server:
        ranks = ranks_of(server)
        assert len(ranks) == 2
        yield server, ranks


def decoding(server: ServerProcess, again: tuple[int, ...] = (0, 1)) -> list[Ask]:
    """Two streamed requests of each rank, all with some tokens, those of rank 1 just now; and one more, not streamed.
    Requests of the ranks `again` run until the kill."""
    asked: list[Ask] = []
    for rank in (0, 1):
        more = [Ask(rank, 4 + i, LONG, stream=rank == 0 or i < 2, again=rank in again) for i in range(2 + rank)]
        asked += [ask.send(server) for ask in more]
        until(lambda so_far=tuple(asked): all(ask.tokens > 3 for ask in so_far if ask.stream), server)
    return asked


def prefilling(server: ServerProcess, ranks: tuple[int, ...]) -> list[Ask]:
    """Requests with slow prompts, without a token so far."""
    asked = [Ask(rank, LONG_PROMPT - i, 500).send(server) for rank in ranks for i in range(24)]

    def works() -> bool:
        with server.client() as client:
            loads = client.get("/v1/loads").json()["loads"]
        return all(loads[rank]["num_total_reqs"] >= 12 for rank in ranks)

    until(works, server)
    return asked


def strike(victim: psutil.Process, how: signal.Signals, asked: list[Ask], what: str) -> list[Ask]:
    """Waits until all requests have ended. Unless an answer was complete before the kill, all get the same message,
    which names the lost rank, as a 503 or after the received tokens; returns these requests."""
    began = time.monotonic()
    victim.send_signal(how)
    fates = [ask.fate_within(PATIENCE) for ask in asked]
    seconds = time.monotonic() - began
    before = [ask.tokens for ask in asked]
    print(f"\n{how.name} {what}, at {min(before)} to {max(before)} tokens: all requests ended within {seconds:.2f} s")
    seen = [f"{ask.status} {ask.fate}" for ask in asked]
    for fate, count in sorted({fate: seen.count(fate) for fate in seen}.items()):
        print(f"  {count} x {fate}")
    hit = [ask for ask, fate in zip(asked, fates) if fate != "length"]
    assert len({ask.fate for ask in hit}) == 1 and f"(pid {victim.pid})" in hit[0].fate
    assert all(ask.status == (200 if ask.tokens else 503) for ask in hit)
    return hit


def check_gone(server: ServerProcess, ranks: list[psutil.Process]) -> None:
    """The server has exited with 1, so that a supervisor restarts it, and has left no process."""
    assert server.process.wait(PATIENCE) == 1
    seconds = until(lambda: all(ended(rank) for rank in ranks), server)
    print(f"  the server exited with 1; no process was left {seconds:.2f} s later")


@pytest.mark.drawn(1)
def test_group_killed_in_decode_stops_all(tmp_path: Path) -> None:
    with serving(tmp_path, *GROUPS) as (server, ranks):
        asked = decoding(server)
        hit = strike(ranks[1], signal.SIGKILL, asked, "of DP1 TP1 in decode")
        assert all("DP1 TP1" in ask.fate and "killed by SIGKILL" in ask.fate for ask in hit)
        check_gone(server, ranks)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_group_stopped_in_prefill_stops_all(rank: int, tmp_path: Path) -> None:
    """Rank 0 is stopped while the other rank reports the failure of both."""
    with serving(tmp_path, *GROUPS) as (server, ranks):
        asked = prefilling(server, (0, 1))
        hit = strike(ranks[rank], signal.SIGSTOP, asked, f"of rank {rank} in prefill")
        assert all(f"DP{rank} TP{rank}" in ask.fate and "silent for" in ask.fate for ask in hit)
        check_gone(server, ranks)


@pytest.mark.drawn(1)
def test_replicas_continue_without_a_lost_one(tmp_path: Path) -> None:
    with serving(tmp_path, *REPLICAS) as (server, ranks):
        asked = decoding(server, again=(1,))
        hit = strike(ranks[1], signal.SIGSTOP, asked[2:], "of replica DP1 in decode")
        assert all("engine core DP1" in ask.fate for ask in hit)
        assert [ask.fate_within(PATIENCE) for ask in asked[:2]] == ["length"] * 2
        assert [ask.tokens for ask in asked[:2]] == [LONG] * 2
        print(f"  its 3 requests failed, the 2 of DP0 brought all their {LONG} tokens")
        with server.client() as client:
            assert client.get("/health").status_code == 200
            body: Any = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 3}}
            assert [client.post("/generate", json=body).status_code for _ in range(3)] == [200] * 3
            refused = client.post("/generate", json=body | {"routed_dp_rank": 1})
            assert refused.status_code == 503 and "engine core DP1" in refused.text
        last = prefilling(server, (0,))
        hit = strike(ranks[0], signal.SIGKILL, last, "of the last replica in prefill")
        assert all("engine core DP0" in ask.fate and "SIGKILL" in ask.fate for ask in hit)
        check_gone(server, ranks)


@pytest.mark.parametrize(
    ("flags", "how", "words"),
    [
        (GROUPS, signal.SIGKILL, r"DP1 TP1 \(pid {pid}\) was killed by SIGKILL"),
        (REPLICAS, signal.SIGSTOP, r"engine core DP1 \(pid {pid}\) has been stopped by a signal for"),
    ],
)
def test_a_rank_lost_while_starting(tmp_path: Path, flags: tuple[str, ...], how: signal.Signals, words: str) -> None:
    """Other losses inside a group: tests/distributed/ranks/test_rank_group.py."""
    starts = (ServerProcess(tmp_path, *flags, "--cpu-threads", "1") for _ in range(5))
    assert any(named_while_starting(server, how, words) for server in starts)


def named_while_starting(server: ServerProcess, how: signal.Signals, words: str) -> bool:
    """False if the server was ready before the rank was lost."""
    try:
        looks: list[list[psutil.Process]] = [[]]

        def twice_the_same_two() -> bool:
            looks.append(ranks_of(server))
            return looks[-1] == looks[-2] and len(looks[-1]) == 2

        until(twice_the_same_two, server)
        ranks = looks[-1]
        until(lambda: "torch_cpu" in Path(f"/proc/{ranks[1].pid}/maps").read_text(), server)  # the rank has sent Hello
        ranks[1].send_signal(how)
        expected = words.format(pid=ranks[1].pid)
        seconds = until(lambda: "READY" in server.log or re.search(expected, server.log), server)
        if "READY" in server.log:
            return False
        print(f"\n{how.name} while starting, named after {seconds:.2f} s: {re.findall(expected + '.*', server.log)[0]}")
        assert server.process.wait(PATIENCE) == 1 and "READY" not in server.log
        until(lambda: all(ended(rank) for rank in ranks), server)
        return True
    finally:
        server.__exit__()
