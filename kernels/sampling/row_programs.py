"""Several programs for a row of logits: one program would read a row of a large vocabulary at the rate of one
multiprocessor.

Programs write the result of their part of the row; the last one of a row to arrive joins the parts. So no program waits
for another, and a launch needs no barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SHARED_ROWS = 128
"""Rows up to which a row is shared by programs; more occupy the multiprocessors alone."""

MAX_PROGRAMS = 64
"""Most programs of a row."""


def programs_of_row(count: int, vocab: int, tile: int, multiprocessors: int) -> int:
    """Programs for each of `count` rows, which they read in tiles."""
    if count > MAX_SHARED_ROWS:
        return 1
    return max(1, min(triton.cdiv(vocab, tile), MAX_PROGRAMS, 2 * multiprocessors // count))


class Tickets:
    """Counts of arrivals, for launches on one stream: int32 [`MAX_SHARED_ROWS`] for each device, 0 between launches."""

    def __init__(self) -> None:
        self._of_device: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._of_device:  # made by the eager run before a capture
            self._of_device[device] = torch.zeros(MAX_SHARED_ROWS, dtype=torch.int32, device=device)
        return self._of_device[device]


@triton.jit
def arrives_last(ticket, programs):
    """Whether this program is the last of a row's `programs` to call this; it then sees what the others wrote."""
    tl.debug_barrier()  # the writes of all threads come before the arrival
    last = programs == 1
    if programs > 1:
        last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
        if last:
            tl.store(ticket, 0)
    return last
