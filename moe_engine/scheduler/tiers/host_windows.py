"""Window pages in host memory: the KV of windowed layers in prefixes that the host-RAM tier keeps.

An entry is a page of the host's window pool. It belongs to a KV page on the device (its first slot), or to a page of
the tier's places once that KV has left the device. A window page is stored when it is evicted from the device, or with
the KV of its page, if a request has ended or continued there: the pages in between are of no use, because a request
reads the last window only. Entries used least recently leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NONE = -1


class HostWindows:
    """
    Args:
        num_entries: pages of the host's window pool.
    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.num_entries - 1, -1, -1))
        self._of_slot: dict[int, int] = {}
        self._of_place: dict[int, int] = {}
        self._owners: OrderedDict[int, tuple[dict[int, int], int]] = OrderedDict()
        """By entry: the mapping with its owner, and the owner; the least recently used first."""
        self.loading: dict[int, int] = {}
        """By entry that is being read: the load."""
        self._orphans: set[int] = set()
        """Entries that are being read although their owner was freed."""
        self.new_stores: dict[int, int] = {}
        """Entry -> window page, for the next plan."""

    def find(self, slot: int, place: int) -> int:
        """The entry of a KV page; NONE without one. A page that is not on the device, or not in the tier, is NONE."""
        entry = self._of_slot.get(slot)
        return self._of_place.get(place, NONE) if entry is None else entry

    # -- pages that leave the device

    def evicted(self, slot: int, window_page: int) -> None:
        """The window page of a KV page leaves the device; the KV of other layers stays."""
        if slot not in self._of_slot:
            self._store(self._of_slot, slot, window_page)

    def left(self, slots: Sequence[int], places: Sequence[int], window_pages: Sequence[int]) -> None:
        """KV pages leave the device: their entries belong to their places. `window_pages`: those to store, or NONE."""
        for slot, place, page in zip(slots, places, window_pages):
            entry = self._of_slot.pop(slot, NONE)
            if place in self._of_place:
                if entry != NONE:
                    self._give(entry)
            elif entry != NONE:
                self._assign(entry, self._of_place, place)
            elif page != NONE:
                self._store(self._of_place, place, page)

    def _store(self, owners: dict[int, int], owner: int, window_page: int) -> None:
        """Copies a window page to the host before the next step, if there is room."""
        entry = self._take()
        if entry != NONE:
            self._assign(entry, owners, owner)
            self.new_stores[entry] = window_page

    def _assign(self, entry: int, owners: dict[int, int], owner: int) -> None:
        owners[owner] = entry
        self._owners[entry] = owners, owner

    def _take(self) -> int:
        if not self._free:
            oldest = next((entry for entry in self._owners if entry not in self.loading), NONE)
            if oldest == NONE:
                return NONE
            self.forget([oldest])
        return self._free.pop()

    # -- entries that are dropped

    def drop_slots(self, slots: Iterable[int]) -> None:
        """These KV pages are freed."""
        for slot in slots:
            if (entry := self._of_slot.pop(slot, NONE)) != NONE:
                self._give(entry)

    def drop_places(self, places: Iterable[int]) -> None:
        """These pages of the tier's places are freed."""
        for place in places:
            if (entry := self._of_place.pop(place, NONE)) != NONE:
                self._give(entry)

    def forget(self, entries: Iterable[int]) -> None:
        """Drops entries, where they have an owner."""
        for entry in entries:
            if entry in self._owners:
                owners, owner = self._owners[entry]
                del owners[owner]
                self._give(entry)

    def _give(self, entry: int) -> None:
        del self._owners[entry]
        if entry in self.loading:
            self._orphans.add(entry)
            return
        self.new_stores.pop(entry, None)
        self._free.append(entry)

    # -- loads

    def arrived(self, entry: int, slot: int) -> None:
        """A window page of a KV page on the device has the content of this entry, which stays."""
        if entry not in self._owners:
            return
        owners, owner = self._owners[entry]
        if owners is self._of_place and slot not in self._of_slot:
            del owners[owner]
            self._assign(entry, self._of_slot, slot)
        self._owners.move_to_end(entry)

    def end_reads(self, load: int) -> None:
        """A load has ended, or was abandoned."""
        for entry in [entry for entry, number in self.loading.items() if number == load]:
            del self.loading[entry]
            if entry in self._orphans:
                self._orphans.remove(entry)
                self._free.append(entry)

    # -- integrity

    def check(self, slots: set[int], places: set[int]) -> list[str]:
        """Findings of the integrity check; `slots`: KV pages of the tree on the device, `places`: of the tier."""
        findings = []
        everything = [*self._free, *self._owners, *self._orphans]
        if sorted(everything) != list(range(self.num_entries)):
            findings.append(f"windows of the host tier: {len(everything)} owners of {self.num_entries} entries")
        if any(owners.get(owner) != entry for entry, (owners, owner) in self._owners.items()):
            findings.append("windows of the host tier: an entry does not belong to its owner")
        if len(self._of_slot) + len(self._of_place) != len(self._owners):
            findings.append("windows of the host tier: pages have an entry that is not registered")
        if not self._of_slot.keys() <= slots or not self._of_place.keys() <= places:
            findings.append("windows of the host tier: entries belong to pages that are free")
        if not self.loading.keys() <= self._owners.keys() | self._orphans:
            findings.append("windows of the host tier: a load reads a free entry")
        return findings
