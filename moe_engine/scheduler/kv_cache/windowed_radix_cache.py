"""Prefix tree of a model with bounded windows: a match ends where the KV of the preceding window is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from moe_engine.scheduler.kv_cache.radix_cache import Match, Node, RadixCache
from moe_engine.scheduler.kv_cache.window_pages import WindowPages


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
        mapped = self._windows.page_of
        length = self.last_usable(found.length, (slot in mapped for slot in self._pages_before(found)))
        if length == found.length:
            return found
        node, partial = found.node, found.partial
        while node is not None and node.end > length:
            node, partial = node.parent, node
        assert node is not None
        return Match(node, length, partial if node.end < length else None)

    def last_usable(self, end: int, kept: Iterable[bool]) -> int:
        """The last page boundary up to `end` from which a request can continue.

        Args:
            kept: whether the windowed KV of each page before `end` is kept, the last page first.
        """
        at, need = end, max(0, end - self._window + 1)
        for is_kept in kept:
            if at <= need:
                break
            at -= self.page_size
            if not is_kept:
                end = at
                need = max(0, end - self._window + 1)
        return end

    def _pages_before(self, found: Match) -> Iterator[int]:
        """The pages of a match, the last first."""
        page, node = self.page_size, found.node
        if node is not None and found.partial is not None:
            slots = found.partial.slots
            yield from (slots[i] for i in range(found.length - node.end - page, -1, -page))
        while node is not None and node.parent is not None:
            slots = node.slots
            yield from (slots[i] for i in range(len(slots) - page, -1, -page))
            node = node.parent
