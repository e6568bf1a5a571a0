"""The transfer threads of two servers in this process, with separate rows and without engines.

Every rank of a side has a thread and rows. The test acts as the scheduler: it sends commands and receives reports.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from moe_engine.core.kv_transfer.agent import AgentSetup
from moe_engine.core.kv_transfer.decode_agent import DecodeAgent
from moe_engine.core.kv_transfer.prefill_agent import PrefillAgent
from moe_engine.core.kv_transfer.transports.table import open_transport
from moe_engine.errors import ConfigError
from moe_engine.processes.dist_secret import DistSecret
from moe_engine.processes.zmq_sockets import job_keys
from moe_engine.scheduler.tiers.transfer_link import TransferLink
from moe_engine.types.row_sizes import TRANSFER_SLOTS
from tests.disaggregation.faulty import Cable
from tests.waiting import until

SCHEMA = {"cache": "made up"}
SECONDS = 30.0


class Rows:
    """Stands for `TransferCopies`: `array` [places, tensors, heads, bytes of a head]."""

    def __init__(self, num_places: int, num_tensors: int, num_heads: int, head_bytes: int) -> None:
        self.stored = 0
        self.row_widths = [num_heads * head_bytes] * num_tensors
        self.undivided: set[int] = set()
        self.array = np.zeros((num_places, num_tensors, num_heads, head_bytes), np.uint8)
        self._flat = self.array.reshape(num_places, -1)

    @property
    def row_bytes(self) -> int:
        return self._flat.shape[1]

    def read(self, places: list[int]) -> np.ndarray:
        return self._flat[places]

    def read_into(self, places: list[int], out: np.ndarray) -> None:
        out[:] = self._flat[places]

    def write(self, places: list[int], rows: np.ndarray) -> None:
        self._flat[places] = rows


@dataclass
class Side:
    """A link, and the reports received from it."""

    link: TransferLink = field(default_factory=TransferLink)
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def poll(self) -> None:
        while self.link.reports:
            self.seen.append(self.link.reports.popleft())

    def of(self, room: int) -> list[tuple[Any, ...]]:
        self.poll()
        return [report for report in self.seen if report[1] == room]

    def wait(self, room: int, *names: str) -> tuple[Any, ...]:
        """The first report of one of these names."""
        return until(lambda: next((report for report in self.of(room) if report[0] in names), None))


def nothing_is_held(pair: AgentPair) -> None:
    """No rooms and no slots are in use."""
    sender, receiver = pair.sender, pair.receiver
    until(lambda: all(room.over is not None for room in sender._rooms.values()) and not receiver._rooms)
    for consumer in sender._peers.values():
        if (window := consumer.window) is not None:
            assert sorted([*window.free, *(slot for _, slot in window.late)]) == list(range(TRANSFER_SLOTS))
    assert not any(peer.legs for peer in receiver._peers.values())


def _kill(agent: PrefillAgent | DecodeAgent) -> None:
    agent._leave = agent._transport.close  # type: ignore[method-assign]  # the process's memory is freed in any case
    agent.close()


class AgentPair:
    """One rank per side.

    Args:
        row: tensors, heads, bytes of a head.
        cabled: the connection is a `Cable`.
        schemas, secrets: of the prefill and of the decode side.
    """

    def __init__(
        self,
        transport: str = "tcp",
        num_places: int = 2000,
        row: tuple[int, int, int] = (2, 1, 24),
        cabled: bool = False,
        schemas: tuple[dict[str, str], dict[str, str]] = (SCHEMA, SCHEMA),
        secrets: tuple[DistSecret | None, DistSecret | None] = (None, None),
    ) -> None:
        self._schemas, self._keys = schemas, [job_keys(secret) for secret in secrets]
        self.prefill, self.decode = Side(), Side()
        self.prefill_rows, self.decode_rows = Rows(num_places, *row), Rows(num_places, *row)
        self._stack, self._opener = ExitStack(), partial(open_transport, transport, "127.0.0.1")
        self.sender = self._new_sender("tcp://127.0.0.1:*")
        self.port = int(self.sender.address.rpartition(":")[2])
        if cabled:
            self.cable = Cable(self.port)
            self._stack.callback(self.cable.close)
            self.port = self.cable.port
        self.receiver = self._new_receiver()
        self._stack.callback(lambda: self.sender.close())
        self._stack.callback(lambda: self.receiver.close())

    def _new_sender(self, address: str) -> PrefillAgent:
        schema, keys = self._schemas[0], self._keys[0]
        setup = AgentSetup(self.prefill.link, self.prefill_rows, schema, keys, lambda: None, self._opener)
        return PrefillAgent(setup, address)

    def _new_receiver(self) -> DecodeAgent:
        schema, keys = self._schemas[1], self._keys[1]
        setup = AgentSetup(self.decode.link, self.decode_rows, schema, keys, lambda: None, self._opener)
        return DecodeAgent(setup, self.port)

    def kill_prefill(self) -> None:
        """Ends the sender without a message to its peer, and starts another one at its port."""
        _kill(self.sender)
        self.prefill = Side()
        self.sender = until(lambda: self._restarted(self.sender.address))

    def _restarted(self, address: str) -> PrefillAgent | None:
        try:
            return self._new_sender(address)
        except ConfigError:  # the port is not free yet
            return None

    def kill_decode(self) -> None:
        """Ends the receiver without a message to its peers, and starts another one."""
        _kill(self.receiver)
        self.decode = Side()
        self.receiver = self._new_receiver()

    def __enter__(self) -> AgentPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def want(self, room: int, begin: int, limit: int, places: list[int], digest: bytes = b"d", after: int = 0) -> None:
        self.decode.link.command("want", room, "127.0.0.1", self.port, digest, begin, limit, after, places)

    def send_all(self, room: int, places: list[int], pieces: int) -> None:
        """The actions of `PrefillTier` after a transfer was granted; `places` of the tokens from there on."""
        _, _, begin, limit, *_ = self.prefill.wait(room, "granted")
        cuts = sorted({begin, limit, *(random.randint(begin, limit) for _ in range(pieces - 1))})
        for first, end in pairwise(cuts):
            for left in range(first, end, 256):
                right = min(end, left + 256)
                self.prefill.link.command("send", room, right, places[left - begin : right - begin], 0)
        self.prefill.link.command("done", room)
