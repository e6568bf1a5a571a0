"""Permute and unpermute in C++: a decode step has few rows per layer, so each operation is one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import kind_of
from moe_engine.kernels.cpu.tensors import rows as contiguous
from moe_engine.kernels.permutation.protocol import Part, Records
from moe_engine.kernels.permutation.reference import TorchPermutation


class CpuPermutation(TorchPermutation):
    """`Permutation` for bfloat16 and float32. Operations used only by experts kernels and devices are torch's."""

    name = "cpu"

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        ids = contiguous(ids)
        wide = ids.dtype == torch.int64
        return bool(self._lib.moe_rows_check(wide, ids.data_ptr(), ids.stride(0), *ids.shape, num_experts))

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, Tensor]:
        ids, num_ranks = contiguous(ids), len(takes_part)
        positions = torch.empty(len(ids), num_ranks, dtype=torch.int32)
        counts = torch.empty(num_ranks, dtype=torch.int64)
        self._lib.moe_rows_route(
            ids.data_ptr(), ids.stride(0), *ids.shape, num_local, num_ranks, takes_part.data_ptr(), counts.data_ptr(),
            positions.data_ptr(),
        )  # fmt: skip
        return positions, counts

    def pack(
        self, parts: Sequence[Part], positions: Tensor, bases: Sequence[int], records: Records, out: Tensor
    ) -> None:
        plain = [contiguous(data) for data, _ in parts]
        numbers: list[int] = []
        for data, (_, offset) in zip(plain, parts):
            size = data.itemsize
            numbers += data.data_ptr(), data.stride(0) * size, data.shape[1] * size, offset
        num_tokens, num_ranks = positions.shape
        self._lib.moe_rows_pack(
            _words(len(numbers))(*numbers), len(parts), num_tokens, positions.data_ptr(), num_ranks,
            _words(num_ranks)(*bases), records.num_bytes, out.data_ptr(),
        )  # fmt: skip

    def take(
        self,
        memory: Tensor,
        begins: Sequence[int],
        counts: Sequence[int],
        records: Records,
        experts: tuple[int, int],
        out: Tensor,
    ) -> list[int]:
        words = _words(len(begins))
        taken = words()
        self._lib.moe_rows_take(
            memory.data_ptr(), len(begins), words(*begins), words(*counts), records.num_bytes, records.ids_offset,
            records.top_k, *experts, out.data_ptr(), taken,
        )  # fmt: skip
        return list(taken)

    def localize(self, ids: Tensor, experts: tuple[int, int]) -> None:
        assert ids.stride(1) == 1 or not ids.numel(), "the choices of a record must be contiguous"
        self._lib.moe_rows_localize(ids.data_ptr(), ids.stride(0), *ids.shape, *experts)

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        ids = contiguous(ids)
        offsets = torch.empty(num_experts + 1, dtype=torch.int32)
        positions = torch.empty(ids.shape, dtype=torch.int32)
        self._lib.moe_rows_group(
            ids.data_ptr(), ids.stride(0), *ids.shape, num_experts, offsets.data_ptr(), positions.data_ptr()
        )
        return offsets, positions

    def permute(
        self, x: Tensor, positions: Tensor, out: Tensor, scales: Tensor | None = None, out_scales: Tensor | None = None
    ) -> None:
        x, size = contiguous(x), x.itemsize
        self._lib.moe_rows_permute(
            x.data_ptr(), x.stride(0) * size, x.shape[1] * size, positions.data_ptr(), *positions.shape, out.data_ptr()
        )
        if scales is None or out_scales is None:
            return
        rows = out_scales if out_scales.is_contiguous() else out_scales.new_empty(out_scales.shape)
        self.permute(scales, positions, rows)
        if rows is not out_scales:
            out_scales.copy_(rows)

    def combine(
        self, rows: Tensor, positions: Tensor, weights: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        rows = contiguous(rows)
        weights, add = (None if x is None else contiguous(x) for x in (weights, add))
        num_sums, width = positions.shape
        out = torch.empty(num_sums, rows.shape[1], dtype=rows.dtype)
        self._lib.moe_rows_combine(
            kind_of(rows.dtype), rows.data_ptr(), rows.stride(0), positions.data_ptr(), width,
            *_address(weights), *_address(add), out.data_ptr(), *out.shape,
        )  # fmt: skip
        return out


def _address(x: Tensor | None) -> tuple[int | None, int]:
    """Address of the first element, and the row stride."""
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))


@lru_cache
def _words(count: int) -> Any:
    """The C array type of `count` int64."""
    return ctypes.c_int64 * count
