"""Permute and unpermute of token rows in numpy (a tenth of torch's call overhead), and in torch for bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Part, Records


class TorchTokenRows:
    """`TokenRows`."""

    name = "torch"

    def valid(self, ids: Tensor, num_experts: int) -> bool:
        if not ids.numel():
            return True
        ordered = np.sort(ids.numpy(), axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        return bool(ordered[:, 0].min() >= -1 and ordered[:, -1].max() < num_experts and not twice.any())

    def route(self, ids: Tensor, num_local: int, takes_part: Tensor) -> tuple[Tensor, list[int]]:
        wanted = np.zeros((len(ids), len(takes_part) + 1), dtype=bool)
        wanted[np.arange(len(ids))[:, None], ids.numpy() // num_local] = True  # -1 // num_local: last column, dropped
        mask = wanted[:, :-1] & takes_part.numpy()
        counts = mask.sum(0)
        positions = np.where(mask, mask.cumsum(0) - 1 + counts.cumsum() - counts, -1)
        return torch.from_numpy(positions), counts.tolist()

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

    def group(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        flat = ids.numpy().ravel()
        order = flat.argsort(kind="stable")  # [N * K], -1 first
        ends = np.bincount(flat + 1, minlength=num_experts + 1).cumsum()  # [E + 1], -1 first
        num_absent = int(ends[0])
        positions = np.empty(len(flat), dtype=np.int64)
        positions[order] = np.arange(-num_absent, len(flat) - num_absent).clip(-1)
        offsets = (ends - num_absent).astype(np.int32)
        return torch.from_numpy(offsets), torch.from_numpy(positions).view(ids.shape)

    def spread(self, data: Tensor, positions: Tensor, out: Tensor) -> None:
        found = positions.numpy()
        tokens, choices = (found >= 0).nonzero()
        sources = np.empty(len(out), dtype=np.int64)
        sources[found[tokens, choices]] = tokens
        torch.index_select(data, 0, torch.from_numpy(sources), out=out)

    def sum_rows(self, rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        found = positions.numpy()
        valid = found >= 0
        chosen = found[valid]
        offsets = np.zeros(len(found) + 1, dtype=np.int64)
        np.cumsum(valid.sum(1), out=offsets[1:])
        scale = None if weights is None else torch.from_numpy(weights.numpy()[valid])
        if scale is not None and rows.dtype != torch.float32:
            # the weights must have the rows' dtype: each row is listed twice, with the weight's high and low half
            chosen, offsets, scale = chosen.repeat(2), offsets * 2, halves(scale, rows.dtype).flatten()
        # F.embedding_bag without its checks: scale_grad_by_freq, mode (0: sum), sparse, weights, include_last_offset
        return torch.embedding_bag(
            rows, torch.from_numpy(chosen), torch.from_numpy(offsets), False, 0, False, scale, True
        )[0]


def halves(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in a narrower dtype: float32 [...] -> [..., 2] whose sum is the weight to twice the dtype's precision."""
    high = weights.to(dtype)
    return torch.stack((high, (weights - high.float()).to(dtype)), dim=-1)


def _bytes(x: Tensor) -> np.ndarray:
    """uint8 [T, bytes of a row]; a copy if rows are not contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()


def _local(ids: np.ndarray, first: int, num_local: int) -> np.ndarray:
    local = ids - first
    local[local.view(np.uint32) >= num_local] = -1
    return local
