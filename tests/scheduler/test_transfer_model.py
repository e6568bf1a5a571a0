"""Every interleaving of a transfer between two servers, with lost connections, aborts, deaths and late halves.

The model runs the real state classes. Places of the decode side hold token numbers; another request uses a released
place at once, so that a late write is detected.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

from moe_engine.scheduler.tiers import transfer_state
from moe_engine.scheduler.tiers.transfer_state import Message, Receiving, Sending, State

TOKENS = 4
PIECE = 2
FOREIGN = -1


@dataclass
class World:
    sender: Sending = field(default_factory=Sending)
    receiver: Receiving = field(default_factory=lambda: Receiving(b"d", 1, TOKENS))
    to_prefill: list[Message] = field(default_factory=list)
    to_decode: list[Message] = field(default_factory=list)
    computed: int = 0
    places: list[int] = field(default_factory=lambda: [0] * TOKENS)
    opened: bool = False
    offered: bool = False
    connected: bool = True
    know: tuple[bool, bool] = (True, True)
    """For prefill and decode: True while the side considers the connection alive."""
    prefill_alive: bool = True
    faults: int = 1
    used: bool = False
    """True once the decode scheduler has released the places."""

    def key(self) -> tuple:
        s, r = self.sender, self.receiver
        return (
            s.state, s.digest, s.wanted, s.sent, s.limit, tuple(s._unacked), s._done, r.state, r.end,
            tuple(self.to_prefill), tuple(self.to_decode), self.computed, tuple(self.places), self.opened,
            self.offered, self.connected, self.know, self.prefill_alive, self.faults, self.used,
        )  # fmt: skip

    def send(self, to: str, messages: list[Message]) -> None:
        if self.connected:
            getattr(self, to).extend(messages)


def steps(world: World, digest: bytes) -> list[tuple[str, World]]:
    """All possible next events."""
    found: list[tuple[str, World]] = []

    def when(name: str, possible: bool) -> World | None:
        if not possible:
            return None
        other = copy.deepcopy(world)
        found.append((name, other))
        return other

    s, r = world.sender, world.receiver
    alive = world.prefill_alive
    if w := when("open", not world.opened and r.state is State.RECEIVING):
        w.opened = True
        w.send("to_prefill", w.receiver.open())
        if not w.connected:
            w.receiver.lost("no connection")
    if w := when("offer", not world.offered and alive):
        w.offered = True
        w.send("to_decode", w.sender.offer(digest))
    if w := when("compute", world.offered and world.computed < TOKENS):
        w.computed += 1
    if w := when("data", alive and s.may_send and s.sent < min(world.computed, s.limit)):
        w.send("to_decode", w.sender.data(min(w.computed, w.sender.limit, w.sender.sent + PIECE)))
    if w := when("done", alive and s.state is State.SENDING and not s._done and s.sent == s.limit):
        w.send("to_decode", w.sender.done())
    if w := when("to prefill", alive and bool(world.to_prefill)):
        w.send("to_decode", w.sender.handle(w.to_prefill.pop(0)))
    if w := when("to decode", bool(world.to_decode)):
        message = w.to_decode.pop(0)
        if message[0] == "data" and w.receiver.accepts(*message[1:]):
            assert not w.used, "bytes were written to places of another request"
            w.places[message[1] : message[2]] = [t + 1 for t in range(message[1], message[2])]
        w.send("to_prefill", w.receiver.handle(message))
    if w := when("use", not world.used and r.state in (State.FILLED, State.FAILED)):
        w.used = True
        if r.state is State.FILLED:
            assert w.places[1 : r.end] == [t + 1 for t in range(1, r.end)] and r.end == TOKENS, "wrong bytes"
        w.places = [FOREIGN] * TOKENS
    # faults
    if w := when("cut", world.faults > 0 and world.connected):
        w.faults, w.connected, w.to_prefill, w.to_decode = w.faults - 1, False, [], []
    if w := when("prefill dies", world.faults > 0 and alive):
        w.faults, w.prefill_alive, w.connected, w.to_prefill = w.faults - 1, False, False, []
    if w := when("prefill learns", not world.connected and world.know[0] and alive):
        w.know = (False, w.know[1])
        w.sender.lost("cut")
    if w := when("decode learns", not world.connected and world.know[1] and not world.to_decode):
        w.know = (w.know[0], False)
        if w.opened:
            w.receiver.lost("cut")
    if w := when("decode aborts", world.faults > 0 and r.state is State.RECEIVING and world.opened):
        w.faults -= 1
        w.send("to_prefill", w.receiver.fail("aborted"))
    if w := when("prefill aborts", world.faults > 0 and alive and s.state is not State.ENDED):
        w.faults -= 1
        w.send("to_decode", w.sender.fail("aborted"))
    if w := when("deadline", alive and s.state is State.MEETING and world.offered and not found):
        w.sender.fail("no want")
    return found


def explore(digest: bytes, faults: int) -> tuple[int, set[State]]:
    """Number of states, and the receiver's results in final states."""
    first = World(faults=faults)
    seen, todo, ends = {first.key()}, deque([first]), set()
    while todo:
        world = todo.popleft()
        following = steps(world, digest)
        if not following:
            assert world.receiver.state in (State.FILLED, State.FAILED), "the transfer of the decode side does not end"
            assert world.used, "places are leaked"
            assert not world.prefill_alive or world.sender.state is State.ENDED, "the prefill side holds a transfer"
            ends.add(world.receiver.state)
        for _, other in following:
            if other.key() not in seen:
                seen.add(other.key())
                todo.append(other)
    return len(seen), ends


def test_without_faults_every_transfer_is_filled() -> None:
    number, ends = explore(b"d", 0)
    assert number > 50 and ends == {State.FILLED}


def test_with_two_faults_every_transfer_ends_and_no_wrong_bytes_are_used() -> None:
    number, ends = explore(b"d", 2)
    assert number > 1000 and ends == {State.FILLED, State.FAILED}


def test_different_prompts_are_never_transferred() -> None:
    assert explore(b"other", 1)[1] == {State.FAILED}


def test_the_model_sees_a_broken_protocol(monkeypatch) -> None:
    """A receiver that accepts any bytes is detected."""
    monkeypatch.setattr(transfer_state.Receiving, "accepts", lambda self, begin, end: True)
    monkeypatch.setattr(
        transfer_state.Receiving, "fail", lambda self, reason: self._fail(reason) or []
    )  # without a message to the sender
    try:
        explore(b"d", 1)
    except AssertionError:
        return
    raise AssertionError("not found")
