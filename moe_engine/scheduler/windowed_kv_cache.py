"""KV cache of a model with windowed layers whose KV is bounded: full slots as in any model, and window pages.

A request pins the window pages [window_start, number of its pages). A step that starts at token p reads the windowed
KV of the tokens from p - window + 1 on, so earlier pages are unpinned when a step that starts at p is planned. With
speculation `num_computed` is a lower bound of p.

Each new full page needs a window page: an allocation succeeds if both pools have room. `window_room.py` counts the need
of requests until their end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.radix_cache import Match, Node, RadixCache
from moe_engine.scheduler.slot_allocator import DeferredFreePool, SlotAllocator
from moe_engine.scheduler.window_pages import WindowPages
from moe_engine.scheduler.window_room import WindowRoom
from moe_engine.types import Request, RowWrite


class WindowedSlots(SlotAllocator):
    """Slots whose window pages are dropped when they are freed."""

    __slots__ = ("_windows",)

    def __init__(self, num_slots: int, page_size: int, windows: WindowPages) -> None:
        super().__init__(num_slots, page_size)
        self._windows = windows

    def free(self, slots: list[int], after_step: int) -> None:
        super().free(slots, after_step)
        self._windows.drop(slots[:: self.page_size])


class WindowedRadixCache(RadixCache):
    """A prefix tree whose matches end where all window pages of the preceding window exist."""

    def __init__(
        self, page_size: int, free: Callable[[list[int], int], None], windows: WindowPages, window: int
    ) -> None:
        self._windows = windows
        self._window = window
        super().__init__(page_size, free)

    def peek(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Match:
        found = super().peek(tokens, limit, extra_key, start)
        length = self._usable(found)
        if length == found.length:
            return found
        node, partial = found.node, found.partial
        while node is not None and node.end > length:
            node, partial = node.parent, node
        assert node is not None
        return Match(node, length, partial if node.end < length else None)

    def _usable(self, found: Match) -> int:
        """The last page boundary of a match from which a request can continue."""
        page, mapped = self.page_size, self._windows.page_of
        end = at = found.length
        need = max(0, end - self._window + 1)
        node, run, base = found.node, [], end
        if node is not None and found.partial is not None:
            run, base = found.partial.slots, node.end
        while True:
            while at > base and at > need:
                at -= page
                if run[at - base] not in mapped:
                    end = at
                    need = max(0, end - self._window + 1)
            if at <= need or node is None or node.parent is None:
                return end
            run, node = node.slots, node.parent
            base = node.end


class WindowedKVCacheManager(KVCacheManager):
    """A `KVCacheManager` that also keeps the window pages of all requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.windows = WindowPages(config.num_window_slots, config.page_size)
        self._window = config.window
        super().__init__(config)
        self.window_room = WindowRoom(config, self.windows)

    def _new_slots(self, config: SchedulerConfig) -> SlotAllocator:
        return WindowedSlots(config.num_slots, config.page_size, self.windows)

    def _new_tree(self, config: SchedulerConfig) -> RadixCache:
        if config.disable_radix_cache:
            return super()._new_tree(config)
        return WindowedRadixCache(config.page_size, self.slots.free, self.windows, config.window)

    # -- requests

    def attach(self, request: Request, node: Node) -> None:
        super().attach(request, node)
        request.window_start = max(0, node.end - self._window + 1) // self.page_size
        self.windows.pin(self._pinned(request))

    def detach(self, request: Request) -> None:
        self.windows.unpin(self._pinned(request), 0)  # no step was planned
        request.window_start = 0
        super().detach(request)

    def extend(self, request: Request, count: int) -> list[int] | None:
        used = len(request.slots)
        slots = super().extend(request, count)
        if slots is not None:
            self._assign_behind(request, used)
        return slots

    def make_room(self, num_tokens: int) -> bool:
        before = self.windows.num_evicted
        has_room = self.windows.make_room(num_tokens // self.page_size)
        if self.windows.num_evicted != before:
            self.tree.version += 1
        return has_room and super().make_room(num_tokens)

    def decode_need(self, requests: list[Request], steps: int = 1) -> int:
        for request in requests:
            self._progress(request)  # frees window pages before room is made
        return super().decode_need(requests, steps)

    def reserve_need(self, requests: list[Request], widths: list[int]) -> int:
        for request in requests:
            self._progress(request)
        return super().reserve_need(requests, widths)

    def take_decode_slots(self, requests: list[Request]) -> list[int]:
        slots = super().take_decode_slots(requests)
        if not self._reserves:
            page = self.page_size
            self.windows.assign(slots if page == 1 else [slot for slot in slots if slot % page == 0])
        return slots

    def reserve(self, requests: list[Request], widths: list[int]) -> list[RowWrite]:
        used = [len(request.slots) for request in requests]
        writes = super().reserve(requests, widths)
        for request, before in zip(requests, used):
            self._assign_behind(request, before)
        return writes

    def cache_unfinished(self, request: Request) -> RowWrite | None:
        self._progress(request)
        return super().cache_unfinished(request)

    def release(self, request: Request) -> Node:
        self.windows.unpin(self._pinned(request), self.step)
        request.window_start = 0
        return super().release(request)

    def _replaced(self, request: Request, start: int, present: list[int]) -> None:
        page = self.page_size
        self.windows.replace(request.slots[start : start + len(present) : page], present[::page], self.step)
        self.tree.version += 1

    # -- window pages

    def _pinned(self, request: Request) -> list[int]:
        return request.slots[request.window_start * self.page_size :: self.page_size]

    def _progress(self, request: Request) -> None:
        """Unpins the pages that no step from `num_computed` on reads."""
        page = self.page_size
        start = (request.num_computed - self._window + 1) // page
        first = request.window_start
        if start > first:
            self.windows.unpin(request.slots[first * page : start * page : page], self.step)
            request.window_start = start

    def _assign_behind(self, request: Request, used: int) -> None:
        page = self.page_size
        self.windows.assign(request.slots[-(-used // page) * page :: page])

    # -- steps and integrity

    def take_window_pages(self) -> list[int]:
        return self.windows.take_writes()

    def repeat_window_pages(self, pairs: Sequence[int]) -> None:
        self.windows.repeat_writes(pairs)

    def retire(self, step: int) -> bool:
        self.windows.pool.retire(step)
        return super().retire(step)

    def reset(self) -> None:
        self.windows.reset()
        super().reset()

    def check_windows(self, running: Iterable[Request], owned: set[int]) -> list[str]:
        return self.windows.check((page for r in running for page in self._pinned(r)), owned)

    def window_pool(self) -> tuple[DeferredFreePool, set[int]] | None:
        return self.windows.pool, set(self.windows.page_of.values())
