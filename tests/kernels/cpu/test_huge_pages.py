"""Memory of packed weights: where it starts, what it holds, and that it is given back."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from moe_engine.kernels.cpu.huge_pages import HUGE_PAGE, huge_bytes

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")


@pytest.mark.parametrize("size", [2 * HUGE_PAGE, 5 * HUGE_PAGE // 2, HUGE_PAGE - HUGE_PAGE // 16])
def test_large_memory_starts_at_a_huge_page(size: int) -> None:
    memory = huge_bytes(size)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert memory.numel() == memory.untyped_storage().nbytes() == size
    assert not memory.any()
    memory.fill_(1)


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE // 2])
def test_small_memory_is_zeros_of_the_size(size: int) -> None:
    assert torch.equal(huge_bytes(size), torch.zeros(size, dtype=torch.uint8))


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped(mmap.mmap):
        pass

    kept: list[weakref.ref[mmap.mmap]] = []

    def mapped(*args: int) -> mmap.mmap:
        memory = Mapped(*args)
        kept.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(mmap, "mmap", mapped)
    memory = huge_bytes(HUGE_PAGE).view(2, -1)
    assert kept[0]() is not None
    del memory
    assert kept[0]() is None
