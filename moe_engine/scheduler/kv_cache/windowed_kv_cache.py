"""KV cache of a model with windowed layers whose KV is bounded: full slots as in any model, and window pages.

A request pins the window pages [window_start, number of its pages). A step that starts at token p reads the windowed
KV of the tokens from p - window + 1 on, so earlier pages are unpinned when a step that starts at p is planned. With
speculation `num_computed` is a lower bound of p.

Each new full page needs a window page: an allocation succeeds if both pools have room. `window_room.py` counts the need
of requests until their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.kv_cache.kv_connector import KVConnector
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.kv_cache.slot_allocator import DeferredFreePool, SlotAllocator
from moe_engine.scheduler.kv_cache.window_pages import WindowPages
from moe_engine.scheduler.kv_cache.window_room import WindowRoom
from moe_engine.scheduler.kv_cache.windowed_radix_cache import WindowedRadixCache
from moe_engine.scheduler.tiers.window_tier import WindowHostTier
from moe_engine.types import Request, RowWrite

EARLIER_TOKENS = 32
"""The next turn of a conversation may part from the prompt before it by so many tokens before its end: a chat template
renders the beginning of an answer in another way than the answer."""


class WindowedSlots(SlotAllocator):
    """Slots whose window pages are dropped when they are freed."""

    __slots__ = ("_windows",)

    def __init__(self, num_slots: int, page_size: int, windows: WindowPages) -> None:
        super().__init__(num_slots, page_size)
        self._windows = windows

    def free(self, slots: list[int], after_step: int) -> None:
        super().free(slots, after_step)
        self._windows.drop(slots[:: self.page_size])


class WindowedKVCacheManager(KVCacheManager):
    """A `KVCacheManager` that also keeps the window pages of all requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.windows = WindowPages(config.num_window_slots, config.page_size)
        self._window = config.window
        super().__init__(config)
        self.window_room = WindowRoom(config, self.windows)

    def _new_slots(self, config: SchedulerConfig) -> SlotAllocator:
        return WindowedSlots(config.num_slots, config.page_size, self.windows)

    def _new_connector(self, config: SchedulerConfig) -> KVConnector:
        make_room = partial(KVCacheManager.make_room, self)
        return WindowHostTier(
            config.host_tier_tokens, self.slots, make_room, self.windows, config.window, config.host_window_slots
        )

    def _new_tree(self, config: SchedulerConfig) -> RadixCache:
        if config.disable_radix_cache:
            return super()._new_tree(config)
        return WindowedRadixCache(config.page_size, self.slots.free, self.windows, config.window)

    # -- requests

    def attach(self, request: Request, node: Node) -> None:
        super().attach(request, node)
        request.window_start = max(0, node.end - self._window + 1) // self.page_size
        pages = self._pinned(request)
        self.windows.pin(pages)
        self.windows.resume(pages)

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
        write = super().cache_unfinished(request)
        end = min(len(request.prompt_ids), request.num_in_tree)
        if self.connector is not None and not request.output_ids and request.num_computed >= len(request.prompt_ids):
            self.windows.resume(request.slots[self._first_page(end) : end : self.page_size])
        return write

    def release(self, request: Request) -> Node:
        self.windows.unpin(self._pinned(request), self.step)
        request.window_start = 0
        node = super().release(request)
        if self.connector is not None:
            self.windows.resume(self._last_window(node))
        return node

    def _replaced(self, request: Request, start: int, present: list[int]) -> None:
        page = self.page_size
        self.windows.replace(request.slots[start : start + len(present) : page], present[::page], self.step)
        self.tree.version += 1

    # -- window pages

    def _last_window(self, node: Node) -> list[int]:
        """The pages that a request reads that continues from `node`, or a little before."""
        first, found = self._first_page(node.end), list[int]()
        while node.parent is not None and node.end > first:
            found += node.slots[max(0, first - node.parent.end) :: self.page_size]
            node = node.parent
        return found

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

    def _first_page(self, end: int) -> int:
        """The first token of these pages."""
        return max(0, end - self._window + 1 - EARLIER_TOKENS) // self.page_size * self.page_size

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
        pinned = [page for request in running for page in self._pinned(request)]
        if isinstance(self.connector, WindowHostTier):
            pinned += self.connector.held_window_pages()
        return self.windows.check(pinned, owned)

    def window_pool(self) -> tuple[DeferredFreePool, set[int]] | None:
        return self.windows.pool, {*self.windows.page_of.values(), *self.windows.loading}
