"""Slots of LoRA adapters: which adapter each slot of the worker holds, and which requests may be admitted.

A slot is in use while a request with a row has its adapter. An adapter without a slot takes an empty one, or the slot
of the least recently used adapter that is not in use; the worker copies it before the next step. The number of
different adapters in a batch is therefore at most the number of slots; requests of the base model need no slot.

A request that finds all slots in use waits, and requests behind it whose adapters have slots may overtake it, at most
`MAX_OVERTAKES` times. From then on no request with an adapter is admitted before it, so that slots become free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from moe_engine.types import NO_LORA, NO_LORA_SLOT, Request

MAX_OVERTAKES = 64


class LoraSlots:
    """`num_slots` slots. `loads` are sent with the next plan, as (slot, adapter)."""

    def __init__(self, num_slots: int) -> None:
        self.loads: list[tuple[int, int]] = []
        self._free = list(range(num_slots))[::-1]
        self._slots: OrderedDict[int, int] = OrderedDict()  # of each adapter, the least recently used first
        self._users: dict[int, int] = {}  # requests with a row, by adapter
        self._pinned: set[int] = set()
        self._retired: set[int] = set()  # unloaded while a request still had a row
        self._admissions = 0

    @property
    def adapters(self) -> list[int]:
        """Adapters that have a slot."""
        return list(self._slots)

    def may_join(self, request: Request, barred: bool) -> bool:
        """Whether a waiting request can be admitted now. `barred`: a request before it has waited for too long."""
        if request.lora_id == NO_LORA:
            return True
        if not barred and (request.lora_id in self._slots or self._free or self._victim() is not None):
            return True
        if request.lora_waits_since < 0:
            request.lora_waits_since = self._admissions
        return False

    def bars(self, request: Request) -> bool:
        """Whether a request that cannot be admitted lets no other adapter pass."""
        return request.lora_waits_since >= 0 and self._admissions - request.lora_waits_since >= MAX_OVERTAKES

    def take(self, request: Request) -> None:
        """The slot of an admitted request, for which `may_join` was True."""
        adapter = request.lora_id
        if adapter == NO_LORA:
            return
        self._admissions += 1
        request.lora_waits_since = -1
        if adapter not in self._slots:
            self._slots[adapter] = self._free.pop() if self._free else self._evict()
            self.loads.append((self._slots[adapter], adapter))
        self._slots.move_to_end(adapter)
        if request.lora_pinned:
            self._pinned.add(adapter)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        request.lora_slot = self._slots[adapter]

    def release(self, request: Request) -> None:
        """Records that the request has released its row."""
        adapter = request.lora_id
        if request.lora_slot == NO_LORA_SLOT:
            return
        request.lora_slot = NO_LORA_SLOT
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            if adapter in self._retired:
                self.retire(adapter)

    def users_of_one(self, requests: Iterable[Request]) -> list[Request]:
        """Of requests with a row: all users of one adapter, the fewest that free a slot; empty if they free none."""
        users: dict[int, list[Request]] = {}
        for request in requests:
            users.setdefault(request.lora_id, []).append(request)
        whole = [own for a, own in users.items() if len(own) == self._users.get(a) and a not in self._pinned]
        return min(whole, key=len, default=[])

    def retire(self, adapter: int) -> None:
        """The adapter was unloaded: its slot is free once no request uses it."""
        if adapter in self._users:
            self._retired.add(adapter)
            return
        self._retired.discard(adapter)
        self._pinned.discard(adapter)
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._free.append(slot)

    def take_loads(self) -> list[tuple[int, int]]:
        """The loads since the last plan."""
        loads, self.loads = self.loads, []
        return loads

    def repeat(self, loads: Iterable[tuple[int, int]]) -> None:
        """Sends the loads of failed plans again, as far as they are still valid: the worker may not have done them."""
        again = [load for load in loads if self._slots.get(load[1]) == load[0] and load not in self.loads]
        self.loads = again + self.loads

    def start_over(self) -> None:
        """Resets: no request has a row any more, and the worker's slots are unknown."""
        num_slots = len(self._free) + len(self._slots)
        self._free, self.loads = list(range(num_slots))[::-1], []
        self._slots.clear()
        self._users.clear()
        self._retired.clear()

    def check_integrity(self, live: Iterable[Request]) -> list[str]:
        """Recounts the users of adapters and repairs the counts. Returns the findings."""
        users = Counter(request.lora_id for request in live if request.lora_slot != NO_LORA_SLOT)
        if users == self._users:
            return []
        finding = f"adapters with users: {self._users} were counted, requests have {dict(users)}"
        self._users = dict(users)
        for adapter in self._retired - self._users.keys():
            self.retire(adapter)
        return [finding]

    def _victim(self) -> int | None:
        """The least recently used adapter that may lose its slot."""
        return next((a for a in self._slots if a not in self._users and a not in self._pinned), None)

    def _evict(self) -> int:
        victim = self._victim()
        assert victim is not None
        return self._slots.pop(victim)
