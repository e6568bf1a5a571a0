"""Slot allocator: free lists that hold back freed KV slots (and rows) while a step in flight may still use them.

Ids are freed "after step s": they are allocatable again once `retire(s)` reports that step s has finished. One step is
in flight while the next is planned, so without this a late write of an ended request could corrupt a new request's KV.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakValueDictionary


class _SharedIds(list[int]):
    """The first ids of a range, as many as any of its pools has taken: sixteen million slots would be 660 MB."""

    _growing = Lock()  # pools of several threads

    def grow(self, ids: range, count: int) -> None:
        with self._growing:
            self += ids[len(self) : count]


_SHARED: WeakValueDictionary[range, _SharedIds] = WeakValueDictionary()


class DeferredFreePool:
    """A pool of integer ids, freed by step number. Used directly for the rows of the worker's tables.

    Allocation takes from the end of a list, so a batch costs one slice. Double frees are not detected in this hot path;
    `integrity.py` finds them. Ids that were never taken exist as a range only: a list of a million slots has tens of
    megabytes.

    Attributes:
        num_free: ids that `take` can allocate now. num_pending: freed ids that a step in flight may still use.
    """

    __slots__ = ("_all", "_first_fresh", "_free", "_pending", "_retired", "_shared", "num_free", "num_pending")

    def __init__(self, ids: range) -> None:
        self._all = ids
        self._shared: _SharedIds | None = None
        self._retired = 0
        self.num_pending = 0
        self.reset()

    def share(self) -> None:
        """Takes the ids from a list shared by all such pools of this process: each pool then holds pointers only."""
        self._shared = _SHARED.setdefault(self._all, _SharedIds())

    def reset(self) -> None:
        """Frees all ids."""
        self._free: list[int] = []
        self._first_fresh = 0
        """The ids of `_all` from this index on were never taken since the reset."""
        self._pending: dict[int, list[int]] = {}
        self.num_free, self.num_pending = len(self._all), 0

    @property
    def num_total(self) -> int:
        return len(self._all)

    def take(self, count: int) -> list[int] | None:
        """Allocates `count` ids; None, without a change, if fewer are free."""
        if count > self.num_free:
            return None
        self.num_free -= count
        free = self._free
        begin = len(free) - count
        if begin < 0:
            return self._take_fresh(-begin)
        taken = free[begin:]
        del free[begin:]
        taken.reverse()
        return taken

    def _take_fresh(self, count: int) -> list[int]:
        """All freed ids, then `count` ids that were never taken."""
        free, first, shared = self._free, self._first_fresh, self._shared
        end = self._first_fresh = first + count
        if shared is None:
            fresh = list(self._all[first:end])
        else:
            if end > len(shared):
                shared.grow(self._all, end)
            fresh = shared[first:end]
        if not free:
            return fresh
        taken = [*reversed(free), *fresh]  # ascending, so that slots are neighbors
        free.clear()
        return taken

    def give(self, ids: list[int], after_step: int) -> None:
        """Frees ids; they become allocatable with `retire(after_step)`, or immediately if that was already called."""
        if not ids:
            return
        if after_step <= self._retired:
            self._free += ids
            self.num_free += len(ids)
            return
        waiting = self._pending.get(after_step)
        if waiting is None:
            self._pending[after_step] = list(ids)
        else:
            waiting += ids
        self.num_pending += len(ids)

    def retire(self, completed_step: int) -> int:
        """Frees ids of the steps up to `completed_step`, which have finished. Returns the number of freed ids."""
        if completed_step > self._retired:
            self._retired = completed_step
        if not self._pending:
            return 0
        released = 0
        for step in [s for s in self._pending if s <= completed_step]:
            ids = self._pending.pop(step)
            self._free += ids
            released += len(ids)
        self.num_pending -= released
        self.num_free += released
        return released

    def all_ids(self) -> list[int]:
        return list(self._all)

    def free_ids(self) -> list[int]:
        return [*self._all[self._first_fresh :], *self._free]

    def pending_ids(self) -> dict[int, list[int]]:
        return {step: list(ids) for step, ids in self._pending.items()}

    def rebuild(self, owned: set[int]) -> None:
        """Repairs the pool: ids that are neither `owned` nor pending are free, each id once."""
        seen = set(owned)
        pending: dict[int, list[int]] = {}
        for step, ids in self._pending.items():
            kept = []
            for i in ids:
                if i not in seen:
                    seen.add(i)
                    kept.append(i)
            if kept:
                pending[step] = kept
        self._pending = pending
        self.num_pending = sum(map(len, pending.values()))
        self._free = [i for i in reversed(self._all) if i not in seen]
        self.num_free, self._first_fresh = len(self._free), len(self._all)


class SlotAllocator:
    """Pages of `page_size` KV slots over [page_size, num_slots + page_size); page 0 is a dummy for padded tokens.

    A page is identified by its first slot. The holder of a page's first slot owns the whole page; a request fills a
    page slot by slot without further allocation. Counts are in tokens unless a name contains "pages".
    """

    __slots__ = ("num_slots", "page_size", "pages")

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        if num_slots % page_size:
            raise ValueError(f"num_slots {num_slots} is not a multiple of page_size {page_size}")
        self.num_slots = num_slots
        self.page_size = page_size
        self.pages = DeferredFreePool(range(page_size, num_slots + page_size, page_size))

    @property
    def num_free(self) -> int:
        return self.pages.num_free * self.page_size

    @property
    def num_pending(self) -> int:
        return self.pages.num_pending * self.page_size

    def alloc(self, count: int, last_slot: int = 0, used: int = 0) -> list[int] | None:
        """Slots for the next `count` tokens of a sequence that has `used` tokens, the last of them in `last_slot`.

        Fills the page of `last_slot`, then takes new pages. None, without a change, if too few pages are free.
        """
        page = self.page_size
        if page == 1:
            return self.pages.take(count)
        in_page = min(count, -used % page)
        slots = list(range(last_slot + 1, last_slot + 1 + in_page))
        left = count - in_page
        bases = self.pages.take(-(-left // page))
        if bases is None:
            return None
        for base in bases:
            slots.extend(range(base, base + min(page, left)))
            left -= page
        return slots

    def free(self, slots: list[int], after_step: int) -> None:
        """Frees the pages of `slots`, a run that starts at a page boundary; its last page may be partly filled."""
        self.pages.give(slots if self.page_size == 1 else slots[:: self.page_size], after_step)

    def retire(self, completed_step: int) -> int:
        """Returns the number of slots that this frees."""
        return self.pages.retire(completed_step) * self.page_size

    def reset(self) -> None:
        self.pages.reset()
