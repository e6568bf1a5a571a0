"""``torch.cuda.CUDAGraph``: captured launches, and their replay over the captured memory.

During capture launches run, so that shapes are known; then all memory is restored, so a capture computes nothing.
Memory allocated and released during capture belongs to the graph's pool. The next graph of the pool may use this
memory, so a replay poisons the memory of the other graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tests.simulated_cuda import failures, observer, order, profiler
from tests.simulated_cuda.memory import MEMORY, Block, poison
from tests.simulated_cuda.streams import HazardError, current

_pools: dict[Any, list[Graph]] = {}
_handles = count(1)


def pool_handle() -> tuple[int, int]:
    """``torch.cuda.graph_pool_handle``."""
    return (0, next(_handles))


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._launches: list[Callable[[], None]] = []
        self._blocks: list[Block] = []  # allocated during capture
        self._before: dict[int, tuple[Block, Tensor]] = {}  # earlier contents of older blocks
        self._stream: Any = None
        self._pool: Any = None
        self._touched: dict[tuple[Block, int, int, bool], str] = {}
        self._replayed: tuple[Any, int] = (None, 0)
        """Stream and tick of the last replay."""
        self.accesses: dict[Block, list[order.Access]] = {}
        """Streams of the graph's launches, to order launches of several streams."""
        self.streams: list[Any] = []
        """All streams of the capture."""
        self.recording = False
        self.names: list[str] = []
        """Of its launches."""
        self.num_replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        self._stream, self._pool = current(), pool or pool_handle()
        if self._stream.capturing is not None:
            raise RuntimeError("CUDA error: stream is already capturing")
        self._stream.capturing = self
        self.streams, self.recording = [self._stream], True
        _pools.setdefault(self._pool, []).append(self)

    @torch.inference_mode()
    def capture_end(self) -> None:
        for stream in self.streams:
            stream.capturing = None
        self.recording = False
        self.accesses.clear()
        for block, content in self._before.values():
            block.host.copy_(content)
        for block in self._blocks:
            poison(block)
        self._before.clear()
        if any(not self._stream.knows(stream, stream.clock[stream.number]) for stream in self.streams):
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def taken(self, block: Block) -> None:
        """Records an allocation during capture."""
        block.pooled = True
        self._blocks.append(block)

    def touches(
        self, block: Block, part: order.Extent, writes: bool, stream: Any, tick: int, what: str,
        rows: Callable[[], order.Extent] | None = None,
    ) -> None:  # fmt: skip
        """Records that a launch reads or writes bytes of a block in every replay. rows: bytes of it by the values that
        an index has then."""
        access = order.Access(part, stream, tick, writes, what)
        self.accesses[block] = order.behind(self.accesses.get(block, []), access)
        if writes:
            self.keep(block)
        if rows is None:
            self._touched.setdefault((block, part.begin, part.end, writes), what)
        else:
            self.add(lambda: self._touch(block, rows(), writes, what))

    def _touch(self, block: Block, part: order.Extent, writes: bool, what: str) -> None:
        if block.managed is None and not block.pooled:
            raise HazardError(f"a replayed {what} {'writes to' if writes else 'reads'} memory that was given back")
        order.touch(block, part, writes, *self._replayed, what)

    def keep(self, block: Block) -> None:
        """Saves a block before a launch writes to it."""
        if (
            observer.observer is None
            and not block.shared
            and block not in self._blocks
            and id(block) not in self._before
        ):
            self._before[id(block)] = block, block.host.clone()

    def add(self, launch: Callable[[], None]) -> None:
        """Adds a launch over host memory of the tensors, for replays."""
        if observer.observer is None:
            self._launches.append(launch)

    def replay(self) -> None:
        if self._stream is None or self._stream.capturing is self:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        MEMORY.collect()
        for graph in _pools[self._pool]:
            graph.poison()
        stream = current()
        self._replayed = stream, stream.launch()
        failures.raise_broken()
        profiler.launches.update(self.names)
        self.num_replays += 1
        if observer.observer is not None:
            observer.observer.replayed(self)
        for (block, begin, end, writes), what in self._touched.items():
            self._touch(block, order.Extent(begin, end), writes, what)
        with torch.inference_mode():
            for launch in self._launches:
                launch()

    @torch.inference_mode()
    def poison(self) -> None:
        """Poisons freed memory of the pool, which may belong to another graph."""
        for block in self._blocks:
            if block.managed is None:
                poison(block)

    def reset(self) -> None:
        self._launches.clear()
        if self._pool in _pools and self in _pools[self._pool]:
            _pools[self._pool].remove(self)

    def pool(self) -> Any:
        return self._pool

    def enable_debug_mode(self) -> None:
        """No effect: there is no debug output."""
