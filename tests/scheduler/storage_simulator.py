"""The simulated engine core with a storage below the host tier: pages of hashes by key, with random faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import KVBackup, KVFetch, KVReport, StepPlan
from moe_engine.types.kv_ops import LAST_STATE, NO_STATE
from tests.scheduler.tier_simulator import TierSimulation


@dataclass
class Faults:
    """Probabilities: a stored page cannot be read; a page is not stored; an operation makes no progress in a turn; an
    operation hangs until it is stopped. `dead`: all operations hang, stopped ones too."""

    unreadable: float = 0.0
    unstored: float = 0.0
    slow: float = 0.0
    hangs: float = 0.0
    dead: bool = False


@dataclass
class _Op:
    op: KVFetch | KVBackup
    hangs: bool
    done: int = 0


class FakeStorage:
    """The storage's part of all ranks' workers. `pages` is kept beyond the simulation, for a restarted engine."""

    def __init__(self, rng: random.Random, faults: Faults, pages: dict[bytes, list[Any]], page_size: int) -> None:
        self.pages, self._rng, self._faults, self._size = pages, rng, faults, page_size
        self.open: dict[int, _Op] = {}
        self.reports: list[KVReport] = []
        self.last = 0
        self.states: Callable[[], dict[int, Any]] = dict
        """States by host entry."""
        self.num_compared: int | None = None
        """Pools with equal KV for a key. While drafting is disabled a drafter computes no KV, so with an automatic
        depth only the model's KV is equal."""

    def begin(self, plan: StepPlan, host: dict[int, Any]) -> None:
        ops = plan.kv_ops
        if ops is None:
            return
        for number in ops.stops:
            if number in self.open:
                self.open[number].hangs = False
                self.open[number].op.keys[self.open[number].done :] = []
            elif number > self.last:
                self.last = number
                self.reports.append(KVReport(number, 0, True))
        for op in sorted((*ops.fetches, *ops.backups), key=lambda op: op.id):
            if op.id > self.last:
                self.last = op.id
                copy = type(op)(op.id, list(op.keys), list(op.pages), op.state)
                self.open[op.id] = _Op(copy, self._rng.random() < self._faults.hangs)
        written = {place // self._size for place in ops.store_places}
        fetches = [each for each in self.open.values() if isinstance(each.op, KVFetch)]
        written_by_fetch = [page for each in fetches for page in each.op.pages[each.done : len(each.op.keys)]]
        assert len(written_by_fetch) == len(set(written_by_fetch)) and written.isdisjoint(written_by_fetch)
        begun = {op.id for op in ops.backups}
        for each in self.open.values():
            if isinstance(each.op, KVBackup) and each.op.id not in begun:
                assert written.isdisjoint(each.op.pages), "a page was overwritten while it is backed up"
            if isinstance(each.op, KVBackup):
                assert set(each.op.pages).isdisjoint(written_by_fetch), "a page is loaded while it is backed up"

    def progress(self, host: dict[int, Any]) -> None:
        for number in list(self.open):
            each = self.open[number]
            if self._faults.dead or each.hangs or self._rng.random() < self._faults.slow:
                continue
            ended = self._step(each, host)
            self.reports.append(KVReport(number, each.done, ended))
            if ended:
                del self.open[number]

    def _step(self, each: _Op, host: dict[int, Any]) -> bool:
        op = each.op
        if isinstance(op, KVFetch) and not op.pages:
            while each.done < len(op.keys) and op.keys[each.done] in self.pages:
                each.done += 1
            while op.state == LAST_STATE and each.done and state_key(op.keys[each.done - 1]) not in self.pages:
                each.done -= 1
            return True
        if each.done >= len(op.keys):
            return True
        if op.state != NO_STATE and not each.done and not self._copy_state(op, self.states()):
            return True
        if isinstance(op, KVBackup) and op.state != NO_STATE:
            each.done = 1
            return True
        key, page = op.keys[each.done], op.pages[each.done]
        places = range(page * self._size, (page + 1) * self._size)
        if isinstance(op, KVFetch):
            if key not in self.pages or self._rng.random() < self._faults.unreadable:
                for place in places:
                    host[place] = None  # possibly overwritten
                return True
            host.update(zip(places, self.pages[key]))
        elif self._rng.random() >= self._faults.unstored:
            values = [host[place] for place in places]
            stored = self.pages.setdefault(key, values)
            for one, other in zip(values, stored, strict=True):
                assert one[: self.num_compared] == other[: self.num_compared], "another page under the same key"
        each.done += 1
        return each.done >= len(op.keys)

    def _copy_state(self, op: KVFetch | KVBackup, states: dict[int, Any]) -> bool:
        """Reads or writes the state of an operation; False if a read fails."""
        key = state_key(op.keys[-1])
        if isinstance(op, KVBackup):
            if self._rng.random() >= self._faults.unstored:
                assert self.pages.setdefault(key, [states[op.state]]) == [states[op.state]], "another state"
            return True
        states[op.state] = None  # possibly overwritten
        if key not in self.pages or self._rng.random() < self._faults.unreadable:
            return False
        states[op.state] = self.pages[key][0]
        return True


def state_key(key: bytes) -> bytes:
    return key + b" state"


class StorageSimulation(TierSimulation):
    """`TierSimulation` with storage."""

    may_be_empty = True

    def __init__(
        self, config: SchedulerConfig, rng: random.Random, faults: Faults, pages: dict[bytes, list[Any]], **more: Any
    ) -> None:
        super().__init__(config, rng, **more)
        self.storage = FakeStorage(rng, faults, pages, config.page_size)
        if config.speculation is not None and config.speculation.auto_depth:
            self.storage.num_compared = 1
        self.storage.states = lambda: self.worker.host_states
        storage_tier = self.scheduler.kv_cache.storage
        assert storage_tier is not None
        self.storage_tier = storage_tier
        storage_tier.clock = lambda: self.now
        storage_tier.max_hash_tokens = rng.choice([config.page_size, 64, 4096])
        inner = self.worker.copy

        def copy(plan: StepPlan) -> None:
            inner(plan)
            self.storage.begin(plan, self.worker.host)

        self.worker.copy = copy  # type: ignore[method-assign]

    def turn(self) -> bool:
        self.deliver()
        return super().turn()

    def deliver(self) -> bool:
        self.storage.progress(self.worker.host)
        reports, self.storage.reports = self.storage.reports, []
        if reports:
            self.scheduler.kv_arrived([], reports)
        return bool(reports)

    def take_arrivals(self) -> bool:
        if super().take_arrivals() or self.deliver():
            return True
        if self.scheduler.kv_cache.num_fetching():  # an idle core checks its deadlines
            self.now += 1.0
            return True
        return False

    def settle(self) -> None:
        """Runs until the storage is idle. Hanging operations are stopped."""
        self.run_to_end()
        for each in self.storage.open.values():
            each.hangs = False
        for _ in range(10_000):
            if not (
                self.worker.queue or self.storage.open or self.storage.reports or self.scheduler.kv_cache.has_kv_ops
            ):
                return
            self.turn()
        raise AssertionError("the storage does not settle")

    def check_end(self) -> None:
        self.settle()
        assert not self.storage_tier.num_open and not self.storage_tier.pinned and not self.storage_tier.held_pages()
        super().check_end()
