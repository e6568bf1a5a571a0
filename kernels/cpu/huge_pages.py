"""Host memory on huge pages, for weights and caches that steps stream: small pages end the hardware's prefetching every
4 KiB, and each costs an address translation.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def huge_bytes(size: int) -> Tensor:
    """[size] uint8, zeros. Starts at a huge page if it fills one; the last page is huge if it is nearly filled."""
    whole = (size + HUGE_PAGE // 16) // HUGE_PAGE * HUGE_PAGE
    if whole == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(size, whole) + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # resident once written
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, first, whole)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=size)
