"""Permute and unpermute in torch, on any device; byte records of host ranks in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertOrder, Part, Records, most_rows
from moe_engine.kernels.quantization.groups import RowGroups, scale_groups
from moe_engine.kernels.quantization.protocol import FP8


class TorchPermutation:
    """`Permutation`."""

    name = "torch"

    def sort_by_expert(self, ids: Tensor, num_experts: int, align: int = 1, marks_padding: bool = True) -> ExpertOrder:
        ordered, pairs, starts = _sort(ids, num_experts)
        row = torch.arange(len(ordered), device=ids.device)
        if align == 1:
            row = torch.where(ordered < num_experts, row, -1)
            return ExpertOrder(starts, starts[1:], _at(pairs, row, ids), pairs.to(torch.int32))
        counts = starts.diff()
        sizes = (counts + align - 1).div(align, rounding_mode="floor") * align
        ends = sizes.cumsum(0)
        groups = torch.cat((ends - sizes, ends[-1:]))  # [E + 1]
        expert = ordered.long()
        row = torch.where(expert < num_experts, row + (groups - starts)[expert], -1)
        most = most_rows(len(pairs), num_experts, align)
        source = torch.full((most + 1,), -1, dtype=torch.int32, device=ids.device)  # the last receives discarded writes
        source[row] = torch.where(row < 0, -1, pairs).to(torch.int32)
        offsets, valid_ends = groups.to(torch.int32), (groups[:-1] + counts).to(torch.int32)
        return ExpertOrder(offsets, valid_ends, _at(pairs, row, ids), source[:-1])

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        order = self.sort_by_expert(ids, num_experts)
        return order.offsets, order.positions

    def place(self, ids: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
        ordered, pairs, starts = _sort(ids, num_experts)
        expert = ordered.long()
        rank = torch.arange(len(ordered), device=ids.device) - starts[expert]
        known = (expert < num_experts) & (rank < capacity)
        positions = _at(pairs, torch.where(known, expert * capacity + rank, -1), ids)
        return starts.diff().clamp_max_(capacity), positions

    def permute(
        self, x: Tensor, positions: Tensor, out: Tensor, scales: Tensor | None = None, out_scales: Tensor | None = None
    ) -> None:
        if not len(x) or not len(out):
            return
        tokens = torch.arange(positions.numel(), device=x.device).div_(positions.shape[1], rounding_mode="floor")
        # position -1 becomes the entry after the last row
        source = tokens.new_zeros(len(out) + 1).scatter_(0, positions.flatten().long().remainder(len(out) + 1), tokens)
        if x.dtype == FP8:  # torch copies bytes only
            x, out = x.view(torch.uint8), out.view(torch.uint8)
        torch.index_select(x, 0, source[:-1], out=out)
        if scales is not None and out_scales is not None:
            out_scales.copy_(scales.index_select(0, source[:-1]))

    def scale_rows(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        return scale_groups(rows, weights, groups)

    def combine(
        self, rows: Tensor, positions: Tensor, weights: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        if not len(rows):
            rows = rows.new_zeros(1, rows.shape[1])
        terms = rows[positions.clamp_min(0).long()].float()  # [T, S, D], a copy
        if weights is not None:
            terms.mul_(weights.unsqueeze(2))
        total = terms.masked_fill_((positions < 0).unsqueeze(2), 0.0).sum(1)
        return (total if add is None else total.add_(add)).to(rows.dtype)

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        if not ids.numel():
            return True
        ordered = ids.sort(dim=1).values
        outside = (ordered[:, 0] < -1) | (ordered[:, -1] >= num_experts)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        return not bool((outside | twice).any())

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, Tensor]:
        ranks = torch.arange(len(takes_part), dtype=ids.dtype, device=ids.device)
        owners = torch.div(ids, num_local, rounding_mode="floor").unsqueeze(2)
        mask = (owners == ranks).any(1).logical_and_(takes_part)  # [T, R]
        counts = mask.sum(0)
        positions = mask.cumsum(0).add_(counts.cumsum(0).sub_(counts).sub_(1))
        return torch.where(mask, positions, -1).to(torch.int32), counts

    def pack(
        self, parts: Sequence[Part], positions: Tensor, bases: Sequence[int], records: Records, out: Tensor
    ) -> None:
        if not len(positions):
            return
        flat, size = out.view(-1).numpy(), records.num_bytes
        rows = [(_bytes(data), offset) for data, offset in parts]
        for base, of_rank in zip(bases, positions.numpy().T):
            tokens = np.flatnonzero(of_rank >= 0)
            if not len(tokens):
                continue
            begin = base + int(of_rank[tokens[0]]) * size
            into = flat[begin : begin + len(tokens) * size].reshape(len(tokens), size)
            for data, offset in rows:
                into[:, offset : offset + data.shape[1]] = data[tokens]

    def take(
        self,
        memory: Tensor,
        begins: Sequence[int],
        counts: Sequence[int],
        records: Records,
        experts: tuple[int, int],
        out: Tensor,
    ) -> list[int]:
        flat, size, into, end = memory.view(-1).numpy(), records.num_bytes, out.numpy(), 0
        ids_end = records.ids_offset + 4 * records.top_k
        taken = []
        for begin, count in zip(begins, counts):
            found = flat[begin : begin + count * size].reshape(count, size)
            ids = _local(found[:, records.ids_offset : ids_end].view(np.int32), *experts)
            here = np.flatnonzero((ids >= 0).any(1))
            rows = into[end : end + len(here)]
            np.take(found, here, axis=0, out=rows, mode="clip")
            rows[:, records.ids_offset : ids_end].view(np.int32)[:] = ids[here]
            taken.append(len(here))
            end += len(here)
        return taken

    def localize(self, ids: Tensor, experts: tuple[int, int]) -> None:
        found = ids.numpy()
        found[:] = _local(found, *experts)


def _sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs' experts in ascending order, E for none; the pairs in that order; int32 [E + 1] beginnings of the
    experts."""
    ids = ids.flatten()
    ordered, pairs = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=ordered.dtype, device=ids.device)
    return ordered, pairs, torch.searchsorted(ordered, experts, out_int32=True)


def _at(pairs: Tensor, row: Tensor, ids: Tensor) -> Tensor:
    """int32 in the shape of ids: the row of each pair."""
    positions = torch.empty(len(pairs), dtype=torch.int32, device=ids.device)
    positions[pairs] = row.to(torch.int32)
    return positions.view(ids.shape)


def _bytes(x: Tensor) -> np.ndarray:
    """uint8 [T, bytes of a row]; a copy if rows are not contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()


def _local(ids: np.ndarray, first: int, num_local: int) -> np.ndarray:
    local = ids - first
    local[local.view(np.uint32) >= num_local] = -1
    return local
