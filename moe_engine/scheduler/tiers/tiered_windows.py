"""Radix cache of a model with bounded windows whose evicted nodes stay in the tree with KV and windows in host memory.

A request continues where the KV of all tokens before is kept, on the device or in the host tier, and the windowed KV of
the last window. Both are loaded: the KV of nodes that are not on the device, and missing pages of the last window. If
the KV is still on the device, only window pages are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from moe_engine.scheduler.kv_cache.radix_cache import Match, Node
from moe_engine.scheduler.kv_cache.window_pages import WindowPages
from moe_engine.scheduler.kv_cache.windowed_radix_cache import WindowedRadixCache
from moe_engine.scheduler.tiers.host_windows import NONE, HostWindows
from moe_engine.scheduler.tiers.tiered_cache import TieredCache, TierNode


class Page(NamedTuple):
    """A page of a prefix: its slot on the device and its page of places, or NONE."""

    slot: int
    place: int


class Reach(NamedTuple):
    """What follows a match on the device.

    `length`: where a request can continue after a load; `begin`: the KV of the tokens from there on is not on the
    device; `base`: the last node on the device of the prefix; `window`: the pages of its last window, the last first;
    `load`: a load in progress that comes first, or 0.
    """

    length: int
    begin: int = 0
    base: Node | None = None
    window: tuple[Page, ...] = ()
    load: int = 0


class TieredWindows(TieredCache, WindowedRadixCache):
    def __init__(
        self,
        page_size: int,
        free: Callable[[list[int], int], None],
        store: Callable[[list[int]], list[int] | None],
        release: Callable[[list[int]], None],
        windows: WindowPages,
        window: int,
        host: HostWindows,
    ) -> None:
        self._store, self._release = store, release
        self._host = host
        WindowedRadixCache.__init__(self, page_size, free, windows, window)

    # -- loads

    def peek_absent(self, found: Match, tokens: list[int], limit: int) -> tuple[int, int]:
        reach = self.reach(found, tokens, limit)
        return reach.length - found.length, reach.load

    def reach(self, found: Match, tokens: list[int], limit: int) -> Reach:
        limit -= limit % self.page_size
        kv, behind = self._walk_kv(found, tokens, limit)
        if kv.node is None:
            return Reach(found.length)
        absent, end = list[tuple[TierNode, int]](), kv.length
        for child in behind:
            same = self._common(child.tokens, tokens, end, limit)
            if child.load:
                return Reach(end + same, load=child.load)
            absent.append((child, same))
            end += same
        kept = (self._is_kept(page) for page in self._pages_to(kv, absent))
        length = self.last_usable(end, kept)
        if length <= found.length:
            return Reach(found.length)
        size = self.page_size
        pages = self._pages_to(kv, absent)
        first, last = max(0, length - self._window + 1) // size, length // size
        window = tuple(islice(pages, end // size - last, end // size - first))
        for page in window:
            if page.slot not in self._windows.page_of and (load := self._host.loading.get(self._host.find(*page), 0)):
                return Reach(length, load=load)
        base: Node = kv.node if kv.partial is None or length <= kv.node.end else kv.partial
        while base.parent is not None and base.parent.end >= length:
            base = base.parent
        return Reach(length, kv.length, base, window)

    def _is_kept(self, page: Page) -> bool:
        return page.slot in self._windows.page_of or self._host.find(*page) != NONE

    def _pages_to(self, kv: Match, absent: list[tuple[TierNode, int]]) -> Iterator[Page]:
        """The pages of a prefix, the last first: those of absent nodes, with the length used of each, then of a match
        on the device."""
        size = self.page_size
        for child, count in reversed(absent):
            places = child.places or []
            yield from (Page(NONE, places[i] // size) for i in range(count - size, -1, -size))
        node, partial = kv.node, kv.partial
        if node is not None and partial is not None:
            yield from self._pages_of(partial, kv.length - node.end)
        while node is not None and node.parent is not None:
            yield from self._pages_of(node, len(node.slots))
            node = node.parent

    def _pages_of(self, node: Node, count: int) -> Iterator[Page]:
        assert isinstance(node, TierNode)
        size, slots, places = self.page_size, node.slots, node.places
        for i in range(count - size, -1, -size):
            yield Page(slots[i], NONE if places is None else places[i] // size)

    # -- eviction

    def _leave_device(self, node: TierNode) -> None:
        slots = node.slots
        super()._leave_device(node)
        if node.places is not None:
            size, windows = self.page_size, self._windows
            pages = [windows.page_of[slot] if slot in windows.resumed else NONE for slot in slots[::size]]
            self._host.left(slots[::size], [place // size for place in node.places[::size]], pages)
