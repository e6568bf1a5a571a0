"""How the schedulers of several attention groups agree on each step: one small message from each to all, once a step.

A step begins when any scheduler has something to run. It tells the others what (`StepFacts`), which wakes those that
rest; they answer with what they have, perhaps nothing. When all have spoken, every group runs its part of the step with
the same list of facts, so sizes, phases and the number of forwards are equal on all ranks by construction. Steps are
numbered, and a message of a later step waits until its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from moe_engine.types import StepFacts, StepPlan

POLL_MS = 50


class Told(msgspec.Struct, array_like=True):
    """What group `group` brings to step `number`."""

    number: int
    group: int
    facts: StepFacts


class StepMesh:
    """Messages between schedulers: every one sends to every other, directly.

    Args:
        address: to bind, ``ipc://PATH`` or ``tcp://IP:*``; `address` afterwards is the one to connect to.
    """

    def __init__(self, group: int, num_groups: int, address: str) -> None:
        self.group, self.num_groups = group, num_groups
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self.address: str = self.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self._peers: list[zmq.Socket[bytes]] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Told).decode
        self._told: dict[int, dict[int, StepFacts]] = {}

    def connect(self, addresses: list[str]) -> None:
        """To all schedulers, by group."""
        for group, address in enumerate(addresses):
            if group == self.group:
                continue
            peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            peer.setsockopt(zmq.SNDHWM, 0)
            peer.setsockopt(zmq.LINGER, 1000)
            peer.connect(address)
            self._peers.append(peer)

    def tell(self, number: int, facts: StepFacts) -> None:
        self._told.setdefault(number, {})[self.group] = facts
        message = self._encode(Told(number, self.group, facts))
        for peer in self._peers:
            peer.send(message)

    def begun(self, number: int) -> bool:
        """Whether another scheduler has told its part of this step."""
        self._receive(0)
        return bool(self._told.get(number))

    def everybody(self, number: int, check: Callable[[], None]) -> tuple[StepFacts, ...]:
        """All parts of a step, by group; waits for them.

        Args:
            check: called from time to time; raises when a rank is lost.
        """
        told = self._told.setdefault(number, {})
        while len(told) < self.num_groups:
            if not self._receive(POLL_MS):
                check()
        del self._told[number]
        return tuple(told[group] for group in range(self.num_groups))

    def close(self) -> None:
        for socket in (self.socket, *self._peers):
            socket.close(1000)

    def _receive(self, timeout_ms: int) -> bool:
        if not self.socket.poll(timeout_ms):
            return False
        while True:
            try:
                told = self._decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            self._told.setdefault(told.number, {})[told.group] = told.facts


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


class Lockstep:
    """One scheduler's part in the common steps. `last` holds everybody's facts of the step agreed on last."""

    def __init__(self, mesh: StepMesh, check: Callable[[], None]) -> None:
        self._mesh = mesh
        self._check = check
        self._number = 0
        self._turns = PrefillTurns()
        self.last: tuple[StepFacts, ...] = ()

    def may_prefill(self) -> bool:
        """Whether the next step may hold prompts; the same for every scheduler."""
        return self._turns.open

    def is_due(self) -> bool:
        """Whether another scheduler waits for this one."""
        return self._mesh.begun(self._number + 1)

    def agree(self, plan: StepPlan, facts: StepFacts) -> StepPlan:
        """The plan, which may be empty, with everybody's facts. Waits for the other schedulers.

        Raises:
            EngineDeadError: a rank is lost meanwhile.
        """
        self._number += 1
        self._mesh.tell(self._number, facts)
        self.last = self._mesh.everybody(self._number, self._check)
        self._turns.after(self.last)
        return replace(plan, everybody=self.last)

    def all_leave(self) -> bool:
        """Whether nobody had anything left in the last step, and never will have."""
        return bool(self.last) and all(facts.leaving for facts in self.last)
