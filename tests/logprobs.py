"""Packed log-probabilities from single entries and back, for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isnan, nan
from typing import NamedTuple

from moe_engine.types import PackedLogprobs


class Entry(NamedTuple):
    """Log-probabilities of one token; `logprob` None: not computed. `top`: (token id, value) of the best tokens."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[float, ...] = ()


def unpack(block: PackedLogprobs | None) -> list[Entry]:
    if block is None or not block.num_tokens:
        return []
    count = block.num_tokens
    ids = struct.unpack(f"{count}i", block.token_ids)
    values = struct.unpack(f"{count}f", block.values)
    best, num_asked = len(block.top_ids) // 4 // count, len(block.asked) // 4 // count
    top = list(zip(struct.unpack(f"{best * count}i", block.top_ids), struct.unpack(f"{best * count}f", block.top)))
    asked = struct.unpack(f"{num_asked * count}f", block.asked)
    return [
        Entry(token, None)
        if isnan(value)
        else Entry(token, value, tuple(top[i * best : (i + 1) * best]), asked[i * num_asked : (i + 1) * num_asked])
        for i, (token, value) in enumerate(zip(ids, values))
    ]


def pack(entries: Sequence[Entry], best: int = 0, num_asked: int = 0) -> PackedLogprobs:
    """`best` and `num_asked`: top tokens of entries without a value."""
    tops = [pair for e in entries for pair in (e.top if e.logprob is not None else ((0, nan),) * best)]
    asked = [value for e in entries for value in (e.asked if e.logprob is not None else (nan,) * num_asked)]
    values = [nan if e.logprob is None else e.logprob for e in entries]
    return PackedLogprobs(
        struct.pack(f"{len(entries)}i", *(e.token_id for e in entries)),
        struct.pack(f"{len(entries)}f", *values),
        struct.pack(f"{len(tops)}i", *(token for token, _ in tops)),
        struct.pack(f"{len(tops)}f", *(value for _, value in tops)),
        struct.pack(f"{len(asked)}f", *asked),
    )
