"""Host-RAM tier of a model with bounded windows: `HostTier`, and entries for window pages (`host_windows`).

A load ends with the last window of its prefix: it writes the KV that is not on the device, and the window pages that
are not. Window pages on the device that it relies on are pinned until its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moe_engine.scheduler.kv_cache.radix_cache import Node
from moe_engine.scheduler.kv_cache.slot_allocator import SlotAllocator
from moe_engine.scheduler.kv_cache.window_pages import WindowPages
from moe_engine.scheduler.tiers.host_tier import HostTier, Load
from moe_engine.scheduler.tiers.host_windows import NONE, HostWindows
from moe_engine.scheduler.tiers.tiered_cache import TierNode
from moe_engine.scheduler.tiers.tiered_windows import Reach, TieredWindows
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types.kv_ops import KVLoad, KVOps


@dataclass(slots=True)
class WindowLoad(Load):
    """A load with the window of a prefix; its path is empty if the KV is on the device."""

    base: TierNode | None = None
    """The node on the device that is locked if the path is empty."""
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(KV page, window page, entry)"""
    pinned: list[int] = field(default_factory=list)
    """KV pages whose window pages are on the device."""

    @property
    def last(self) -> TierNode:
        if self.path:
            return self.path[-1]
        assert self.base is not None
        return self.base


class WindowHostTier(HostTier):
    """Implements `KVConnector`.

    Args:
        make_room: evicts until this many tokens are allocatable, without their window pages.
        num_window_slots: tokens of the host's window pool.
    """

    tree: TieredWindows

    def __init__(
        self,
        num_places: int,
        slots: SlotAllocator,
        make_room: Callable[[int], bool],
        windows: WindowPages,
        window: int,
        num_window_slots: int,
    ) -> None:
        self._windows, self._window = windows, window
        self.host = windows.host = HostWindows(num_window_slots // slots.page_size)
        self._abandoned_windows: dict[int, list[int]] = {}
        super().__init__(num_places, slots, make_room)

    def _new_tree(self, slots: SlotAllocator) -> TieredWindows:
        return TieredWindows(
            slots.page_size, slots.free, self._store, self._release, self._windows, self._window, self.host
        )

    def _release(self, places: list[int]) -> None:
        self.host.drop_places(self._pages(places))
        super()._release(places)

    # -- loads

    def _begin(self, entry: Waiting, step: int) -> int:
        tree, keys, found = self.tree, entry.prefix_keys, entry.matched(self.tree)
        reach = tree.reach(found, keys, entry.limit)
        base = reach.base
        if base is None or reach.load:
            return 0
        assert isinstance(base, TierNode)
        number = self._num_loads + 1
        path = tree.begin_load(base, keys, reach.length, number) if reach.length > reach.begin else []
        mapped, pins = self._windows.page_of, list[int]()
        for page in reach.window:
            if page.slot in mapped:
                pins.append(page.slot)
            else:
                self.host.loading[self.host.find(*page)] = number
        self._windows.pin(pins)
        tree.lock(base)  # room must be made elsewhere in the tree
        load = WindowLoad(number, path, base=base, pinned=pins)
        places = [place for part in path for place in part.places or ()]
        slots = self._take_room(load, reach, len(places))
        if slots is None:
            tree.cancel_load(path, step)
            self._release_windows(load)
            tree.unlock(base, step)
            return 0
        if path:
            tree.fill(path, slots)
            tree.unlock(base, step)
        self._num_loads = number
        self._loads[number] = load
        windows = [(stored, page) for _, page, stored in load.pages]
        self._new_loads.append(KVLoad(number, places, slots, windows=windows))
        return number

    def _take_room(self, load: WindowLoad, reach: Reach, count: int) -> list[int] | None:
        """Slots of a load, and its window pages; None, without a change, if there is no room."""
        size, end = self._size, reach.length
        missing = [
            (end - size * (i + 1), page, self.host.find(*page))
            for i, page in enumerate(reach.window)
            if page.slot not in self._windows.page_of
        ]
        pages = self._windows.take_for_load(len(missing))
        self.tree.version += 1  # window pages may have been evicted
        if pages is None:
            return None
        slots = self._slots.alloc(count) if self._make_room(count) else None
        if slots is None:
            self._windows.give_back(pages, 0)
            return None
        for (begin, page, stored), taken in zip(missing, pages):
            slot = page.slot if page.slot != NONE else slots[begin - reach.begin]
            load.pages.append((slot, taken, stored))
        return slots

    def _release_windows(self, load: WindowLoad) -> None:
        """The load does not rely on entries and pinned window pages any more."""
        self.host.end_reads(load.id)
        self._windows.unpin(load.pinned, 0)

    def _end(self, load: Load, step: int) -> None:
        assert isinstance(load, WindowLoad)
        super()._end(load, step)
        for slot, page, entry in load.pages:
            self._windows.loaded(slot, page)
            self.host.arrived(entry, slot)
        self._release_windows(load)
        self.tree.version += 1

    def _cancel(self, load: Load, step: int) -> list[int]:
        assert isinstance(load, WindowLoad)
        self._release_windows(load)
        self._abandoned_windows[load.id] = [page for _, page, _ in load.pages]
        return super()._cancel(load, step)

    def _end_abandoned(self, number: int, step: int) -> None:
        super()._end_abandoned(number, step)
        self._windows.give_back(self._abandoned_windows.pop(number), step)

    def held_window_pages(self) -> list[int]:
        """KV pages whose window pages loads have pinned."""
        return [page for load in self._loads.values() if isinstance(load, WindowLoad) for page in load.pinned]

    @property
    def _has_ops(self) -> bool:
        return bool(self.host.new_stores) or super()._has_ops

    def build_connector_meta(self) -> KVOps | None:
        ops = super().build_connector_meta()
        if self.host.new_stores:
            pairs = [(page, entry) for entry, page in self.host.new_stores.items()]
            ops = replace(ops or KVOps(), window_stores=pairs)
            self.host.new_stores = {}
        return ops

    # -- failures

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        doubtful = {entry for part in ops for _, entry in part.window_stores} | set(self.host.new_stores)
        super().steps_failed(ops, step)
        self.host.forget(doubtful)
        self.host.new_stores = {}

    def reset(self) -> None:
        super().reset()
        self._abandoned_windows = {}
        self.host.reset()

    # -- integrity

    def check_integrity(self) -> list[str]:
        slots, places = set[int](), set[int]()
        nodes: list[Node] = list(self.tree.roots.values())
        for node in nodes:  # grows while it runs
            assert isinstance(node, TierNode)
            nodes += [*node.children.values(), *node.absent.values()]
            if node.alive:
                slots.update(node.slots[:: self._size])
            places.update(self._pages(node.places or []))
        return super().check_integrity() + self.host.check(slots, places)
