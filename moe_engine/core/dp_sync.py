"""DP attention step sync (idle batch): the schedulers of all attention groups exchange one small message per step.

A step begins when any scheduler has work. It sends its facts (`StepFacts`) to the others, which wakes idle ones; these
reply with their own facts, with an idle batch if they have no work. Once all facts have arrived, every group runs its
part of the step with the same list of facts: sizes, phases and the number of forwards are equal on all ranks by
construction. Steps are numbered; a message of a later step is kept until that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from moe_engine.processes.frames import FrameReader
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.scheduler.prefill_delays import PrefillDelays
from moe_engine.types import StepFacts, StepPlan
from moe_engine.types.prefill_delay import DelayFacts

POLL_MS = 50
MAX_EARLY = 2
"""Max distance of a peer from the last complete step: it cannot pass a step before this group has sent its facts."""

PATIENCE = 4
"""Steps for which prompts are held back at most, until other groups have some too."""


class StepFactsMessage(msgspec.Struct, array_like=True):
    """Facts of group `group` for step `number`, counted from 1."""

    number: int
    group: int
    facts: StepFacts


class StepExchange:
    """All-to-all messages between schedulers.

    Args:
        address: bind address, ``ipc://PATH`` or ``tcp://IP:*``; the attribute `address` is the one to connect to.
        keys: CURVE keys of sockets between nodes.
    """

    def __init__(self, group: int, num_groups: int, address: str, keys: JobKeys | None = None) -> None:
        self.group, self.num_groups = group, num_groups
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self._keys = keys
        self.address = bind(self.socket, address, keys)
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._reader = FrameReader(f"steps of group {group}", msgspec.msgpack.Decoder(StepFactsMessage).decode)
        self._complete = 0  # last complete step
        self._facts: dict[int, dict[int, StepFacts]] = {}  # step -> group -> facts

    def connect(self, addresses: list[str]) -> None:
        """Connects to all other schedulers; `addresses` by group."""
        for group, address in enumerate(addresses):
            if group == self.group:
                continue
            peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            peer.setsockopt(zmq.SNDHWM, 0)
            peer.setsockopt(zmq.LINGER, 1000)
            connect(peer, address, self._keys)
            self._peers[group] = peer

    def send(self, number: int, facts: StepFacts) -> None:
        self._facts.setdefault(number, {})[self.group] = facts
        message = self._encode(StepFactsMessage(number, self.group, facts))
        for peer in self._peers.values():
            peer.send(message)

    def begun(self, number: int) -> bool:
        """Whether facts of another scheduler for this step have arrived."""
        self._receive(0)
        return bool(self._facts.get(number))

    def gather(self, number: int, check: Callable[[], None]) -> tuple[StepFacts, ...]:
        """Waits for the facts of all groups; returns them by group.

        Args:
            check: polled while waiting; raises if a rank is lost.
        """
        facts = self._facts.setdefault(number, {})
        while len(facts) < self.num_groups:
            if not self._receive(POLL_MS):
                check()
        del self._facts[number]
        self._complete = number
        return tuple(facts[group] for group in range(self.num_groups))

    @property
    def num_dropped(self) -> int:
        """Messages dropped because they were not another group's facts for a due step."""
        return self._reader.num_dropped

    def close(self) -> None:
        for socket in (self.socket, *self._peers.values()):
            socket.close(1000)

    def _receive(self, timeout_ms: int) -> bool:
        if not self.socket.poll(timeout_ms):
            return False
        for message in self._reader.drain(self.socket):
            self._take(message)
        return True

    def _take(self, message: StepFactsMessage) -> None:
        facts = self._facts.setdefault(message.number, {}) if self._is_due(message) else None
        if facts is None or message.group in facts:
            self._reader.drop(f"group {message.group}'s part of step {message.number}, after step {self._complete}")
        else:
            facts[message.group] = message.facts

    def _is_due(self, message: StepFactsMessage) -> bool:
        """Whether another group can be at this step."""
        return self._is_peer(message.group) and self._complete < message.number <= self._complete + MAX_EARLY

    def _is_peer(self, group: int) -> bool:
        return 0 <= group < self.num_groups and group != self.group


class PrefillTurns:
    """Decides which steps may contain prefills. A prefill of one group delays all groups, so prompts are held back for
    a few steps to coincide.

    Deterministic in the exchanged facts, hence equal on all schedulers. Prefills may run if no group decodes, if at
    least half of the groups have waiting prompts, or after they were held back for `patience` steps. A delayer
    (``--enable-prefill-delayer``) replaces this rule; the steps of ``--prefill-decode-interval`` come first.

    Args:
        delays: of this group's scheduler.
    """

    def __init__(self, patience: int = PATIENCE, delays: PrefillDelays | None = None) -> None:
        self._patience = patience
        self._delays = delays
        self._held = 0
        self.open = True

    def after(self, groups: tuple[StepFacts, ...], own: DelayFacts | None = None) -> None:
        """Decides for the step after one with these facts; `own`: this group's, for a delayer."""
        self.after_counts(
            len(groups),
            sum(bool(facts.num_waiting) for facts in groups),
            any(facts.prefills for facts in groups),
            max(facts.num_running for facts in groups),
        )
        running = max(facts.num_running for facts in groups)
        if self._delays is None or self._delays.delayer is None or self._delays.interval.left_beside(running):
            return
        known = [facts.delay or DelayFacts() for facts in groups]
        allows = self._delays.decide_after(known, own or DelayFacts())
        # a prompt that arrives later waits a step, for a decision that counts it
        waits = any(facts.num_waiting for facts in groups) or any(facts.waiting for facts in known)
        self.open = (allows and waits) or not running

    def after_counts(self, num_groups: int, waiting: int, prefilled: bool, running: int) -> None:
        """`after`, by the groups with waiting prompts, whether a group had prompts, and the most decoding requests of a
        group."""
        self._held = 0 if prefilled or not waiting else self._held + 1
        self.open = not running or 2 * waiting >= num_groups or self._held >= self._patience
        if self._delays is not None:
            self._delays.interval.after(prefilled)
            self.open &= not self._delays.interval.left_beside(running)


class DPSync:
    """One scheduler's side of the step sync. `last` holds all groups' facts of the last step."""

    def __init__(self, exchange: StepExchange, check: Callable[[], None]) -> None:
        self._exchange = exchange
        self._check = check
        self._number = 0
        self._delays: PrefillDelays | None = None
        self._turns = PrefillTurns()
        self.last: tuple[StepFacts, ...] = ()
        self.num_groups = exchange.num_groups

    def use(self, delays: PrefillDelays | None) -> None:
        """Follows the delays of this group's scheduler. Before the first step."""
        self._delays = delays
        if delays is not None:
            delays.shared = True
        self._turns = PrefillTurns(delays=delays)

    def end_delays(self) -> PrefillDelays | None:
        """Ends the waits of prompts; the delays begin again. None without delays."""
        if self._delays is not None:
            self._delays.forget()
        return self._delays

    def may_prefill(self) -> bool:
        """Whether the next step may contain prefills; equal on all schedulers."""
        return self._turns.open

    def is_due(self) -> bool:
        """Whether another scheduler has begun the next step and waits for this one."""
        return self._exchange.begun(self._number + 1)

    def sync_step(self, plan: StepPlan, facts: StepFacts) -> StepPlan:
        """Exchanges facts with the other schedulers and waits for theirs; returns the plan (may be empty) with
        `dp_facts`.

        Raises:
            EngineDeadError: a rank was lost while waiting.
        """
        self._number += 1
        self._exchange.send(self._number, facts)
        self.last = self._exchange.gather(self._number, self._check)
        self._turns.after(self.last, facts.delay)
        return replace(plan, dp_facts=self.last)

    def all_leave(self) -> bool:
        """Whether all groups were idle and shutting down in the last step."""
        return bool(self.last) and all(facts.leaving for facts in self.last)
