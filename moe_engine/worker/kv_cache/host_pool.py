"""Host memory of the KV tiers: the rows of one rank by place, in one of two layouts (`--hicache-mem-layout`).

page_first: a place's row has the tensors of all layers, so the rows of a page are one piece of memory, which storage
reads and writes directly. layer_first: an array for each tensor of the KV pool, SGLang's default; a page of the storage
is then gathered. The bytes of a page are the same in both.

Legend: W bytes of a token in all layers of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_engine.worker.device_stream import DeviceStream

LAYOUTS = ("page_first", "layer_first")


class HostPool:
    """
    Args:
        widths: bytes of a token in each tensor of the KV pool, in the order of its rows.
    """

    def __init__(self, num_places: int, widths: Sequence[int], layout: str, stream: DeviceStream) -> None:
        parts = [sum(widths)] if layout == "page_first" else list(widths)
        ends = [sum(parts[: i + 1]) for i in range(len(parts))]
        self.width = ends[-1]
        self._parts = [
            (stream.host_bytes(num_places, width), end - width, end) for width, end in zip(parts, ends) if width
        ]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part, _, _ in self._parts)

    def put(self, places: Tensor, rows: Tensor) -> None:
        """Host rows [n, W] to places [n]."""
        for part, begin, end in self._parts:
            part.index_copy_(0, places, rows[:, begin:end])

    def take(self, places: Tensor) -> Tensor:
        """The rows [n, W] of places [n], new memory."""
        found = [part.index_select(0, places) for part, _, _ in self._parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def take_into(self, places: Tensor, out: Tensor) -> None:
        """`take` to out [n, W]."""
        for part, begin, end in self._parts:
            if len(self._parts) == 1:
                torch.index_select(part, 0, places, out=out)
            else:
                out[:, begin:end] = part.index_select(0, places)

    def download(self, rows: Tensor, places: list[int]) -> None:
        """Device rows [n, W] to places, one copy for each run of neighboring places; on the current stream."""
        for part, left, right in self._parts:
            columns = rows if len(self._parts) == 1 else rows[:, left:right].contiguous()
            for begin, end in runs(places):
                part[places[begin] : places[begin] + end - begin].copy_(columns[begin:end], non_blocking=True)

    def upload(self, places: list[int], rows: Tensor) -> None:
        """The inverse of `download`."""
        for part, left, right in self._parts:
            columns = rows if len(self._parts) == 1 else torch.empty_like(rows[:, left:right])
            for begin, end in runs(places):
                columns[begin:end].copy_(part[places[begin] : places[begin] + end - begin], non_blocking=True)
            if len(self._parts) > 1:
                rows[:, left:right] = columns

    # -- pages of the storage

    def read_page(self, first: int, num_tokens: int) -> memoryview:
        """The bytes of `num_tokens` places from `first` on, [num_tokens, W]."""
        found = [part[first : first + num_tokens] for part, _, _ in self._parts]
        return _bytes_of(found[0] if len(found) == 1 else torch.cat(found, 1))

    def page_target(self, first: int, num_tokens: int) -> memoryview:
        """Memory for the bytes of a page: the places themselves, or memory for `write_page`."""
        if len(self._parts) == 1:
            return _bytes_of(self._parts[0][0][first : first + num_tokens])
        return memoryview(bytearray(num_tokens * self.width))

    def write_page(self, first: int, num_tokens: int, page: memoryview) -> None:
        """Completes a page that was written to its `page_target`."""
        if len(self._parts) == 1:
            return
        rows = torch.frombuffer(page, dtype=torch.uint8).view(num_tokens, self.width)
        for part, begin, end in self._parts:
            part[first : first + num_tokens].copy_(rows[:, begin:end])


def _bytes_of(rows: Tensor) -> memoryview:
    memory: Any = rows.numpy()
    return memoryview(memory).cast("B")


def runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of indices whose places are neighbors, ascending."""
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    yield from pairwise([0, *cuts, len(places)])
