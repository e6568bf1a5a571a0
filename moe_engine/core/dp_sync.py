"""How the schedulers of several attention groups agree on each step: one small message from each to all, once a step.

A step begins when any scheduler has something to run. It tells the others what (`StepFacts`), which wakes those that
rest; they answer with what they have, perhaps nothing. When all have spoken, every group runs its part of the step with
the same list of facts, so sizes, phases and the number of forwards are equal on all ranks by construction. Steps are
numbered, and a message of a later step waits until its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import zmq

from moe_engine.processes.frames import FrameReader
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.types import StepFacts, StepPlan

POLL_MS = 50
MAX_EARLY = 2
"""Steps beyond the last complete one that a peer can be at: it waits there for this group's part of the first."""
GONE = StepFacts(leaving=True)
"""What a lost group brings."""


class StepFactsMessage(msgspec.Struct, array_like=True):
    """What group `group` brings to step `number` of a generation: steps count anew when groups were lost."""

    number: int
    group: int
    facts: StepFacts
    generation: int = 0


class StepExchange:
    """Messages between schedulers: every one sends to every other, directly.

    Args:
        address: to bind, ``ipc://PATH`` or ``tcp://IP:*``; `address` afterwards is the one to connect to.
        keys: of sockets between nodes.
    """

    def __init__(self, group: int, num_groups: int, address: str, keys: JobKeys | None = None) -> None:
        self.group, self.num_groups = group, num_groups
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self._keys = keys
        self.address = bind(self.socket, address, keys)
        self._generation = 0
        self._alive = [True] * num_groups
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._reader = FrameReader(f"steps of group {group}", msgspec.msgpack.Decoder(StepFactsMessage).decode)
        self._complete = 0  # the last step of this generation that is agreed on
        self._told: dict[tuple[int, int], dict[int, StepFacts]] = {}  # by generation and step, by group

    def connect(self, addresses: list[str]) -> None:
        """To all schedulers, by group."""
        for group, address in enumerate(addresses):
            if group == self.group:
                continue
            peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            peer.setsockopt(zmq.SNDHWM, 0)
            peer.setsockopt(zmq.LINGER, 1000)
            connect(peer, address, self._keys)
            self._peers[group] = peer

    def regroup(self, generation: int, alive: Sequence[bool]) -> None:
        """Goes on with the groups alive. What was told before is forgotten; what others have told already is not."""
        self._generation, self._alive, self._complete = generation, list(alive), 0
        self._told = {key: told for key, told in self._told.items() if key[0] >= generation}
        for group in [group for group in self._peers if not alive[group]]:
            self._peers.pop(group).close(0)

    def send(self, number: int, facts: StepFacts) -> None:
        self._told.setdefault((self._generation, number), {})[self.group] = facts
        message = self._encode(StepFactsMessage(number, self.group, facts, self._generation))
        for peer in self._peers.values():
            peer.send(message)

    def begun(self, number: int) -> bool:
        """Whether another scheduler has told its part of this step."""
        self._receive(0)
        return bool(self._told.get((self._generation, number)))

    def gather(self, number: int, check: Callable[[], None]) -> tuple[StepFacts, ...]:
        """All parts of a step, by group; waits for them. A lost group brings nothing.

        Args:
            check: called from time to time; raises when a rank is lost.
        """
        key = (self._generation, number)
        told = self._told.setdefault(key, {})
        while len(told) < sum(self._alive):
            if not self._receive(POLL_MS):
                check()
        del self._told[key]
        self._complete = number
        return tuple(told.get(group, GONE) for group in range(self.num_groups))

    @property
    def num_dropped(self) -> int:
        """Messages that were no other group's part of a step that is due."""
        return self._reader.num_dropped

    def close(self) -> None:
        for socket in (self.socket, *self._peers.values()):
            socket.close(1000)

    def _receive(self, timeout_ms: int) -> bool:
        if not self.socket.poll(timeout_ms):
            return False
        for told in self._reader.drain(self.socket):
            if told.generation < self._generation:
                continue  # from before a loss
            facts = self._told.setdefault((told.generation, told.number), {}) if self._is_due(told) else None
            if facts is None or told.group in facts:
                self._reader.drop(
                    f"group {told.group}'s part of step {told.number}, generation {told.generation}, after step "
                    f"{self._complete} of generation {self._generation}"
                )
            else:
                facts[told.group] = told.facts
        return True

    def _is_due(self, told: StepFactsMessage) -> bool:
        """Whether another group can be at this step. Each generation begins with the loss of a group."""
        if not 0 <= told.group < self.num_groups or told.group == self.group or not self._alive[told.group]:
            return False
        complete = self._complete if told.generation == self._generation else 0
        return told.generation < self.num_groups and complete < told.number <= complete + MAX_EARLY


class PrefillTurns:
    """Which steps may hold prompts: all groups wait for the one that prefills, so prompts are gathered for a few steps.

    Decided from what everybody has told, hence alike for all. Prompts go ahead when nobody decodes, when half of the
    groups have some, or when they were held back for `patience` steps.
    """

    def __init__(self, patience: int = 4) -> None:
        self._patience = patience
        self._held = 0
        self.open = True

    def after(self, everybody: tuple[StepFacts, ...]) -> None:
        """Settles the step that follows one with these facts."""
        waiting = sum(bool(facts.num_waiting) for facts in everybody)
        prefilled = any(facts.prefills for facts in everybody)
        self._held = 0 if prefilled or not waiting else self._held + 1
        nobody_decodes = not any(facts.num_running for facts in everybody)
        self.open = nobody_decodes or 2 * waiting >= len(everybody) or self._held >= self._patience


class DPSync:
    """One scheduler's part in the common steps. `last` holds everybody's facts of the step agreed on last."""

    def __init__(self, exchange: StepExchange, check: Callable[[], None]) -> None:
        self._exchange = exchange
        self._check = check
        self._number = 0
        self._turns = PrefillTurns()
        self.last: tuple[StepFacts, ...] = ()
        self.generation = 0
        self.alive = [True] * exchange.num_groups
        """Of all groups, those that were not lost."""

    def regroup(self, generation: int, alive: Sequence[bool]) -> None:
        """From now on steps are agreed on with the groups alive; they all begin at the first again."""
        self._exchange.regroup(generation, alive)
        self._number, self._turns, self.last = 0, PrefillTurns(), ()
        self.generation, self.alive = generation, list(alive)

    def may_prefill(self) -> bool:
        """Whether the next step may hold prompts; the same for every scheduler."""
        return self._turns.open

    def is_due(self) -> bool:
        """Whether another scheduler waits for this one."""
        return self._exchange.begun(self._number + 1)

    def sync_step(self, plan: StepPlan, facts: StepFacts) -> StepPlan:
        """The plan, which may be empty, with everybody's facts. Waits for the other schedulers.

        Raises:
            EngineDeadError: a rank is lost meanwhile.
        """
        self._number += 1
        self._exchange.send(self._number, facts)
        self.last = self._exchange.gather(self._number, self._check)
        self._turns.after(tuple(facts for facts, alive in zip(self.last, self.alive) if alive))
        return replace(plan, dp_facts=self.last)

    def all_leave(self) -> bool:
        """Whether nobody had anything left in the last step, and never will have."""
        return bool(self.last) and all(facts.leaving for facts in self.last)
