"""Window pages: KV pages of the layers with an attention window, which hold only the last tokens of each request.

A full page (a page of `SlotAllocator`) identifies tokens; it has a window page while its KV in windowed layers is kept.
A request pins the window pages of the tokens that its next step reads or writes. Window pages without a pin stay with
their full page, so that a later request can continue from that position, until an allocation evicts them, least
recently used first. Pages are identified by their first slot, in both pools; slots of page 0 are dummies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.kv_cache.slot_allocator import DeferredFreePool
from moe_engine.scheduler.tiers.host_windows import HostWindows


class WindowPages:
    """Owns the window pool and the mapping from full pages to window pages."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.pool = DeferredFreePool(range(page_size, num_slots + page_size, page_size))
        self.num_evicted = 0
        """Window pages evicted so far; a change may shorten prefix matches."""
        self.host: HostWindows | None = None
        """Takes evicted pages, if there is a host-RAM tier."""
        self.reset()

    def reset(self) -> None:
        """Drops all mappings and pins."""
        self.page_of: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._read_until: dict[int, int] = {}
        """By full page whose window page was unpinned: the last step that may read the window page."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Full pages whose window page has no pin, least recently used first."""
        self._writes: dict[int, int] = {}
        self.resumed: set[int] = set()
        """With a host tier: full pages in the last window of a request that ended, or that continued from there."""
        self.loading: set[int] = set()
        """Window pages that a load writes; no full page has them yet."""
        self.pool.reset()

    # -- counts, in pages

    @property
    def num_free_or_idle(self) -> int:
        """Pages that can be assigned when no step is in flight."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_unpinned(self) -> int:
        """Pages that no request pins; steps in flight may read some of them."""
        return self.pool.num_total - len(self._pins) - len(self.loading)

    def num_pinned_once(self, full_pages: Iterable[int]) -> int:
        """Number of these pages that have one pin."""
        return sum(self._pins.get(full) == 1 for full in full_pages)

    # -- pins

    def make_room(self, count: int) -> bool:
        """Evicts idle pages until `count` can be assigned now. False if that is impossible."""
        if self.pool.num_free < count:
            self._evict(count)
        return self.pool.num_free >= count

    def assign(self, full_pages: Sequence[int]) -> None:
        """Gives each of these new full pages a window page with one pin. `make_room` must have succeeded."""
        count = len(full_pages)
        if not count:
            return
        pages = self.pool.take(count)
        if pages is None:
            raise MoeEngineError(
                f"the window pool of {self.pool.num_total} pages has {self.pool.num_free} free pages; {count} are "
                f"needed, {len(self._pins)} are pinned, and {self.pool.num_pending} are in use by steps in flight"
            )
        for full, page in zip(full_pages, pages):
            self.page_of[full] = self._writes[full] = page
            self._pins[full] = 1

    def pin(self, full_pages: Iterable[int]) -> None:
        """Adds a pin to pages that have a window page."""
        pins = self._pins
        for full in full_pages:
            count = pins.get(full, 0)
            pins[full] = count + 1
            if not count:
                del self._idle[full]

    def unpin(self, full_pages: Iterable[int], after_step: int) -> None:
        """Removes a pin. `after_step` is the last step in which its holder may read the window page."""
        pins, read_until = self._pins, self._read_until
        for full in full_pages:
            count = pins[full] - 1
            if after_step > read_until.get(full, 0):
                read_until[full] = after_step
            if count:
                pins[full] = count
            else:
                del pins[full]
                self._idle[full] = None

    def _evict(self, count: int) -> None:
        """Frees idle window pages until `count` can be taken; pages that a step in flight may read come later."""
        while self.pool.num_free < count and self._idle:
            full, _ = self._idle.popitem(last=False)
            self._writes.pop(full, None)
            page = self.page_of.pop(full)
            if full in self.resumed:
                self.resumed.remove(full)
                if self.host is not None:
                    self.host.evicted(full, page)
            self.pool.give([page], self._read_until.pop(full, 0))
            self.num_evicted += 1

    # -- changes of full pages

    def drop(self, full_pages: Sequence[int]) -> None:
        """Releases the window pages of freed full pages, none of which has a pin. Most of these window pages left the
        window long before and are allocatable immediately; the full pages are held back longer."""
        if self.host is not None:
            self.host.drop_slots(full_pages)
            self.resumed.difference_update(full_pages)
        for full in full_pages:
            page = self.page_of.pop(full, None)
            if page is None:
                continue
            self._writes.pop(full, None)
            self._idle.pop(full, None)
            if self._pins.pop(full, 0):
                raise MoeEngineError(f"the KV page at slot {full} was freed while a request reads its window page")
            self.pool.give([page], self._read_until.pop(full, 0))

    def replace(self, own: Sequence[int], shared: Sequence[int], after_step: int) -> None:
        """Makes a request use the pages `shared`, which hold the same tokens, instead of its pages `own`.

        The pins move. A shared page without a window page takes the window page of the replaced page.
        """
        for old, new in zip(own, shared):
            page = self.page_of.get(old)
            if page is None:
                continue
            if old in self.resumed:
                self.resumed.add(new)
            if new not in self.page_of:
                self._rename(old, new, page)
            elif old in self._pins:
                self.pin((new,))
                self.unpin((old,), after_step)

    def _rename(self, old: int, new: int, page: int) -> None:
        del self.page_of[old]
        self.page_of[new] = self._writes[new] = page
        self._writes.pop(old, None)
        if old in self._read_until:
            self._read_until[new] = self._read_until.pop(old)
        if old in self._pins:
            self._pins[new] = self._pins.pop(old)
        else:
            del self._idle[old]
            self._idle[new] = None

    # -- loads from the host tier

    def resume(self, full_pages: Iterable[int]) -> None:
        """A request ended behind the windows of these pages, or continued there: with a host tier they are stored when
        they leave the device."""
        if self.host is not None:
            self.resumed.update(full for full in full_pages if full in self.page_of)

    def take_for_load(self, count: int) -> list[int] | None:
        """Window pages that a load will write; None if there is no room."""
        pages = self.pool.take(count) if self.make_room(count) else None
        self.loading.update(pages or ())
        return pages

    def loaded(self, full: int, page: int) -> None:
        """A page of `take_for_load` has the content of a full page, unless that has one meanwhile."""
        if full in self.page_of:
            self.give_back([page], 0)
            return
        self.loading.remove(page)
        self.page_of[full] = self._writes[full] = page
        self._idle[full] = None
        self.resumed.add(full)

    def give_back(self, pages: Sequence[int], after_step: int) -> None:
        """Frees pages of `take_for_load`."""
        self.loading.difference_update(pages)
        self.pool.give(list(pages), after_step)

    # -- plans

    def take_writes(self) -> list[int]:
        """The mappings since the last call: full page, window page, full page, ..."""
        if not self._writes:
            return []
        writes = list(chain.from_iterable(self._writes.items()))
        self._writes.clear()
        return writes

    def repeat_writes(self, writes: Sequence[int]) -> None:
        """Adds earlier mappings that are still valid to the next plan."""
        for full, page in zip(writes[::2], writes[1::2]):
            if self.page_of.get(full) == page:
                self._writes[full] = page

    # -- integrity

    def check(self, pinned: Iterable[int], owned: set[int]) -> list[str]:
        """Compares pins with those that requests hold, and mappings with the `owned` full pages. Repairs the pins."""
        findings = []
        wanted: dict[int, int] = {}
        for full in pinned:
            wanted[full] = wanted.get(full, 0) + 1
        if missing := wanted.keys() - self.page_of.keys():
            findings.append(f"window pages: {len(missing)} that requests read are not there")
        if stray := self.page_of.keys() - owned:
            findings.append(f"window pages: {len(stray)} belong to free KV pages")
        if wanted != self._pins or self.page_of.keys() - self._pins.keys() != self._idle.keys():
            findings.append(f"window pages: {len(self._pins)} were pinned; requests hold {len(wanted)}")
            self._pins = {full: count for full, count in wanted.items() if full in self.page_of}
            self._idle = OrderedDict.fromkeys(full for full in self.page_of if full not in self._pins)
        return findings
