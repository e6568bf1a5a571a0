"""Random faults of the transport and of the connection: each transfer ends on both sides, with correct bytes or none,
and no resources stay in use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from moe_engine.core.kv_transfer import thread, wire
from moe_engine.core.kv_transfer.transports.protocol import Send
from moe_engine.core.kv_transfer.transports.table import TRANSPORTS
from tests.disaggregation.agents import AgentPair, nothing_is_held
from tests.disaggregation.faulty import FaultyRow, FaultyTransport
from tests.disaggregation.transport_names import each_transport
from tests.waiting import until

ROOMS = 4
PLACES = 120


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(wire, "MEET_SECONDS", 0.4)
    monkeypatch.setattr(thread, "POLL_MS", 20)


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyTransport]]:
    made: list[FaultyTransport] = []

    def make(host: str, send: object) -> FaultyTransport:
        made.append(FaultyTransport(random.Random(random.getrandbits(32)), 0.12))
        return made[-1]

    monkeypatch.setitem(TRANSPORTS, "faulty", make)  # type: ignore[arg-type]
    yield made
    FaultyTransport.memories.clear()


class Round:
    """Several transfers at once; the scheduler may end each at any time, and one half may be missing."""

    def __init__(self, pair: AgentPair, first_room: int) -> None:
        self.pair, self.rooms = pair, range(first_room, first_room + ROOMS)
        self.todo: list[tuple[int, str]] = []
        self.offered, self.wanted = set[int](), set[int]()
        pair.prefill_rows.array[:] = np.frombuffer(random.randbytes(pair.prefill_rows.array.nbytes), np.uint8).reshape(
            pair.prefill_rows.array.shape
        )
        for room in self.rooms:
            steps = ["offer", "want"]
            random.shuffle(steps)
            if random.random() < 0.1:
                steps.pop()
            steps += ["send", "send", "done"]
            for name in ("end", "cancel"):
                if random.random() < 0.1:
                    steps.insert(random.randrange(len(steps) + 1), name)
            self.todo.append((room, " ".join(steps)))

    def play(self, faults: dict[str, float]) -> int:
        """Returns the number of faults of the connection."""
        pair, count = self.pair, 0
        steps = [(room, name) for room, names in self.todo for name in names.split()]
        granted: dict[int, tuple[int, int]] = {}
        for room, name in (steps[i] for i in sorted(range(len(steps)), key=lambda i: self._rank(steps, i))):
            index = (room - self.rooms.start) * (PLACES // ROOMS)
            places = list(range(index, index + PLACES // ROOMS))
            if random.random() < faults["cut"]:
                pair.cable.cut()
                count += 1
            if random.random() < faults["stop"]:
                pair.cable.stop()
                count += 1
            if random.random() < faults["kill"]:
                self._kill()
                granted = {room: found for room, found in granted.items() if room in self.offered & self.wanted}
                count += 1
            if name == "offer":
                self.offered.add(room)
                pair.prefill.link.command("offer", room, b"d")
            elif name == "want":
                self.wanted.add(room)
                pair.want(room, 0, len(places), places)
            elif name in ("send", "done") and room in self.offered & self.wanted:
                if room not in granted:
                    report = pair.prefill.wait(room, "granted", "ended")
                    granted[room] = (0, len(places)) if report[0] == "granted" else (0, -1)
                sent, limit = granted[room]
                if name == "send" and sent < limit:
                    end = limit if sent else random.randint(1, limit)
                    pair.prefill.link.command("send", room, end, places[sent:end], 0)
                    granted[room] = (end, limit)
                elif name == "done" and sent == limit:
                    pair.prefill.link.command("done", room)
                elif name == "done":
                    pair.prefill.link.command("end", room, "made up")
            elif name == "end":
                pair.prefill.link.command("end", room, "made up")
            elif name == "cancel":
                pair.decode.link.command("cancel", room)
        pair.cable.go_on()
        return count

    def _kill(self) -> None:
        """Kills and restarts a side, whose scheduler dies with it."""
        self.pair.cable.go_on()
        if random.random() < 0.5:
            self.pair.kill_prefill()
            self.offered.clear()
        else:
            self.pair.kill_decode()
            self.wanted.clear()

    def _rank(self, steps: list[tuple[int, str]], index: int) -> float:
        """Keeps the steps of a room in order, and interleaves the rooms."""
        room = steps[index][0]
        before = sum(other == room for other, _ in steps[:index])
        return before + (room % ROOMS) / ROOMS

    def check(self) -> int:
        """Every started half has ended; filled transfers have correct bytes. Returns their number."""
        pair, filled = self.pair, 0
        assert not pair.prefill.link.broken + pair.decode.link.broken
        for room in self.rooms:
            if room in self.offered:
                pair.prefill.wait(room, "ended")
            if room in self.wanted:
                report = pair.decode.wait(room, "filled", "failed")
                if report[0] == "filled":
                    filled += 1
                    index = (room - self.rooms.start) * (PLACES // ROOMS)
                    part = slice(index, index + report[2])
                    assert report[2] == PLACES // ROOMS
                    assert np.array_equal(pair.decode_rows.array[part], pair.prefill_rows.array[part])
            for side in (pair.prefill, pair.decode):
                ends = [report for report in side.of(room) if report[0] in ("ended", "filled", "failed")]
                assert len(ends) <= 1, ends
        nothing_is_held(pair)
        check_memories(pair)
        return filled


def check_memories(pair: AgentPair) -> None:
    """Each side has registered one memory for each of its connections that have one, and no others."""
    row = pair.sender._transport
    if isinstance(row, FaultyRow):
        until(lambda: row.num_live == sum(peer.window is not None for peer in pair.sender._peers.values()))
    row = pair.receiver._transport
    if isinstance(row, FaultyRow):
        until(lambda: row.num_live == sum(peer.memory is not None for peer in pair.receiver._peers.values()))


def play(
    made: Sequence[FaultyTransport | FaultyRow], limit: int, progress: Callable[[int], None] = lambda count: None
) -> tuple[int, int]:
    """Runs rounds until this number of faults. Returns (faults, filled transfers).

    Args:
        progress: called with the number of faults, after each round.
    """
    cuts = filled = room = 0
    with AgentPair("faulty", PLACES, cabled=True) as pair:
        while cuts + sum(transport.num_faults for transport in made) < limit:
            played = Round(pair, room)
            cuts += played.play({"cut": 0.03, "stop": 0.004, "kill": 0.01})
            filled += played.check()
            room += ROOMS
            progress(cuts + sum(transport.num_faults for transport in made))
    return cuts + sum(transport.num_faults for transport in made), filled


def test_random_faults_end_in_a_message_and_leak_nothing(transports: list[FaultyTransport]) -> None:
    count, filled = play(transports, 60)
    assert count >= 60 and filled


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[FaultyRow]]:
    """Makes the rows of a transport fail; returns them as they are opened."""

    def use(name: str) -> list[FaultyRow]:
        made, row = list[FaultyRow](), TRANSPORTS[name]

        def make(host: str, send: Send) -> FaultyRow:
            made.append(FaultyRow(row(host, send), random.Random(random.getrandbits(32)), 0.1))
            return made[-1]

        monkeypatch.setitem(TRANSPORTS, "faulty", make)
        return made

    return use


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", each_transport())
def test_random_faults_of_each_transport(name: str, rows: Callable[[str], list[FaultyRow]]) -> None:
    count, filled = play(rows(name), 40)
    assert count >= 40 and filled


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", each_transport())
def test_a_thousand_faults_of_each_transport(name: str, rows: Callable[[str], list[FaultyRow]]) -> None:
    count, filled = play(rows(name), 1000)
    assert count >= 1000 and filled > 150


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_thousand_faults(transports: list[FaultyTransport]) -> None:
    count, filled = play(transports, 1000)
    assert count >= 1000 and filled > 200
