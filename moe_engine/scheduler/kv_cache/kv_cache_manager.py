"""KV cache manager: allocates KV slots and worker rows to requests, and shares prefixes through the radix cache.

A request's slots [0, num_in_tree) belong to the tree (it holds a lock on `tree_node`, whose end is num_in_tree); the
others are private. Slots and rows are freed "after" the last planned step, because that step may be in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moe_engine.kv_connectors import connector_class
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.eviction_policy import eviction_policy
from moe_engine.scheduler.kv_cache.kv_connector import KVConnector
from moe_engine.scheduler.kv_cache.kv_events import KVEventLog
from moe_engine.scheduler.kv_cache.prefix_keys import bigrams
from moe_engine.scheduler.kv_cache.radix_cache import DisabledCache, Node, RadixCache
from moe_engine.scheduler.kv_cache.slot_allocator import DeferredFreePool, SlotAllocator
from moe_engine.scheduler.kv_cache.window_room import WindowRoom
from moe_engine.scheduler.tiers.storage_tier import StorageTier
from moe_engine.scheduler.tiers.transfer_tier import TransferTier
from moe_engine.types import KVReport, Request, RowWrite, StateOps


def token_run(request: Request, start: int, end: int) -> list[int]:
    """Tokens [start, end) of prompt and outputs."""
    prompt = len(request.prompt_ids)
    if end <= prompt:
        return request.prompt_ids[start:end]
    if start >= prompt:
        return request.output_ids[start - prompt : end - prompt]
    return request.prompt_ids[start:] + request.output_ids[: end - prompt]


class KVCacheManager:
    """Slots and rows of all requests. `step` is the number of the last planned step (0: none yet)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self._bigrams = config.bigram_prefixes
        self._reserves = config.speculation is not None
        """Requests may hold slots of tokens that are not computed yet (rejected drafts)."""
        self.slots = self._new_slots(config)
        self.rows = DeferredFreePool(range(config.max_rows))
        self.connector: KVConnector | None = None
        """KV outside the pool, if there is any."""
        self.window_room: WindowRoom | None = None
        """Room for the KV of windowed layers, if it is bounded."""
        if config.host_tier_tokens:
            self.connector = self._new_connector(config)
            configure = getattr(self.connector, "configure", None)
            if configure is not None:
                configure(config.hicache_write_policy, config.storage, self._bigrams)
        self.storage: StorageTier | None = getattr(self.connector, "storage", None)
        """Storage below the connector's memory, if there is any."""
        self.tree: RadixCache = self._new_tree(config) if self.connector is None else self.connector.tree
        self.tree.policy = eviction_policy(config.radix_eviction_policy, config.radix_eviction_policy_config)
        self._priority_key = config.priority_key
        if config.kv_events:
            self.tree.events = KVEventLog(config.page_size, config.bigram_prefixes)
        self.step = 0

    def _new_connector(self, config: SchedulerConfig) -> KVConnector:
        made: KVConnector = connector_class(config.kv_connector)(config.host_tier_tokens, self.slots, self.make_room)
        return made

    def _new_slots(self, config: SchedulerConfig) -> SlotAllocator:
        return SlotAllocator(config.num_slots, config.page_size)

    def _new_tree(self, config: SchedulerConfig) -> RadixCache:
        cache = DisabledCache if config.disable_radix_cache else RadixCache
        return cache(config.page_size, self.slots.free)

    # -- counts, in tokens

    @property
    def available(self) -> int:
        """Tokens that are free, become free with the steps in flight, or can be evicted."""
        slots = self.slots
        pages = slots.pages
        return (pages.num_free + pages.num_pending) * slots.page_size + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Tokens held by requests; unlocked cached prefixes do not count."""
        return self.slots.num_slots - self.available

    @property
    def is_released(self) -> bool:
        """Whether no request holds a slot, a row or a prefix, by the counts."""
        slots, rows = self.slots, self.rows
        free = slots.num_free + self.tree.num_evictable
        return not self.tree.num_protected and free == slots.num_slots and rows.num_free == rows.num_total

    # -- allocation

    def make_room(self, num_tokens: int) -> bool:
        """Evicts until `num_tokens` are allocatable now. False if that is impossible."""
        slots = self.slots
        missing = num_tokens - slots.pages.num_free * slots.page_size
        if missing <= 0:
            return True
        if self.tree.num_evictable >= missing:
            self.tree.evict(missing)
        return self.slots.num_free >= num_tokens

    def attach(self, request: Request, node: Node) -> None:
        """Locks the prefix that ends with `node` for the request, which must hold no slots yet."""
        self.tree.lock(node)
        request.tree_node = node
        request.num_in_tree = node.end
        request.slots = self.tree.prefix_slots(node)
        request.num_computed = node.end

    def detach(self, request: Request) -> None:
        """Undoes `attach`."""
        self.tree.unlock(request.tree_node, self.step)
        request.tree_node = None
        request.num_in_tree = request.num_computed = 0
        request.slots = []

    def extend(self, request: Request, count: int) -> list[int] | None:
        """Slots of the next `count` tokens, appended to the request's; None, without a change, if there is no room."""
        used = len(request.slots)
        last = request.slots[-1] if used else 0
        page = self.page_size
        new_pages = -(-(used + count) // page) - -(-used // page)
        if not self.make_room(new_pages * page):
            return None
        slots = self.slots.alloc(count, last, used)
        if slots is not None:
            request.slots += slots
        return slots

    def extend_all(self, requests: list[Request], count: int) -> None:
        """Slots of the next `count` tokens of each request, appended to its own. `make_room` must have succeeded."""
        if self.page_size == 1:
            slots = self.slots.pages.take(count * len(requests))
            assert slots is not None
            for number, request in enumerate(requests):
                request.slots += slots[number * count : (number + 1) * count]
            return
        for request in requests:
            more = self.slots.alloc(count, request.slots[-1], len(request.slots))
            assert more is not None
            request.slots += more

    def decode_need(self, requests: list[Request], steps: int = 1) -> int:
        """Tokens (whole pages) that `steps` decode steps of all `requests` take from the pool."""
        page = self.page_size
        if self._reserves:
            return sum(self._missing(r, r.num_computed + r.num_maybe + steps) for r in requests)
        if page == 1:
            return len(requests) * steps
        if steps == 1:
            return sum(1 for request in requests if len(request.slots) % page == 0) * page
        pages = 0
        for request in requests:
            used = len(request.slots)
            pages += -(-(used + steps) // page) - -(-used // page)
        return pages * page

    def take_decode_slots(self, requests: list[Request]) -> list[int]:
        """The next slot of each request. `make_room(decode_need(requests))` must have succeeded."""
        page = self.page_size
        if self._reserves:
            self.reserve(requests, [1] * len(requests))
            return [request.slots[request.num_computed] for request in requests]
        if page == 1:
            slots = self.slots.pages.take(len(requests))
            assert slots is not None
            for request, slot in zip(requests, slots):
                request.slots.append(slot)
            return slots
        owned = [request.slots for request in requests]
        bases = self.slots.pages.take(sum(1 for own in owned if len(own) % page == 0))
        assert bases is not None
        slots = []
        for own in owned:
            slot = own[-1] + 1 if len(own) % page else bases.pop()
            own.append(slot)
            slots.append(slot)
        return slots

    def reserve_need(self, requests: list[Request], widths: list[int]) -> int:
        """Tokens (whole pages) that `reserve` takes from the pool."""
        return sum(self._missing(r, r.num_computed + r.num_maybe + w) for r, w in zip(requests, widths))

    def reserve(self, requests: list[Request], widths: list[int]) -> list[RowWrite]:
        """Allocates slots for `widths[i]` tokens behind the last possible token of each request; returns the new ones.

        `make_room(reserve_need(requests, widths))` must have succeeded.
        """
        writes = []
        for request, width in zip(requests, widths):
            used = len(request.slots)
            count = request.num_computed + request.num_maybe + width - used
            if count > 0:
                slots = self.slots.alloc(count, request.slots[-1] if used else 0, used)
                assert slots is not None
                request.slots += slots
                writes.append(RowWrite(request.row, used, slots))
        return writes

    def _missing(self, request: Request, num_tokens: int) -> int:
        """Pool tokens to allocate until the request has slots for `num_tokens`."""
        used = len(request.slots)
        return max(0, -(-num_tokens // self.page_size) - -(-used // self.page_size)) * self.page_size

    # -- caching in the tree

    def cache_unfinished(self, request: Request) -> RowWrite | None:
        """Inserts the computed whole pages of a running request into the tree, to share them.

        If the tree already has the same tokens, the request switches to the tree's slots and frees its own; the
        returned write updates the worker's slot table.
        """
        old, start = request.tree_node, request.num_in_tree
        node, present = self._insert(request, request.num_computed)
        if node is old:
            return None
        self.tree.lock(node)
        self.tree.unlock(old, self.step)
        request.tree_node = node
        request.num_in_tree = node.end
        if not present:
            return None
        self._replaced(request, start, present)
        end = start + len(present)
        self.slots.free(request.slots[start:end], self.step)
        request.slots[start:end] = present
        return RowWrite(request.row, start, present)

    def release(self, request: Request) -> Node:
        """Frees row and slots of a request that ends or is retracted; its computed KV stays cached in the tree, up to
        the node that is returned.

        The KV of the last token is dropped: it was not computed, or only by a step whose result is discarded.
        """
        known = request.num_tokens - (1 if request.output_ids else 0)
        start = request.num_in_tree
        node, present = self._insert(request, min(request.num_computed, known))
        if present:
            self._replaced(request, start, present)
            self.slots.free(request.slots[start : start + len(present)], self.step)
        self.slots.free(request.slots[node.end :], self.step)
        self.tree.count_use(node, -self._priority_key(request.priority))
        self.tree.unlock(request.tree_node, self.step)
        self.rows.give([request.row], self.step)
        request.tree_node = None
        request.num_in_tree = 0
        request.slots = []
        request.row = -1
        return node

    def _replaced(self, request: Request, start: int, present: list[int]) -> None:
        """The tree's slots `present` replace the request's slots from `start` on, which are freed next."""

    def _insert(self, request: Request, end: int) -> tuple[Node, list[int]]:
        start = request.num_in_tree
        if self._bigrams:
            end = min(end, request.num_tokens - 1)
        end -= end % self.page_size
        if end <= start or not self.tree.enabled:
            return request.tree_node, []
        run = bigrams(token_run(request, start, end + 1)) if self._bigrams else token_run(request, start, end)
        return self.tree.insert(request.tree_node, run, request.slots[start:end], self.step)

    # -- states of requests (`state_kv_cache.py`)

    def take_state_ops(self, jobs: Sequence[Any], decodes: Iterable[tuple[Request, int]]) -> StateOps | None:
        """`StepPlan.state_ops` of the plan with number `step`, for its chunks of prompts (`admission.PrefillJob`) and
        its requests in decode with their lengths before it."""
        return None

    def steps_failed(self, number: int) -> None:
        """The worker may not have run the steps from `number` on, or only in part."""

    def check_snapshots(self) -> list[str]:
        """Findings of the integrity check on snapshots of states."""
        return []

    # -- windowed layers (`windowed_kv_cache.py`)

    def take_window_pages(self) -> list[int]:
        """`StepPlan.window_pages` of the next plan."""
        return []

    def repeat_window_pages(self, pairs: Sequence[int]) -> None:
        """The worker may not have applied these pairs of an earlier plan."""

    def check_windows(self, running: Iterable[Request], owned: set[int]) -> list[str]:
        """Findings of the integrity check on window pages; `owned` are the full pages in use."""
        return []

    def window_pool(self) -> tuple[DeferredFreePool, set[int]] | None:
        """The pool of window pages and those in use; None without such a pool."""
        return None

    # -- transfers between servers

    @property
    def transfers(self) -> TransferTier | None:
        """The connector, if it is one side of `--disaggregation-mode`."""
        return self.connector if isinstance(self.connector, TransferTier) else None

    @property
    def num_transfers(self) -> int:
        return 0 if self.transfers is None else self.transfers.num_transfers

    def enter_transfer(self, request: Request) -> None:
        """Registers a queued request that names a transfer."""
        if self.transfers is not None:
            self.transfers.enter(request, self.step)

    # -- KV outside the pool

    def note_hit(self, request: Request, cached: int) -> None:
        """Records that the first `cached` tokens of a request scheduled for the first time were cached."""
        request.cached_tokens = cached
        if self.connector is not None:
            fetched = min(request.loaded_storage, cached)
            backend = self.storage.settings.backend if self.storage is not None else ""
            request.tiers = min(request.loaded_host, cached - fetched), fetched, backend

    @property
    def has_kv_ops(self) -> bool:
        """Whether the connector has operations for the next plan."""
        return self.connector is not None and self.connector.has_new_ops

    def num_fetching(self) -> int:
        """Number of storage reads that waiting requests wait for (`StorageTier.poll`)."""
        return self.storage.poll() if self.storage is not None else 0

    def kv_arrived(self, kv_done: Sequence[int], reports: Sequence[KVReport]) -> None:
        """See `Scheduler.kv_arrived`."""
        assert self.connector is not None
        self.connector.update_connector_output(kv_done, self.step)
        if self.storage is not None:
            self.storage.reported(reports)

    # -- steps

    def retire(self, step: int) -> bool:
        """Step `step` has finished. True if that freed any slots or rows."""
        return bool(self.slots.retire(step)) | bool(self.rows.retire(step))

    def reset(self) -> None:
        """Clears tree and ownership; only if no request holds slots and no step is in flight."""
        self.tree.flush(0)
        if self.connector is not None:
            self.connector.reset()
        self.slots.reset()
        self.rows.reset()
