"""Host-RAM tier of the KV cache (`--enable-hierarchical-cache`): the reference implementation of `KVConnector`.

Evicted blocks are stored in host memory, with write-through as soon as they are computed or reused; least recently used
blocks leave it. A prefix in the tier is loaded back before its request is admitted; the request waits for it, other
requests do not. `storage_tier` has the storage below it.

A place is a token's index in the host pool of each rank; places are allocated in whole pages. A place stays allocated
while a load from it is in progress. Only the place of a load that a failed step abandoned may be reused, by a later
store, which each rank runs after the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moe_engine.scheduler.kv_cache.radix_cache import Node
from moe_engine.scheduler.kv_cache.slot_allocator import SlotAllocator
from moe_engine.scheduler.tiers.storage_tier import StorageTier
from moe_engine.scheduler.tiers.tiered_cache import TieredCache, TierNode
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import KVLoad, KVOps, Request, Status
from moe_engine.types.step_settings import StorageSettings

MIN_LOAD = 10
"""Min length of a match that is loaded; shorter matches are computed (SGLang's load-back threshold)."""
WRITE_TOKENS = 512
"""Approximate number of tokens that write-through stores in a step, so that no step waits for copies."""
WRITE_THROUGH = {"write_back": None, "write_through": "inserted", "write_through_selective": "reused"}
"""`--hicache-write-policy` -> nodes that are stored before they are evicted (`TieredCache.write_through`)."""


@dataclass(slots=True)
class Load:
    """Nodes that are being loaded, the upper first, and the requests that wait for them."""

    id: int
    path: list[TierNode]
    waiting: list[Request] = field(default_factory=list)

    @property
    def last(self) -> TierNode:
        """The node whose path is locked."""
        return self.path[-1]


class HostTier:
    """Implements `KVConnector`.

    Args:
        num_places: tokens of the host pool.
        slots: the pool's slots; `make_room` evicts until this many tokens are allocatable.
    """

    copies: ClassVar[str] = "moe_engine.worker.kv_cache.kv_copies:KVCopies"
    """Path of the worker side."""

    def __init__(self, num_places: int, slots: SlotAllocator, make_room: Callable[[int], bool]) -> None:
        self.num_places = num_places
        self.storage: StorageTier | None = None
        self._size = slots.page_size
        self.tree = self._new_tree(slots)
        self.num_loaded_tokens = 0
        self.num_loaded_from_storage = 0
        self._slots = slots
        self._make_room = make_room
        self._free = self._all_pages()
        self._num_loads = 0
        self._loads: dict[int, Load] = {}
        self._abandoned: dict[int, list[int]] = {}
        """Slots of loads whose nodes are absent again: freed when the copy has ended."""
        self._new_stores: dict[int, int] = {}
        """Place -> slot, for the next plan."""
        self._new_loads: list[KVLoad] = []
        self._arrived: list[int] = []
        self._prepare()

    def _new_tree(self, slots: SlotAllocator) -> TieredCache:
        return TieredCache(slots.page_size, slots.free, self._store, self._release)

    def _prepare(self) -> None:
        """Further state of a subclass."""

    def configure(self, write_policy: str, storage: StorageSettings | None, bigrams: bool) -> None:
        """
        Args:
            bigrams: whether the tree's keys are pairs of tokens.
        """
        self.tree.write_through = WRITE_THROUGH[write_policy]
        if storage is not None:
            self.storage = self._new_storage(storage, bigrams)
            self.tree.on_stored = self._back_up

    def _new_storage(self, settings: StorageSettings, bigrams: bool) -> StorageTier:
        return StorageTier(settings, self.tree, self._alloc, self._give, self.num_places // self._size, bigrams)

    def _all_pages(self) -> list[int]:
        return list(range(self.num_places // self._size - 1, -1, -1))

    @property
    def num_loading(self) -> int:
        return len(self._loads) + len(self._abandoned)

    @property
    def has_new_ops(self) -> bool:
        """As in the protocol. Nodes that are due are stored here: those without room are dropped, so a plan for them
        would be empty."""
        if not self._has_ops and self.tree.has_due:
            self.tree.store_due(WRITE_TOKENS)
        return self._has_ops

    @property
    def _has_ops(self) -> bool:
        return bool(self._new_stores or self._new_loads) or (self.storage is not None and self.storage.has_new_ops)

    @property
    def num_stored(self) -> int:
        return self.num_places - len(self._free) * self._size

    # -- eviction

    def _store(self, slots: list[int]) -> list[int] | None:
        """Copies slots to the host before the next step; None if the host pool is too small."""
        pages = self._alloc(len(slots) // self._size)
        if pages is None:
            return None
        places = self._places(pages)
        self._new_stores.update(zip(places, slots))
        return places

    def _alloc(self, count: int) -> list[int] | None:
        """Allocates host pages, evicting older nodes from the host; None if there is no room."""
        while (missing := count - len(self._free)) > 0:
            if not self.tree.drop_oldest(missing * self._size):
                return None
        pages = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        pages.reverse()  # ascending in a fresh pool: neighbors are copied in one piece
        return pages

    def take_places(self, count: int) -> list[int] | None:
        """Places of whole pages for `count` tokens; None if there is no room."""
        pages = self._alloc(-(-count // self._size)) if count else None
        return None if pages is None else self._places(pages)[:count]

    def give_places(self, places: list[int]) -> None:
        """Frees places of `take_places`, by whole pages."""
        self._give(self._pages(places))

    def held_pages(self) -> list[int]:
        """Pages in use outside the tree."""
        return []

    def _give(self, pages: list[int]) -> None:
        self._free += pages

    def _places(self, pages: list[int]) -> list[int]:
        size = self._size
        return pages if size == 1 else [place for page in pages for place in range(page * size, page * size + size)]

    def _pages(self, places: list[int]) -> list[int]:
        return [place // self._size for place in places[:: self._size]]

    def _back_up(self, node: TierNode) -> None:
        assert self.storage is not None and node.places is not None
        self.storage.stored(node, self._pages(node.places))

    def _release(self, places: list[int]) -> None:
        pages = self._pages(places)
        if self.storage is not None:
            pages = self.storage.release(pages)
        self._free += pages
        if self._new_stores:  # a page that is to be backed up is stored although its node is gone
            for place in self._places(pages):
                self._new_stores.pop(place, None)

    # -- loads

    def get_num_new_matched_tokens(self, entry: Waiting) -> int:
        found = entry.matched(self.tree)
        count, load = self.tree.peek_absent(found, entry.prefix_keys, entry.limit)
        return count if load or count >= MIN_LOAD else 0

    def start_load(self, entry: Waiting, step: int) -> bool:
        tree, request = self.tree, entry.request
        _, in_progress = tree.peek_absent(entry.matched(tree), entry.prefix_keys, entry.limit)
        if not in_progress:
            in_progress = self._begin(entry, step)
        if in_progress:
            self._loads[in_progress].waiting.append(request)
            request.status = Status.WAITING_FOR_KV
        return in_progress > 0

    def _begin(self, entry: Waiting, step: int) -> int:
        """Begins a load; 0 if there is no room."""
        tree = self.tree
        node = tree.match(entry.prefix_keys, entry.limit, entry.request.namespace, entry.matched(tree).node)
        number = self._num_loads + 1
        path = tree.begin_load(node, entry.prefix_keys, entry.limit, number)
        places = [place for part in path for place in part.places or ()]
        tree.lock(node)  # room must be made elsewhere in the tree
        slots = self._slots.alloc(len(places)) if self._make_room(len(places)) else None
        if slots is not None:
            tree.fill(path, slots)
        else:
            tree.cancel_load(path, step)
        tree.unlock(node, step)
        if slots is None:
            return 0
        self._num_loads = number
        self._loads[number] = Load(number, path)
        self._new_loads.append(KVLoad(number, places, slots))
        return number

    def build_connector_meta(self) -> KVOps | None:
        if self.tree.has_due:
            self.tree.store_due(WRITE_TOKENS)
        ops = None
        if self._new_stores or self._new_loads or self._arrived:
            stores = self._new_stores
            ops = KVOps(list(stores.values()), list(stores), self._new_loads, self._arrived)
            self._new_stores, self._new_loads, self._arrived = {}, [], []
        return ops if self.storage is None else self.storage.take_ops(ops)

    def update_connector_output(self, kv_done: Iterable[int], step: int) -> None:
        for number in kv_done:
            load = self._loads.pop(number, None)
            if load is not None:
                self._count(load)
                self._end(load, step)
                _wait_no_longer(load)
            elif number in self._abandoned:
                self._end_abandoned(number, step)
            else:
                continue  # of a failed step
            self._arrived.append(number)

    def _end(self, load: Load, step: int) -> None:
        """The KV of a load is readable. A path may be empty in tiers that load more than KV."""
        if load.path:
            self.tree.end_load(load.path, step)
        else:
            self.tree.unlock(load.last, step)

    def _cancel(self, load: Load, step: int) -> list[int]:
        """Takes the slots from the nodes of a load, and returns them."""
        if load.path:
            return self.tree.cancel_load(load.path, step)
        self.tree.unlock(load.last, step)
        return []

    def _end_abandoned(self, number: int, step: int) -> None:
        """The copy of an abandoned load has ended."""
        self._slots.free(self._abandoned.pop(number), step)

    def _count(self, load: Load) -> None:
        """Counts loaded tokens by origin, in total and for the waiting requests."""
        tokens = sum(len(node.tokens) for node in load.path)
        fetched = sum(len(node.tokens) for node in load.path if node.from_storage)
        self.num_loaded_tokens += tokens
        self.num_loaded_from_storage += fetched
        for node in load.path:
            node.from_storage = False
        for request in load.waiting:
            request.loaded_host += tokens - fetched
            request.loaded_storage += fetched

    # -- failures

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        doubtful = {place for part in ops for place in part.store_places} | set(self._new_stores)
        ended = {load.id for part in ops for load in part.loads} | {load.id for load in self._new_loads}
        self._arrived = [*(number for part in ops for number in part.arrived), *self._arrived]
        self._new_loads = []
        for load in self._loads.values():
            self._abandoned[load.id] = self._cancel(load, step)
            _wait_no_longer(load)
        self._loads = {}
        for number in ended & self._abandoned.keys():  # a worker ends the copies of a failed step before it reports it
            self._end_abandoned(number, step)
        self.tree.forget_places(doubtful)
        self._new_stores = {}
        if self.storage is not None:
            self.storage.steps_failed(ops)

    def reset(self) -> None:
        for load in self._loads.values():
            _wait_no_longer(load)
        self._loads, self._abandoned = {}, {}
        self._new_stores, self._new_loads = {}, []
        if self.storage is not None:
            self.storage.reset()
        self._free = self._all_pages()
        if self.storage is not None:
            in_use = {*self.storage.held_pages(), *self.storage.hold_pinned()}
            self._free = [page for page in self._free if page not in in_use]

    # -- integrity

    def held_nodes(self) -> list[Node]:
        return [load.last for load in self._loads.values()]

    def held_slots(self) -> list[int]:
        return [slot for slots in self._abandoned.values() for slot in slots]

    def check_integrity(self) -> list[str]:
        findings = []
        owned: set[int] = set()
        for node in self.tree.stored_nodes():
            places = node.places or []
            if len(places) != len(node.tokens) or not owned.isdisjoint(places):
                findings.append(f"a node of {len(node.tokens)} tokens has {len(places)} places, or shares some")
            if not node.slots and (node.alive or node.children or node.lock):
                findings.append(f"an absent node that ends at {node.end} is in use")
            owned.update(places)
        if self.storage is not None:
            held = self._places(self.storage.held_pages())
            if not owned.isdisjoint(held):
                findings.append("the storage reads to, or backs up, places of other nodes")
            owned.update(held)
        transferred = self._places(self.held_pages())
        if len(transferred) != len(set(transferred)) or not owned.isdisjoint(transferred):
            findings.append("places of transfers are shared")
        owned.update(transferred)
        everything = set(range(self.num_places))
        free = self._places(self._free)
        if len(free) != len(set(free)) or not owned.isdisjoint(free):
            findings.append("places of the host tier are free twice, or free and in use")
        lost = everything - owned - set(free)
        if lost or not owned <= everything:
            findings.append(f"the host tier lost {len(lost)} places; they are free again")
        loading = {node for load in self._loads.values() for node in load.path}
        if {node for node in self.tree.stored_nodes() if node.load} != loading:
            findings.append("nodes are marked as being loaded without a load")
        if findings:
            self._free = sorted({place // self._size for place in everything - owned}, reverse=True)
        return findings


def _wait_no_longer(load: Load) -> None:
    for request in load.waiting:
        if request.status is Status.WAITING_FOR_KV:
            request.status = Status.WAITING
