"""An emulator of torch's shuffles over NVSHMEM by their source, over gloo. It refuses calls that NVSHMEM refuses or
corrupts.

Contract: torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu, all_to_all_vdev_2d and its `_offset`. Memory is not
zeroed, rows that no rank sent keep their values, and a rank's input must stay unchanged until its next shuffle, because
other ranks read the input late. Loops over shared data, independent of the tested dispatch code.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.dispatch.deepep_emulator import must

WARPS, LANES = 16, 32  # of the kernels' one block of 512 threads


class EmulatedShuffles:
    """`Shuffles` of a gloo group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._size, self._rank = group.size(), group.rank()
        self._storages: set[int] = set()
        self._owned: list[Tensor] = []
        self._read_late: tuple[Tensor, Tensor] | None = None

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        sizes: list[Any] = [None] * self._size
        dist.all_gather_object(sizes, num_bytes, group=self._group)
        must(len(set(sizes)) == 1, f"ranks allocate different sizes: {sizes}")
        made = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN, and -1 in integers
        self._storages.add(made.untyped_storage().data_ptr())
        self._owned.append(made)
        return made

    def all_to_all_vdev_2d(self, rows: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        self._check(rows, out, splits, out_splits_offsets)
        must(splits.dim() == 1 and len(splits) % self._size == 0, "splits [R * El]")
        local = len(splits) // self._size
        must(self._size <= LANES and local <= WARPS, f"{self._size} ranks, {local} experts of a rank")
        must(out_splits_offsets.shape == (2, len(splits)), "out_splits_offsets [2, R * El]")
        sizes = splits.tolist()
        must(min(sizes) >= 0 and sum(sizes) <= len(rows), f"splits {sizes} of {len(rows)} rows")
        everyone = self._share(rows, sizes, list(accumulate(sizes, initial=0))[:-1])
        place, found = 0, []
        for expert in range(local):
            begin = place
            for source, source_sizes, source_offsets in everyone:
                place = self._fetch(
                    out, place, source, source_sizes, source_offsets, self._rank * local + expert, found
                )
            place = max(place, begin + 1)  # aligned to 1 row, also for an empty expert
        out_splits_offsets.copy_(torch.tensor(found).t())

    def all_to_all_vdev_2d_offset(
        self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        self._check(rows, out, splits_offsets, out_splits_offsets)
        must(splits_offsets.dim() == 2 and len(splits_offsets) == 2, "splits_offsets [2, El * R]")
        must(splits_offsets.shape[1] % self._size == 0, "splits of every rank")
        local = splits_offsets.shape[1] // self._size
        must(self._size <= WARPS and local <= LANES, f"{self._size} ranks, {local} experts of a rank")
        sizes, offsets = splits_offsets.tolist()
        must(all(o >= 0 and o + n <= len(rows) for n, o in zip(sizes, offsets) if n), "rows beyond the input")
        everyone = self._share(rows, sizes, offsets)
        place, found = 0, []
        for source, source_sizes, source_offsets in everyone:
            for expert in range(local):
                cell = expert * self._size + self._rank
                place = self._fetch(out, place, source, source_sizes, source_offsets, cell, found)
        out_splits_offsets.copy_(torch.tensor(found).t())

    def _check(self, rows: Tensor, out: Tensor, *splits: Tensor) -> None:
        for tensor in (rows, out, *splits):
            must(tensor.is_contiguous(), "tensors must be contiguous")
            must(tensor.untyped_storage().data_ptr() in self._storages, "not symmetric memory")
        must(rows.dtype == out.dtype and rows.stride(0) == out.stride(0), "rows and out must be alike")
        must(all(split.dtype == torch.int64 for split in splits), "splits and offsets must be int64")
        if self._read_late is not None:
            before, copy = self._read_late
            must(torch.equal(before, copy), "written before all ranks had entered the next shuffle")

    def _share(self, rows: Tensor, sizes: list[int], offsets: list[int]) -> list[tuple[Tensor, list[int], list[int]]]:
        seen = rows.view(torch.uint8)
        self._read_late = (seen, seen.clone())
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, (seen.clone(), sizes, offsets), group=self._group)
        return everyone

    def _fetch(
        self, out: Tensor, place: int, source: Tensor, sizes: list[int], offsets: list[int], cell: int, found: list[Any]
    ) -> int:
        size, offset = sizes[cell], offsets[cell]
        must(place + size <= len(out), f"row {place + size} of {len(out)}")
        out.view(torch.uint8)[place : place + size] = source[offset : offset + size]
        found.append((size, place))
        return place + size
