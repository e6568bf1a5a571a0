"""Makes uninitialized memory visible: `torch.empty` returns NaN (and the largest integer)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is its default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
