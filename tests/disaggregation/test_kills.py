"""Real servers: a process killed or stopped, or the connection cut, at every phase of a transfer.

Every request gets its answer, or one error, within its deadline. Afterwards no resources are in use on the remaining
servers, and the next request is transferred again if both servers run.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.disaggregation.faulty import Cable
from tests.disaggregation.pair import Pair
from tests.disaggregation.test_ranks import DP
from tests.e2e.server_process import ServerProcess, runs
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.exhaustive, pytest.mark.timeout(300)]

PHASES = ("bootstrap", "reserve", "transfer", "commit", "decode")
TOKENS = 400
NEW = 24
MANY = 100
"""Tokens of an answer with a fault at its first one: on a busy machine the fault comes later, and before the end."""
DEADLINE = 60.0
HELD = ("num_running", "num_waiting", "num_used")


def body(ids: list[int], new: int = NEW) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}}


def prompt() -> list[int]:
    return [random.randrange(20, 1000) for _ in range(TOKENS)]


class Trial:
    """One request to both servers, over a cable, with a fault when its transfer reaches a phase."""

    def __init__(self, pair: Pair, cable: Cable, total: int) -> None:
        self.pair, self.cable, self.total = pair, cable, total
        self.prefill: httpx.Response | Exception | None = None
        self.lines: list[str] = []
        self.error: Exception | None = None

    def run(self, phase: str, fault: Callable[[], None]) -> None:
        ids, rooms = prompt(), self.pair.rooms() | {"bootstrap_port": self.cable.port}
        self.ids, fired = ids, threading.Event()

        def once() -> None:
            if not fired.is_set():
                fired.set()
                fault()

        begin = self.cable.num_bytes
        limits = {"bootstrap": 1, "reserve": 400, "transfer": self.total // 2, "commit": self.total - 200}
        if phase in limits:
            self.cable.on_bytes = lambda count: once() if count - begin >= limits[phase] else None
        decode = threading.Thread(target=self._decode, args=(ids, rooms, once if phase == "decode" else None))
        prefill = threading.Thread(target=self._prefill, args=(ids, rooms))
        decode.start()
        if phase == "bootstrap":
            time.sleep(0.2)  # the decode server's request arrives first
        prefill.start()
        decode.join(DEADLINE)
        prefill.join(DEADLINE)
        assert not decode.is_alive() and not prefill.is_alive(), "a request has no end"
        if phase in limits:
            self.cable.on_bytes = lambda count: None
        self.fired = fired.is_set()

    def _prefill(self, ids: list[int], rooms: dict[str, Any]) -> None:
        try:
            self.prefill = httpx.post(self.pair.prefill.url + "/generate", json=body(ids) | rooms, timeout=DEADLINE)
        except httpx.HTTPError as error:
            self.prefill = error

    def _decode(self, ids: list[int], rooms: dict[str, Any], at_first: Callable[[], None] | None) -> None:
        asked = body(ids, MANY if at_first else NEW) | rooms | {"stream": True}
        try:
            with httpx.stream("POST", self.pair.decode.url + "/generate", json=asked, timeout=DEADLINE) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if at_first is not None:
                        at_first()
        except httpx.HTTPError as error:
            self.error = error

    @property
    def is_answered(self) -> bool:
        return self.error is None and "data: [DONE]" in self.lines and not any('"error"' in line for line in self.lines)


def is_transferred(pair: Pair) -> bool:
    """True if a further request is computed on the prefill server."""
    got = pair.post("/generate", body(prompt())).json()
    assert len(got["output_ids"]) == NEW
    return got["meta_info"]["cached_tokens"] >= TOKENS - 2


def states(server: ServerProcess) -> list[dict[str, Any]]:
    """Of all schedulers."""
    found: list[dict[str, Any]] = httpx.get(server.url + "/server_info", timeout=DEADLINE).json()["internal_states"]
    return found


def is_free(server: ServerProcess) -> None:
    """A prefill server keeps a prompt for a decode server that died before it asked, as long as halves may meet."""
    server.wait_free()
    assert "repaired" not in server.log


def everything(server: ServerProcess) -> list[Any]:
    return [server.process, *server.children()]


def make(folder: Path) -> tuple[Pair, Cable, int]:
    """Two servers, the cable between them, and the bytes of a transfer."""
    pair = Pair(folder).__enter__()
    cable = Cable(pair.port)
    assert is_transferred(pair)
    trial = Trial(pair, cable, 1 << 60)
    trial.run("transfer", lambda: None)
    assert trial.is_answered and not trial.fired
    first = cable.num_bytes
    trial.run("transfer", lambda: None)
    return pair, cable, cable.num_bytes - first


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill", "prefill core", "decode"])
def test_a_killed_server(victim: str, phase: str, tmp_path: Path) -> None:
    pair, cable, total = make(tmp_path)
    try:
        server = pair.decode if victim == "decode" else pair.prefill
        doomed = [server.core] if victim.endswith("core") else everything(server)
        trial = Trial(pair, cable, total)
        trial.run(phase, lambda: [process.kill() for process in doomed])  # type: ignore[func-returns-value]
        assert trial.fired
        if victim == "decode":
            assert not trial.is_answered  # the client's connection ends
            assert isinstance(trial.prefill, httpx.Response) and trial.prefill.status_code == 200
            is_free(pair.prefill)
        else:
            assert trial.is_answered, (trial.error, trial.lines[-3:])
            got = httpx.post(pair.decode.url + "/generate", json=body(trial.ids), timeout=180).json()
            assert len(got["output_ids"]) == NEW
            is_free(pair.decode)
    finally:
        cable.close()
        pair.__exit__()


@pytest.mark.parametrize("fault", ["cut", "stopped cable", "stopped prefill", "stopped decode"])
def test_a_cut_connection_and_a_stopped_process(fault: str, tmp_path: Path) -> None:
    """Each phase in turn, with the same servers."""
    pair, cable, total = make(tmp_path)
    try:
        for phase in PHASES:
            if fault == "cut":
                trial = Trial(pair, cable, total)
                trial.run(phase, cable.cut)
            else:
                trial = Trial(pair, cable, total)
                trial.run(phase, lambda: stop(fault, pair, cable))
            assert trial.is_answered, (phase, trial.error, trial.lines[-3:])
            assert isinstance(trial.prefill, httpx.Response) and trial.prefill.status_code == 200
            for server in (pair.prefill, pair.decode):
                is_free(server)
            assert is_transferred(pair) or is_transferred(pair), phase  # the first request may use the old connection
    finally:
        cable.close()
        pair.__exit__()


def stop(fault: str, pair: Pair, cable: Cable) -> None:
    """For 14 s: longer than the silence limit of a peer."""
    seconds = 14.0
    if fault == "stopped cable":
        cable.stop()
        threading.Timer(seconds, cable.go_on).start()
        return
    stopped = everything(pair.prefill if fault == "stopped prefill" else pair.decode)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    go_on = lambda: [process.send_signal(signal.SIGCONT) for process in stopped]  # noqa: E731
    threading.Timer(seconds, go_on).start()


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_lost_rank_of_a_server_with_several(victim: str, strike: signal.Signals, tmp_path: Path) -> None:
    """While ten requests are transferred. The server that loses a rank ends and names it, also to its clients; the
    other server names its peer and has nothing in use."""
    with Pair(tmp_path, prefill=("--tp-size", "2"), decode=DP) as pair, closing(Cable(pair.port)) as cable:
        assert is_transferred(pair)
        lost, left = (pair.prefill, pair.decode) if victim == "prefill" else (pair.decode, pair.prefill)
        (rank,) = [child for child in lost.children() if runs(child, "rank_main")]
        trials = [Trial(pair, cable, 1 << 60) for _ in range(10)]
        threads = [threading.Thread(target=trial.run, args=("none", lambda: None)) for trial in trials]
        begin = cable.num_bytes + TOKENS
        for thread in threads:
            thread.start()
        until(lambda: cable.num_bytes > begin)
        rank.send_signal(strike)
        for thread in threads:
            thread.join(DEADLINE)
        assert not any(thread.is_alive() for thread in threads), "a request has no end"
        assert lost.process.wait(DEADLINE) == 1
        name = f"TP1 (pid {rank.pid})"
        assert name in lost.log
        answers = [trial.prefill for trial in trials]
        if victim == "prefill":
            assert all(trial.is_answered for trial in trials)
            ends = [
                answer.text for answer in answers if isinstance(answer, httpx.Response) and answer.status_code != 200
            ]
            assert "its prompt is computed here" in left.log
        else:
            assert all(isinstance(answer, httpx.Response) and answer.status_code == 200 for answer in answers)
            ends = ["".join(trial.lines) for trial in trials if not trial.is_answered and trial.lines]
            until(lambda: "of the decode server at 127.0.0.1 is lost: its connection is closed" in left.log)
        assert ends and all(name in end for end in ends)
        until(lambda: not any(state[name] for state in states(left) for name in HELD), "nothing is in use")
        assert httpx.get(left.url + "/health", timeout=DEADLINE).status_code == 200


@pytest.mark.timeout(600)
def test_a_few_dozen_random_faults(tmp_path: Path) -> None:
    """At random bytes of random transfers, several at once."""
    pair, cable, total = make(tmp_path)
    rng = random.Random(random.getrandbits(32))
    count = 0
    try:
        for _ in range(200):
            if count >= 36:
                break
            trials = [Trial(pair, cable, total) for _ in range(rng.randint(1, 4))]
            limit = cable.num_bytes + rng.randrange(1, total * len(trials))

            def fault(seen: int, limit: int = limit) -> None:
                nonlocal count
                if seen >= limit:
                    cable.on_bytes = lambda _: None
                    count += 1
                    cable.cut()

            threads = [threading.Thread(target=trial.run, args=("none", lambda: None)) for trial in trials]
            for thread in threads:
                thread.start()
            cable.on_bytes = fault
            for thread in threads:
                thread.join(DEADLINE)
            assert all(trial.is_answered for trial in trials)
        assert count >= 36
        for server in (pair.prefill, pair.decode):
            is_free(server)
        assert is_transferred(pair) or is_transferred(pair)
    finally:
        cable.close()
        pair.__exit__()
