"""Events of the radix cache for KV-aware routers (`--kv-events-config`).

The cache calls a `KVEventLog` when blocks (pages) become readable on the device or leave it; the core sends the
collected events after each step. Events have the shape of vLLM's and SGLang's messages: tagged arrays. A block's hash
covers its tokens, those before it, and its namespace (adapter and extra key).

Without the flag the cache has no log, and an insertion or eviction costs one comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from hashlib import blake2b
from typing import Any, Protocol

MEDIUM = "GPU"
"""Blocks of the KV cache itself; also on a CPU, because subscribers expect this name."""
_PAIRS = 1 << 32
Event = tuple[Any, ...]


class CachedRun(Protocol):
    """The fields of a cache node that are read here."""

    @property
    def parent(self) -> CachedRun | None: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def serial(self) -> int: ...


class KVEventLog:
    """Collects events of one cache.

    Args:
        page_size: tokens of a block.
        bigrams: the cache's keys are pairs of neighbors (`prefix_keys`); events name the first of each.
    """

    def __init__(self, page_size: int, bigrams: bool = False) -> None:
        self._page_size = page_size
        self._bigrams = bigrams
        self._hashes: dict[int, list[int]] = {}
        """Hashes by the serial number of a node."""
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- called by the cache

    def stored(self, node: CachedRun, namespace: Hashable) -> None:
        """Records that the run of a node is readable."""
        assert node.parent is not None
        above = self._hashes.get(node.parent.serial)
        parent = above[-1] if above else None
        tokens = [token // _PAIRS for token in node.tokens] if self._bigrams else list(node.tokens)
        hashes: list[int] = []
        size, last = self._page_size, parent
        for begin in range(0, len(tokens), size):
            last = _block_hash(last, node.tokens[begin : begin + size], namespace)
            hashes.append(last)
        self._hashes[node.serial] = hashes
        lora_id = namespace[0] if isinstance(namespace, tuple) else None
        self._events.append(("BlockStored", hashes[:], parent, tokens, size, lora_id, MEDIUM))

    def removed(self, node: CachedRun, keep: int = 0) -> None:
        """Records that the run of a node was evicted except its first `keep` tokens."""
        hashes = self._hashes.get(node.serial)
        if hashes is None:
            return
        gone = hashes[keep // self._page_size :]
        if keep:
            del hashes[keep // self._page_size :]
        else:
            del self._hashes[node.serial]
        if gone:
            self._events.append(("BlockRemoved", gone[::-1], MEDIUM))  # child blocks before their parents

    def split(self, node: CachedRun, upper: CachedRun) -> None:
        """Records that the head of a node has become the node `upper`."""
        hashes = self._hashes.get(node.serial)
        if hashes is not None:
            count = len(upper.tokens) // self._page_size
            self._hashes[upper.serial], self._hashes[node.serial] = hashes[:count], hashes[count:]

    def cleared(self) -> None:
        """Records that the cache was cleared."""
        self._hashes.clear()
        self._events.append(("AllBlocksCleared",))


def _block_hash(parent: int | None, keys: list[int], namespace: Hashable) -> int:
    """Hash of a block, 63 bits."""
    digest = blake2b(array("q", keys).tobytes(), digest_size=8)
    digest.update(repr(namespace if parent is None else parent).encode())
    return int.from_bytes(digest.digest(), "big") >> 1
