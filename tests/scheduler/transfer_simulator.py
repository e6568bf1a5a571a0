"""Two simulated engine cores, prefill and decode, and a network between them that has delays and loses connections."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.tiers.decode_tier import DecodeTier
from moe_engine.scheduler.tiers.prefill_tier import PrefillTier
from moe_engine.scheduler.tiers.transfer_state import Message, Receiving, Sending, State
from moe_engine.types import StepPlan
from tests.scheduler.drafting_worker import RUBBISH
from tests.scheduler.tier_simulator import CopyingStateWorker, CopyingWorker, TierSimulation

STATE_ROWS = 3


class TransferWorker(CopyingWorker):
    stored = 0

    def read(self, place: int) -> Any:
        """A row of the host pool; of a state: the state, and the number of the row."""
        entry, row = divmod(place - self.config.host_tier_tokens, STATE_ROWS)
        return self.host[place] if entry < 0 else (self.host_states[entry], row)

    def write(self, place: int, value: Any) -> None:
        """The inverse of `read`; a state is valid once all of its rows are there."""
        entry, row = divmod(place - self.config.host_tier_tokens, STATE_ROWS)
        self.host[place] = value
        if entry >= 0:
            rows = [self.host.get(place - row + i) for i in range(STATE_ROWS)]
            is_whole = rows == [(value[0], i) for i in range(STATE_ROWS)]
            self.host_states[entry] = value[0] if is_whole else RUBBISH

    def copy(self, plan: StepPlan) -> None:
        super().copy(plan)
        if plan.kv_ops is not None and plan.kv_ops.serial:
            self.stored = plan.kv_ops.serial


class StateTransferWorker(TransferWorker, CopyingStateWorker):
    """A transferring worker of a model with states."""


class ServerSimulation(TierSimulation):
    """One of the two cores. `network`: advances the network; False if no event is possible."""

    def __init__(self, config: SchedulerConfig, mode: str, rng: random.Random, late: float) -> None:
        super().__init__(replace(config, kv_connector=mode), rng, overlap=True, late=late)
        self.worker = (StateTransferWorker if config.num_snapshots else TransferWorker)(self.config, rng, late)
        self.tier: Any = self.scheduler.kv_cache.transfers
        self.tier.state_rows = STATE_ROWS
        self.network: Any = None

    def turn(self) -> bool:
        self.tier.exchange(self.scheduler.kv_cache.step)
        return super().turn()

    def take_arrivals(self) -> bool:
        return super().take_arrivals() or self.network() or self.scheduler.num_loading > 0  # waits for the other half

    def check_budgets(self, plan: StepPlan) -> None:
        if plan.rows:
            super().check_budgets(plan)
        else:
            assert plan.kv_ops is not None and (plan.kv_ops.loads or plan.kv_ops.serial)

    def fail_step(self) -> None:
        if self.worker.queue:
            failed = self.worker.fail()
            self.take(self.scheduler.step_failed(failed.number, "made up"))


@dataclass
class Room:
    sending: Sending = field(default_factory=Sending)
    receiving: Receiving | None = None
    places: list[int] = field(default_factory=list)
    pieces: deque[tuple[int, list[int], int]] = field(default_factory=deque)
    all_staged: bool = False
    announced: bool = False
    ended: bool = False
    closed: bool = False
    after: int = 0
    """The decode side requests no KV before the copies of this number."""


class Network:
    """Both transfer threads and the connection. Each call of `step` handles one event."""

    def __init__(self, prefill: ServerSimulation, decode: ServerSimulation, rng: random.Random, faults: float) -> None:
        self.prefill, self.decode, self._rng, self._faults = prefill, decode, rng, faults
        self.rooms: dict[int, Room] = {}
        self._late: list[int] = []
        self.to_prefill: deque[tuple[int, Message]] = deque()
        self.to_decode: deque[tuple[int, Message, list[Any]]] = deque()
        self.num_cuts = self.num_corrupted = self._settled = 0
        prefill.network = decode.network = self.step
        assert isinstance(prefill.tier, PrefillTier) and isinstance(decode.tier, DecodeTier)

    def step(self) -> bool:
        """False if no transfer is in progress."""
        rng = self._rng
        if (self.to_prefill or self.to_decode) and rng.random() < self._faults:
            self._cut()
            return True
        busy = self._commands()
        if self.to_prefill and (not self.to_decode or rng.random() < 0.5):
            room, message = self.to_prefill.popleft()
            self._answer(room, self.rooms[room].sending.handle(message))
            busy = True
        elif self.to_decode:
            self._deliver(*self.to_decode.popleft())
            busy = True
        for number, room in self.rooms.items():
            busy |= self._advance(number, room)
        for server in (self.prefill, self.decode):
            busy |= bool(server.tier.link.reports)
            server.tier.exchange(server.scheduler.kv_cache.step)
        return busy

    def expire(self) -> None:
        """Expires all transfers that wait for their other half."""
        for number, room in self.rooms.items():
            if room.sending.state is State.MEETING:
                self._answer(number, room.sending.fail("deadline"))

    def _commands(self) -> bool:
        busy = False
        while self.prefill.tier.link.commands:
            busy = True
            name, number, *values = self.prefill.tier.link.commands.popleft()
            room = self.rooms.setdefault(number, Room())
            if name == "offer":
                self._answer(number, room.sending.offer(*values))
            elif name == "send":
                room.pieces.append(tuple(values))  # type: ignore[arg-type]
            elif name == "done":
                room.all_staged = True
            else:
                self._answer(number, room.sending.fail(*values))
        while self.decode.tier.link.commands:
            busy = True
            name, number, *values = self.decode.tier.link.commands.popleft()
            if name == "settled":
                (self._settled,) = values
                continue
            room = self.rooms.setdefault(number, Room())
            if name == "want":
                assert room.receiving is None, "another request's room"
                _, _, digest, begin, limit, room.after, room.places = values
                room.receiving = Receiving(digest, begin, limit)
                self._late.append(number)
            elif room.receiving is not None:
                answers = room.receiving.fail("aborted")
                if number in self._late:
                    answers = [*room.receiving.open(), *answers]
                self.to_prefill.extend((number, message) for message in answers)
        late, self._late = self._late, []
        for number in late:
            room = self.rooms[number]
            assert room.receiving is not None
            if room.receiving.state is not State.RECEIVING:
                continue
            if room.after > max(self.decode.worker.stored, self._settled):
                self._late.append(number)
                continue
            busy, answers = True, room.receiving.open()
            if not room.places:
                answers += room.receiving.fail("cached")
                room.closed = True
            self.to_prefill.extend((number, message) for message in answers)
        return busy

    def _answer(self, number: int, messages: list[Message], rows: list[Any] | None = None) -> None:
        self.to_decode.extend((number, message, rows or []) for message in messages)

    def _deliver(self, number: int, message: Message, rows: list[Any]) -> None:
        room = self.rooms[number]
        assert room.receiving is not None
        receiving = room.receiving
        if message[0] == "data":
            if self._rng.random() < self._faults:
                self.num_corrupted += 1
                self.to_prefill.extend((number, answer) for answer in receiving.fail("checksum"))
                return
            if receiving.accepts(*message[1:]):
                assert not room.closed
                places = room.places[message[1] - receiving.begin : message[2] - receiving.begin]
                for place, row in zip(places, rows):
                    self.decode.worker.write(place, row)
        self.to_prefill.extend((number, answer) for answer in receiving.handle(message))

    def _advance(self, number: int, room: Room) -> bool:
        sending, receiving, busy = room.sending, room.receiving, False
        reports = self.prefill.tier.link.reports
        if sending.state is State.SENDING and not room.announced:
            room.announced = busy = True
            reports.append(("granted", number, sending.sent, sending.limit))
        while room.pieces and sending.may_send and room.pieces[0][2] <= self.prefill.worker.stored:
            end, places, _ = room.pieces.popleft()
            rows = [self.prefill.worker.read(place) for place in places]
            self._answer(number, sending.data(end), rows)
            reports.append(("sent", number, end))
            busy = True
        if room.all_staged and not room.pieces:
            self._answer(number, sending.done())
        if sending.state is State.ENDED and not room.ended and sending.digest is not None:  # its request has arrived
            room.ended = busy = True
            room.pieces.clear()
            reports.append(("ended", number, sending.reason))
        if receiving is not None and receiving.state in (State.FILLED, State.FAILED) and not room.closed:
            room.closed = busy = True
            kind = "filled" if receiving.state is State.FILLED else "failed"
            value = receiving.end if kind == "filled" else receiving.reason
            self.decode.tier.link.reports.append((kind, number, value))
        return busy

    def _cut(self) -> None:
        self.num_cuts += 1
        self.to_prefill.clear()
        self.to_decode.clear()
        for room in self.rooms.values():
            room.sending.lost("cut")
            if room.receiving is not None:
                room.receiving.lost("cut")
