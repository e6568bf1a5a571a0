"""Commands and reports between the scheduler and the thread of KV transfers (`core.kv_transfer`).

Commands go from the scheduler to the thread, reports return; each in order. The scheduler's side (`PrefillTier`,
`DecodeTier`) does the bookkeeping: places belong to a transfer from its command until its report.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from moe_engine.scheduler.tiers.transfer_state import PROMPT_BYTES
from moe_engine.types import NO_LORA, Request

Command = tuple[Any, ...]
MAX_NAME = 200
"""Bytes of the name of weights in a digest."""


@dataclass
class TransferLink:
    """`wake` ends a wait of the transfer thread; it is set by that thread's owner.

    | command | |
    |---|---|
    | offer(room, digest) | prefill: a request with this room has arrived |
    | send(room, end, places, serial) | prefill: the next tokens, stored in these places by the copies of that number |
    | done(room) | prefill: all tokens were sent |
    | end(room, reason) | prefill: the request failed or was aborted |
    | drop(room) | prefill: this rank has no part of the transfer |
    | want(room, host, port, digest, begin, limit, after, places) | decode: tokens [begin, limit) into these places, |
    | | which copies up to the number `after` write to before |
    | settled(-1, serial) | decode: copies up to this number are complete, or will not run |
    | cancel(room) | decode |

    | report | |
    |---|---|
    | granted(room, begin, limit, ...) | prefill: the peer needs these tokens |
    | sent(room, end) | prefill: places up to there are free |
    | ended(room, reason) | prefill: the transfer is over; all its places are free |
    | filled(room, end), failed(room, reason) | decode: the transfer is over; nothing writes to its places any more |
    """

    commands: deque[Command] = field(default_factory=deque)
    reports: deque[Command] = field(default_factory=deque)
    wake: Callable[[], None] = lambda: None
    weights: str = ""
    """Name of the weights of later transfers; empty: those of the start, which the handshake compares."""
    broken: str = ""
    """The reason why the thread has ended unexpectedly: no further report will arrive."""

    def command(self, *values: Any) -> None:
        self.commands.append(values)
        self.wake()

    def digest_of(self, request: Request) -> bytes:
        """Equal on both servers if and only if the KV of a prompt is: a hash of prompt and adapter behind the name of
        the weights."""
        adapter = None
        if request.lora_id != NO_LORA:  # files that could not be read are those of no other server
            adapter = request.lora_key or secrets.token_hex(8)
        prompt = repr((request.extra_key, adapter, request.prompt_ids))
        return self.weights.encode()[:MAX_NAME] + blake2b(prompt.encode(), digest_size=PROMPT_BYTES).digest()
