"""Storage below the host-RAM tier (`--hicache-storage-backend`): the scheduler's bookkeeping.

Nodes that the host tier has stored are backed up, a page at a time. A waiting request whose prefix continues beyond
device and host takes two operations of the storage: a lookup of the number of its pages, and a read of them to the
host. Read pages become absent nodes of the tree, which `HostTier` loads like nodes that it evicted itself.

The workers run the operations on threads and report their progress; a report here is the minimum over all ranks. The
pages of an operation stay with it until its last report, even if the request ends or the tree is flushed: a hanging
read holds host memory and nothing else. The policy bounds the wait of a request, and `StoragePause` the number of
requests that wait for a storage that hangs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from moe_engine.scheduler.kv_cache.radix_cache import Node
from moe_engine.scheduler.tiers.key_chain import KeyChain
from moe_engine.scheduler.tiers.page_keys import page_keys, root_key
from moe_engine.scheduler.tiers.storage_pause import StoragePause
from moe_engine.scheduler.tiers.tiered_cache import TieredCache, TierNode
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import NO_LORA, KVBackup, KVFetch, KVOps, KVReport
from moe_engine.types.kv_ops import NO_STATE
from moe_engine.types.step_settings import StorageSettings

COMPLETE_SECONDS = 60.0
"""Longest wait under wait_complete."""
MAX_LOOKUPS = 64
"""Max concurrent lookups; further requests begin their lookup when they reach admission."""
HASH_TOKENS = 4096
"""Max tokens of waiting prompts that are hashed for a step (about 0.2 ms), while requests run."""
SHARE_OF_HOST = 2
"""Fetches, and backups, hold at most 1 / this of the host pages each."""


class Stage(enum.Enum):
    """Stage of a request's prefetch."""

    KEYS = "keys"
    LOOKUP = "lookup"
    FETCH = "fetch"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Prefetch:
    """Prefetch of one waiting request: pages from `start` tokens on."""

    entry: Waiting
    start: int
    chain: KeyChain
    deadline: float
    keys: list[bytes] = field(default_factory=list)
    stage: Stage = Stage.KEYS
    op: int = 0
    pages: list[int] = field(default_factory=list)
    """Host pages that are being read into and belong to no node."""
    state: int = NO_STATE
    """Host entry for the state after the last page, if the model has states (`state_storage_tier`)."""


class StorageTier:
    """
    Args:
        alloc: host pages for a fetch, evicting if necessary; None if there is no room.
        free: gives host pages back to the host tier.
        num_pages: size of the host tier.
        bigrams: whether the tree's keys are pairs of tokens.
    """

    def __init__(
        self,
        settings: StorageSettings,
        tree: TieredCache,
        alloc: Callable[[int], list[int] | None],
        free: Callable[[list[int]], None],
        num_pages: int,
        bigrams: bool,
    ) -> None:
        self.settings = settings
        self._tree, self._alloc, self._free = tree, alloc, free
        self.clock = time.monotonic
        self._most = max(1, num_pages // SHARE_OF_HOST)
        self._bigrams = bigrams
        self._weights = ""
        self._adapters: dict[int, str] = {}
        self._num_ops = 0
        self._prefetches: dict[int, Prefetch] = {}
        """Lookups and fetches in progress, by operation."""
        self._hashing: list[Prefetch] = []
        """Prefetches whose keys are being computed."""
        self.max_hash_tokens = HASH_TOKENS
        self._hash_tokens = 0
        """Tokens that may still be hashed before the next step."""
        self.pause = StoragePause()
        self._last_key = b""
        """A key of the last lookup, for the tries of a pause."""
        self._tries: set[int] = set()
        self._orphans: dict[int, list[int]] = {}
        """Pages of fetches for which no request waits any more."""
        self._backups: dict[int, KVBackup] = {}
        self.pinned: set[int] = set()
        """Host pages that a backup reads; they are freed when it ends."""
        self._freed: set[int] = set()
        """Pinned pages whose nodes are gone."""
        self._num_fetching = 0
        self._new_fetches: list[KVFetch] = []
        self._new_backups: list[KVBackup] = []
        self._new_stops: list[int] = []
        self.num_backed_up_tokens = 0

    @property
    def has_new_ops(self) -> bool:
        return bool(self._new_fetches or self._new_backups or self._new_stops)

    def poll(self) -> int:
        """Number of lookups and fetches that requests wait for. Those of requests that have left the queue are
        stopped."""
        for prefetch in [p for p in (*self._hashing, *self._prefetches.values()) if not p.entry.is_queued]:
            self._stop(prefetch)
        return len(self._hashing) + len(self._prefetches)

    @property
    def num_open(self) -> int:
        """Operations without their last report."""
        return len(self._hashing) + len(self._prefetches) + len(self._orphans) + len(self._backups)

    def take_ops(self, ops: KVOps | None) -> KVOps | None:
        """Adds the operations of the next plan."""
        if not self.has_new_ops:
            return ops
        ops = ops or KVOps()
        ops.fetches.extend(self._new_fetches)
        ops.backups.extend(self._new_backups)
        # ascending: a worker regards a number below the last one as begun, and does not report it
        ops.stops.extend(sorted(set(self._new_stops)))
        self._new_fetches, self._new_backups, self._new_stops = [], [], []
        return ops

    # -- keys

    def renew(self, weights: str) -> None:
        """Switches to keys of other weights. The tree must be empty."""
        self._weights = weights

    def _digest(self, node: Node, namespace: Hashable) -> bytes | None:
        """The key of the page that ends with `node`; None if its adapter has no fingerprint."""
        path: list[TierNode] = []
        walk: Node | None = node
        while walk is not None:
            assert isinstance(walk, TierNode)
            if walk.digest is not None:
                break
            path.append(walk)
            walk = walk.parent
        digest = walk.digest if isinstance(walk, TierNode) else self._root(namespace)
        if digest is None:
            return None
        for part in reversed(path):
            if part.tokens:
                digest = page_keys(digest, part.tokens, self._tree.page_size)[-1]
            part.digest = digest
        return digest

    def _root(self, namespace: Hashable) -> bytes | None:
        adapter, own = "", namespace
        if isinstance(namespace, tuple):
            lora_id, own = namespace
            if not (adapter := self._adapters.get(lora_id, "")):
                return None
        return root_key(self._weights, adapter, own, self._tree.page_size, self._bigrams)

    # -- backups

    def stored(self, node: TierNode, pages: list[int]) -> None:
        """Backs up a node that the host tier stores with the next plan, after that store."""
        if len(self.pinned) + len(pages) > self._most:
            return
        namespace = self._tree.namespace_of(node)
        assert node.parent is not None
        before = self._digest(node.parent, namespace)
        if before is None:
            return
        keys = page_keys(before, node.tokens, self._tree.page_size)
        node.digest = keys[-1]
        self._num_ops += 1
        op = self._backups[self._num_ops] = KVBackup(self._num_ops, keys, pages)
        self._new_backups.append(op)
        self.pinned.update(pages)

    def release(self, pages: list[int]) -> list[int]:
        """The host pages, among those that leave the tree, that are free immediately."""
        if not self.pinned:
            return pages
        now = [page for page in pages if page not in self.pinned]
        self._freed.update(page for page in pages if page in self.pinned)
        return now

    # -- prefetching

    def begin(self, entry: Waiting) -> None:
        """Begins a lookup for a waiting request, once, if enough of its prefix is missing."""
        if entry.prefetch is not None:
            return
        request, tree, size = entry.request, self._tree, self._tree.page_size
        if request.lora_id != NO_LORA and request.lora_key:
            self._adapters[request.lora_id] = request.lora_key
        limit = entry.limit - entry.limit % size
        found = entry.matched(tree)
        start = found.length + tree.peek_absent(found, entry.prefix_keys, entry.limit)[0]
        tree.touch_absent(found, entry.prefix_keys, entry.limit)
        if limit - start < max(size, self.settings.threshold):
            return
        if self.pause.is_on or len(self._hashing) + len(self._prefetches) >= MAX_LOOKUPS:
            return
        chain = self._chain(entry, found.node, limit)
        if chain is None:
            return
        wait = COMPLETE_SECONDS
        if self.settings.policy == "timeout":
            wait = self.settings.timeout_base + self.settings.timeout_per_1024 * (limit - start) / 1024
        prefetch = entry.prefetch = Prefetch(entry, start, chain, self.clock() + wait)
        self._hashing.append(prefetch)
        self._hash()

    def _chain(self, entry: Waiting, node: Node | None, limit: int) -> KeyChain | None:
        """The keys of a prefix, from the last node on that has its digest; None if its adapter has no fingerprint."""
        nodes: list[TierNode] = []
        while isinstance(node, TierNode) and node.digest is None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        digest = node.digest if isinstance(node, TierNode) else None
        begin = node.end if node is not None and digest is not None else 0
        before = digest or self._root(entry.request.namespace)
        if before is None:
            return None
        return KeyChain(entry.prefix_keys, before, begin, limit, self._tree.page_size, nodes)

    def next_step(self, running: bool) -> None:
        """Goes on with the keys of waiting prompts; without limit if no request runs."""
        self._watch()
        self._hash_tokens = self.max_hash_tokens if running else 1 << 62
        if self._hashing:
            self._hash()

    def _watch(self) -> None:
        """Pauses the lookups of a storage that hangs, and tries it again."""
        now = self.clock()
        if self.pause.begins(now, len(self._prefetches) + len(self._orphans)):
            self._stop_all()
        if self._last_key and self.pause.must_try(now):
            self._num_ops += 1
            self._tries.add(self._num_ops)
            self._orphans[self._num_ops] = []  # no request waits for it
            self._new_fetches.append(KVFetch(self._num_ops, [self._last_key], []))

    def _hash(self) -> None:
        """Computes keys as far as the step may, oldest prompt first, and begins the lookups of complete ones."""
        while self._hashing and self._hash_tokens > 0:
            prefetch = self._hashing[0]
            if not prefetch.entry.is_queued:
                self._stop(prefetch)
                continue
            self._hash_tokens -= prefetch.chain.advance(self._hash_tokens)
            if prefetch.chain.is_complete:
                del self._hashing[0]
                prefetch.stage, prefetch.keys = Stage.LOOKUP, prefetch.chain.from_page(prefetch.start)
                self._last_key = prefetch.keys[0]
                self._send(prefetch, [])

    def must_wait(self, entry: Waiting) -> bool:
        """Whether a request that could be admitted waits for storage, by the policy; if not, it uses the pages that
        have arrived."""
        self.begin(entry)
        prefetch = entry.prefetch
        if prefetch is None or prefetch.stage is Stage.ENDED:
            return False
        if self.settings.policy != "best_effort" and self.clock() < prefetch.deadline:
            return True
        self._stop(prefetch)
        return False

    def reported(self, reports: Iterable[KVReport]) -> None:
        """Applies progress of operations, the minimum over all ranks."""
        for report in reports:
            if report.id in self._backups:
                if report.ended:
                    self._end_backup(self._backups.pop(report.id), report.num_pages)
                continue
            prefetch = self._prefetches.get(report.id)
            self.pause.reported(report.num_pages if prefetch is not None and prefetch.stage is Stage.FETCH else 0)
            if report.id in self._tries:
                self._tries.discard(report.id)
                self.pause.end(self.clock())
            if report.id in self._orphans:
                if report.ended:
                    self._end_orphan(report.id)
            elif prefetch is not None:
                self._progressed(prefetch, report)

    def _progressed(self, prefetch: Prefetch, report: KVReport) -> None:
        if prefetch.stage is Stage.FETCH:
            self._keep(prefetch, report.num_pages)
            if report.ended:
                self._end(prefetch)
            elif not prefetch.entry.is_queued:
                self._stop(prefetch)
            return
        count = min(report.num_pages, len(prefetch.keys))
        pages = self._memory_for(prefetch, count) if prefetch.entry.is_queued else None
        self._prefetches.pop(prefetch.op)
        if pages is None:
            prefetch.stage = Stage.ENDED
            return
        prefetch.stage, prefetch.pages = Stage.FETCH, pages
        prefetch.keys = prefetch.keys[: len(pages)]
        self._num_fetching += len(pages)
        self._send(prefetch, pages)

    def _memory_for(self, prefetch: Prefetch, count: int) -> list[int] | None:
        """Host pages for the first of `count` stored pages; None if they are too few, or there is no room."""
        count = min(count, self._most - self._num_fetching)
        least = max(1, self.settings.threshold // self._tree.page_size)
        return self._alloc(count) if count >= least else None

    def _end_orphan(self, number: int) -> None:
        self._give(self._orphans.pop(number))

    def _send(self, prefetch: Prefetch, pages: list[int]) -> None:
        self._num_ops += 1
        prefetch.op = self._num_ops
        self._prefetches[prefetch.op] = prefetch
        self._new_fetches.append(self._fetch_of(prefetch, pages))

    def _fetch_of(self, prefetch: Prefetch, pages: list[int]) -> KVFetch:
        return KVFetch(prefetch.op, prefetch.keys, list(pages))

    def _keep(self, prefetch: Prefetch, count: int) -> None:
        """Adds the first `count` pages of the fetch, which are read, to the tree."""
        size = self._tree.page_size
        done = len(prefetch.keys) - len(prefetch.pages)
        pages = prefetch.pages[: count - done] if count > done else []
        if not pages:
            return
        del prefetch.pages[: len(pages)]
        self._num_fetching -= len(pages)
        entry = prefetch.entry
        begin = prefetch.start + done * size
        tokens = entry.prefix_keys[: begin + len(pages) * size]
        unused = self._tree.add_absent(tokens, begin, pages, entry.request.namespace, from_storage=True)
        self._free(unused)

    def _stop(self, prefetch: Prefetch) -> None:
        """Ends the request's wait; the operation may still read into the rest of its pages."""
        if prefetch.stage is Stage.KEYS:
            self._hashing.remove(prefetch)
            prefetch.stage = Stage.ENDED
            return
        unsent = [fetch for fetch in self._new_fetches if fetch.id == prefetch.op]
        if unsent:
            self._new_fetches.remove(unsent[0])
            self._end(prefetch)
            return
        self._new_stops.append(prefetch.op)
        self._prefetches.pop(prefetch.op)
        self._num_fetching -= len(prefetch.pages)
        self._orphans[prefetch.op], prefetch.pages = prefetch.pages, []
        prefetch.stage = Stage.ENDED

    def _end(self, prefetch: Prefetch) -> None:
        self._prefetches.pop(prefetch.op)
        self._num_fetching -= len(prefetch.pages)
        pages, prefetch.pages = prefetch.pages, []
        prefetch.stage = Stage.ENDED
        self._give(pages)

    def _end_backup(self, op: KVBackup, num_pages: int) -> None:
        self.num_backed_up_tokens += num_pages * self._tree.page_size
        self.pinned.difference_update(op.pages)
        freed = [page for page in op.pages if page in self._freed]
        self._freed.difference_update(freed)
        self._give(freed)

    def _give(self, pages: list[int]) -> None:
        if pages:
            self._free(pages)

    # -- failures

    def steps_failed(self, ops: Iterable[KVOps]) -> None:
        """Stops the operations of these plans, which may not have begun: a stopped operation is reported in either
        case. Requests that waited for them compute their prefix."""
        for part in ops:
            self._new_stops += part.stops
            numbers = [*(fetch.id for fetch in part.fetches), *(backup.id for backup in part.backups)]
            self._tries.difference_update(numbers)  # the report of a stop is no answer
            for number in numbers:
                prefetch = self._prefetches.get(number)
                if prefetch is not None:
                    self._stop(prefetch)
                else:
                    self._new_stops.append(number)
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        """Drops backups whose stores were dropped."""
        unsent, self._new_backups = self._new_backups, []
        for backup in unsent:
            self._end_backup(self._backups.pop(backup.id), 0)

    def reset(self) -> None:
        """Resets after a flush of the tree; operations in progress keep their pages."""
        self._drop_unsent()
        self._stop_all()

    def _stop_all(self) -> None:
        for prefetch in [*self._hashing, *self._prefetches.values()]:
            self._stop(prefetch)

    def hold_pinned(self) -> set[int]:
        """Keeps the pages that backups read until the backups end: the nodes of all pages are gone."""
        self._freed |= self.pinned
        return self.pinned

    def held_pages(self) -> list[int]:
        """Host pages that are in no node and not free."""
        held = list(self._freed)
        for pages in (*self._orphans.values(), *(prefetch.pages for prefetch in self._prefetches.values())):
            held += pages
        return held
