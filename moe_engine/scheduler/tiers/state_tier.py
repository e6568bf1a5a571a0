"""Host-RAM tier of a model with a state for each request: `HostTier`, and entries for the states of cached prefixes.

A prefix is loaded with the state after it; a prefix whose KV is still on the device may need its state only. States
leave the device when their snapshot is given up or their KV is evicted, with write-through as soon as their prefix is
cached. A snapshot slot belongs to the load until the copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_engine.scheduler.kv_cache.slot_allocator import SlotAllocator
from moe_engine.scheduler.kv_cache.state_snapshots import NONE
from moe_engine.scheduler.tiers.host_tier import HostTier, Load
from moe_engine.scheduler.tiers.state_storage_tier import StateStorageTier
from moe_engine.scheduler.tiers.tiered_cache import TierNode
from moe_engine.scheduler.tiers.tiered_snapshots import TieredSnapshots, TierStateNode
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types.kv_ops import KVLoad, KVOps
from moe_engine.types.step_settings import StorageSettings


@dataclass(slots=True)
class StateLoad(Load):
    """A load that ends with the state of `target`; its path is empty if the KV is on the device."""

    target: TierStateNode | None = None
    snapshot: int = NONE

    @property
    def last(self) -> TierNode:
        assert self.target is not None
        return self.target


class StateHostTier(HostTier):
    """Implements `KVConnector`.

    Args:
        num_snapshots: of the device.
        num_entries: states that the host pool can hold.
    """

    tree: TieredSnapshots

    def __init__(
        self, num_places: int, slots: SlotAllocator, make_room: Callable[[int], bool], num_snapshots: int,
        num_entries: int,
    ) -> None:  # fmt: skip
        self.num_entries = num_entries
        self._num_snapshots = num_snapshots
        self._free_entries = list(range(num_entries))
        self._new_states: dict[int, int] = {}
        """Entry -> snapshot, for the next plan."""
        self._abandoned_snapshots: dict[int, int] = {}
        super().__init__(num_places, slots, make_room)

    def _new_tree(self, slots: SlotAllocator) -> TieredSnapshots:
        return TieredSnapshots(
            slots.page_size, slots.free, self._store, self._release, self._num_snapshots, self._store_state,
            self._release_entry,
        )  # fmt: skip

    def _new_storage(self, settings: StorageSettings, bigrams: bool) -> StateStorageTier:
        num_pages = self.num_places // self._size
        storage = StateStorageTier(settings, self.tree, self._alloc, self._give, num_pages, bigrams)
        storage.use_entries(self._alloc_entry, self._give_entry)
        self.tree.on_state_stored = storage.state_stored
        return storage

    # -- entries

    def _store_state(self, snapshot: int) -> int:
        """Copies a snapshot to the host before the next step; NONE if there is no room."""
        entry = self._alloc_entry()
        if entry != NONE:
            self._new_states[entry] = snapshot
        return entry

    def _alloc_entry(self) -> int:
        if not self._free_entries and not self.tree.drop_oldest_state():
            return NONE
        return self._free_entries.pop() if self._free_entries else NONE  # dropped ones may be in use by a backup

    def _give_entry(self, entry: int) -> None:
        self._free_entries.append(entry)

    def _release_entry(self, entry: int) -> None:
        if isinstance(self.storage, StateStorageTier) and not self.storage.release_entry(entry):
            return  # a backup reads it, also if its store is in the next plan
        self._new_states.pop(entry, None)
        self._free_entries.append(entry)

    # -- loads

    def _begin(self, entry: Waiting, step: int) -> int:
        tree, keys = self.tree, entry.prefix_keys
        nodes, _ = tree.reach(entry.matched(tree), keys, entry.limit)
        if not nodes:
            return 0
        number = self._num_loads + 1
        path = tree.begin_state_load(nodes, number)
        target = nodes[-1]
        places = [place for part in path for place in part.places or ()]
        base = path[0].parent if path else target
        assert base is not None
        tree.lock(base)  # room must be made elsewhere in the tree
        slots, snapshot = None, NONE
        if self._make_room(len(places)):
            snapshot = tree.take_slot(step + 1, tree.reading)
            slots = self._slots.alloc(len(places)) if snapshot != NONE else None
        if slots is None:
            tree.cancel_load(path, step)
            target.state_load = 0
            if snapshot != NONE:
                tree.give_slot(snapshot)
        elif path:
            tree.fill(path, slots)
        else:
            tree.lock(target)
        tree.unlock(base, step)
        if slots is None:
            return 0
        self._num_loads = number
        self._loads[number] = StateLoad(number, path, [], target, snapshot)
        self._new_loads.append(KVLoad(number, places, slots, [(target.entry, snapshot)]))
        return number

    def _end(self, load: Load, step: int) -> None:
        assert isinstance(load, StateLoad) and load.target is not None
        super()._end(load, step)
        self.tree.state_arrived(load.target, load.snapshot)

    def _cancel(self, load: Load, step: int) -> list[int]:
        assert isinstance(load, StateLoad) and load.target is not None
        load.target.state_load = 0
        self._abandoned_snapshots[load.id] = load.snapshot
        return super()._cancel(load, step)

    def _end_abandoned(self, number: int, step: int) -> None:
        super()._end_abandoned(number, step)
        self.tree.give_slot(self._abandoned_snapshots.pop(number))

    def held_snapshots(self) -> list[int]:
        """Snapshots that loads write, or may write."""
        own = [load.snapshot for load in self._loads.values() if isinstance(load, StateLoad)]
        return [*own, *self._abandoned_snapshots.values()]

    @property
    def _has_ops(self) -> bool:
        return bool(self._new_states) or super()._has_ops

    def build_connector_meta(self) -> KVOps | None:
        ops = super().build_connector_meta()
        if self._new_states:
            pairs = [(snapshot, entry) for entry, snapshot in self._new_states.items()]
            ops = replace(ops or KVOps(), state_stores=pairs)
            self._new_states = {}
        return ops

    # -- failures

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        doubtful = {entry for part in ops for _, entry in part.state_stores} | set(self._new_states)
        super().steps_failed(ops, step)
        self.tree.forget_entries(doubtful)
        self._new_states = {}

    def reset(self) -> None:
        super().reset()
        self._abandoned_snapshots = {}
        self._new_states = {}
        held = set(self.held_entries(flushed=True))
        self._free_entries = [entry for entry in range(self.num_entries) if entry not in held]

    # -- integrity

    def held_entries(self, *, flushed: bool = False) -> list[int]:
        """Entries in use outside the tree. `flushed`: the nodes of all entries are gone."""
        return self.storage.held_entries(flushed=flushed) if isinstance(self.storage, StateStorageTier) else []

    def check_integrity(self) -> list[str]:
        findings = super().check_integrity() + self.tree.check_entries()
        held = self.held_entries()
        everything = [*self._free_entries, *self.tree.owners, *held]
        if sorted(everything) != list(range(self.num_entries)):
            findings.append(f"states of the host tier: {len(everything)} owners of {self.num_entries} entries")
            used = {*self.tree.owners, *held}
            self._free_entries = [entry for entry in range(self.num_entries) if entry not in used]
        return findings
