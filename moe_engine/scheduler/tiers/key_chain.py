"""Keys of the pages of one prefix, computed a part at a time, so that no step waits for the hashes of a long prompt."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.scheduler.tiers.page_keys import page_keys
from moe_engine.scheduler.tiers.tiered_cache import TierNode


class KeyChain:
    """
    Args:
        tokens: radix-cache keys of the whole prefix; they do not change.
        before: key of the page, or root, that ends at `begin`. `end`: whole pages of tokens[begin:end] get keys.
        nodes: nodes of the tree on the way, which get the digests of their last pages.
    """

    def __init__(
        self, tokens: Sequence[int], before: bytes, begin: int, end: int, page_size: int, nodes: Sequence[TierNode] = ()
    ) -> None:
        self._tokens, self._before, self._end, self._size = tokens, before, end, page_size
        self._begin, self._done = begin, begin
        self._keys: list[bytes] = []
        self._nodes = nodes

    @property
    def is_complete(self) -> bool:
        return self._done >= self._end

    def advance(self, num_tokens: int) -> int:
        """Hashes at most this many tokens, in whole pages, at least one. Returns the number hashed."""
        count = max(self._size, num_tokens - num_tokens % self._size)
        stop = min(self._done + count, self._end)
        keys = page_keys(self._before, self._tokens[self._done : stop], self._size)
        if keys:
            self._before = keys[-1]
            self._keys += keys
        hashed, self._done = stop - self._done, stop
        return hashed

    def from_page(self, start: int) -> list[bytes]:
        """The keys of the pages from `start` tokens on, once complete."""
        size = self._size
        for node in self._nodes:
            if node.end > self._begin and not node.end % size:
                node.digest = self._keys[(node.end - self._begin) // size - 1]
        return self._keys[(start - self._begin) // size :]
