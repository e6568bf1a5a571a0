"""The state of transfers on a prefill rank: rooms, their legs and pieces, and the decode ranks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from moe_engine.core.kv_transfer.layout import Layout
from moe_engine.core.kv_transfer.rows import RowPart
from moe_engine.core.kv_transfer.transports.protocol import Write
from moe_engine.core.kv_transfer.windows import SendWindow
from moe_engine.scheduler.tiers.transfer_state import WINDOW, Sending


@dataclass
class Consumer:
    """A decode rank's connection. `host`: its address. `rank` of `layout`. `waits`: for the answer to its first
    message. `window`: None until its memory is known."""

    heard: float
    host: str
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    part: RowPart = field(default_factory=RowPart)
    waits: bool = False
    window: SendWindow | None = None


@dataclass
class Piece:
    """Tokens before `end` in a slot of a leg. `write`: None once their notification was sent."""

    end: int
    slot: int
    num_bytes: int
    checksum: int
    write: Write | None


@dataclass
class Leg:
    """`pieces`: written and not acknowledged."""

    peer: bytes
    attempt: int
    state: Sending = field(default_factory=Sending)
    pieces: deque[Piece] = field(default_factory=deque)

    @property
    def writes(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].write is not None

    @property
    def may_read(self) -> bool:
        return self.state.may_send and len(self.pieces) < WINDOW


@dataclass
class Room:
    """`staged`: (end, places, number of their copies), not read yet. `over`: the reason why the transfer has ended. The
    room is kept until all of its halves have arrived, so that a late half is answered immediately."""

    digest: bytes | None = None
    began: float = field(default_factory=time.monotonic)
    num_legs: int = 0
    legs: dict[bytes, Leg] = field(default_factory=dict)
    num_wants: int = 0
    staged: deque[tuple[int, list[int], int]] = field(default_factory=deque)
    all_staged: bool = False
    announced: bool = False
    over: str | None = None

    @property
    def has_met(self) -> bool:
        return self.digest is not None and 0 < self.num_legs <= self.num_wants

    @property
    def may_read(self) -> bool:
        return self.over is None and bool(self.staged) and all(leg.may_read for leg in self.legs.values())
