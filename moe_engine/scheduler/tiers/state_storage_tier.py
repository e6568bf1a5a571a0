"""Storage below the host-RAM tier of a model with a state for each request: `StorageTier`, and states.

A state is stored under the key of the page that it follows. A lookup counts the pages up to the last one with a state,
and a fetch reads that state first: its pages are of no use without it.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.scheduler.kv_cache.state_snapshots import NONE
from moe_engine.scheduler.tiers.storage_tier import Prefetch, StorageTier
from moe_engine.scheduler.tiers.tiered_snapshots import TieredSnapshots, TierStateNode
from moe_engine.types import KVBackup, KVFetch
from moe_engine.types.kv_ops import LAST_STATE, NO_STATE

MOST_BACKUPS = 8
"""Max states that are being backed up; further states are not stored."""


class StateStorageTier(StorageTier):
    """A `StorageTier` with states. `use_entries` must be called before anything else."""

    _tree: TieredSnapshots

    def use_entries(self, alloc: Callable[[], int], give: Callable[[int], None]) -> None:
        """
        Args:
            alloc: an entry for a state that is read, evicting if necessary; NONE if there is no room.
            give: frees an entry.
        """
        self._alloc_entry, self._give_entry = alloc, give
        self._pinned_entries: set[int] = set()
        """Entries that a backup reads; they are freed when it ends."""
        self._freed_entries: set[int] = set()
        """Pinned entries whose nodes are gone."""
        self._orphan_entries: dict[int, int] = {}
        """Entries of fetches for which no request waits any more."""

    # -- backups

    def state_stored(self, node: TierStateNode) -> None:
        """Backs up a state that the host tier stores with the next plan, after that store."""
        if len(self._pinned_entries) >= MOST_BACKUPS:
            return
        key = self._digest(node, self._tree.namespace_of(node))
        if key is None:
            return
        self._num_ops += 1
        op = self._backups[self._num_ops] = KVBackup(self._num_ops, [key], [], node.entry)
        self._new_backups.append(op)
        self._pinned_entries.add(node.entry)

    def release_entry(self, entry: int) -> bool:
        """Whether an entry that leaves the tree is free immediately."""
        if entry not in self._pinned_entries:
            return True
        self._freed_entries.add(entry)
        return False

    def _end_backup(self, op: KVBackup, num_pages: int) -> None:
        if op.state == NO_STATE:
            super()._end_backup(op, num_pages)
            return
        self._pinned_entries.discard(op.state)
        if op.state in self._freed_entries:
            self._freed_entries.discard(op.state)
            self._give_entry(op.state)

    # -- prefetching

    def _fetch_of(self, prefetch: Prefetch, pages: list[int]) -> KVFetch:
        return KVFetch(prefetch.op, prefetch.keys, list(pages), prefetch.state if pages else LAST_STATE)

    def _memory_for(self, prefetch: Prefetch, count: int) -> list[int] | None:
        """All of the pages, and an entry for the state after them."""
        if count > self._most - self._num_fetching:
            return None
        pages = super()._memory_for(prefetch, count)
        if pages is None:
            return None
        entry = self._alloc_entry()
        if entry == NONE:
            self._give(pages)
            return None
        prefetch.state = entry
        return pages

    def _end(self, prefetch: Prefetch) -> None:
        is_whole, entry = not prefetch.pages, prefetch.state
        super()._end(prefetch)
        if entry == NO_STATE:
            return
        prefetch.state = NO_STATE
        waiting = prefetch.entry
        tokens = waiting.prefix_keys[: prefetch.start + len(prefetch.keys) * self._tree.page_size]
        if not is_whole or not self._tree.add_state(tokens, entry, waiting.request.namespace):
            self._give_entry(entry)

    def _stop(self, prefetch: Prefetch) -> None:
        entry = prefetch.state
        super()._stop(prefetch)
        if prefetch.op in self._orphans and entry != NO_STATE:
            self._orphan_entries[prefetch.op], prefetch.state = entry, NO_STATE

    def _end_orphan(self, number: int) -> None:
        super()._end_orphan(number)
        if number in self._orphan_entries:
            self._give_entry(self._orphan_entries.pop(number))

    # -- failures

    def held_entries(self, *, flushed: bool = False) -> list[int]:
        """Entries that are of no node and not free. `flushed`: the nodes of all entries are gone."""
        if flushed:
            self._freed_entries |= self._pinned_entries
        reading = [prefetch.state for prefetch in self._prefetches.values() if prefetch.state != NO_STATE]
        return [*self._freed_entries, *self._orphan_entries.values(), *reading]
