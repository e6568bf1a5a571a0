"""The simulated engine core with a KV connector: the fake worker copies hashes between pool and host with a delay."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import KVLoad, StepPlan, StepResult
from tests.scheduler.drafting_worker import RUBBISH, DraftingWorker
from tests.scheduler.simulator import FakeWorker, Simulation
from tests.scheduler.state_worker import StateWorker
from tests.scheduler.windowed_worker import WindowedWorker


class _Copying:
    """Mixin of a fake worker: a load writes its slots at its end, a random number of steps later; until then the slots
    are invalid."""

    pool: dict[int, int]
    queue: Any
    touched: Any
    rows: dict[int, Any]
    last_number: int
    config: SchedulerConfig

    def _begin(self, rng: random.Random, late: float) -> None:
        self.pools: list[dict[int, Any]] = [self.pool]
        self.snapshots: dict[int, Any] = getattr(self, "snapshots", {})
        self.host_states: dict[int, Any] = {}
        self.window_pool: dict[int, Any] = getattr(self, "window_pool", {})
        self.host_windows: dict[int, list[Any]] = {}
        self.host: dict[int, list[Any]] = {}
        self.loading: dict[int, tuple[KVLoad, list[list[Any]], list[Any], list[list[Any]]]] = {}
        self.unreported: list[int] = []
        self.num_stored = 0
        self.abandoned: set[int] = set()
        """Loads in progress at a failed step: they read before later stores write, because copies run in plan order."""
        self._rng = rng
        self._late = late

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)  # type: ignore[misc]
        arrived = set(plan.kv_ops.arrived) if plan.kv_ops is not None else set()
        assert not self.slots_loading(arrived) & written_slots(plan), "slots were reused during a load"

    def slots_loading(self, but: set[int]) -> set[int]:
        return {slot for number, (load, *_) in self.loading.items() if number not in but for slot in load.slots}

    def execute(self) -> StepResult:
        self.copy(self.queue[0])
        assert not self.slots_loading(set()) & written_slots(self.queue[0]), "a step writes slots during a load"
        targets = {snapshot for load, *_ in self.loading.values() for _, snapshot in load.states}
        assert targets.isdisjoint(used_snapshots(self.queue[0])), "a step uses a snapshot during a load"
        result: StepResult = super().execute()  # type: ignore[misc]
        for number in list(self.loading):
            if self._rng.random() >= self._late:
                self.end(number)
        done, self.unreported = self.unreported, []
        return replace(result, kv_done=tuple(done))

    def copy(self, plan: StepPlan) -> None:
        ops = plan.kv_ops
        if ops is None:
            return
        assert len(set(ops.store_places)) == len(ops.store_places) == len(ops.store_slots)
        assert not self.loading.keys() & set(ops.arrived), "used before it arrived"
        sources = {p for n, (load, *_) in self.loading.items() if n not in self.abandoned for p in load.places}
        assert not sources & set(ops.store_places), "a place was reused during a load from it"
        for slot, place in zip(ops.store_slots, ops.store_places):
            self.host[place] = [pool.get(slot) for pool in self.pools]
            self.num_stored += 1
        assert len({entry for _, entry in ops.state_stores}) == len(ops.state_stores)
        entries = {e for n, (load, *_) in self.loading.items() if n not in self.abandoned for e, _ in load.states}
        assert entries.isdisjoint(entry for _, entry in ops.state_stores), "an entry was reused during a load from it"
        for snapshot, entry in ops.state_stores:
            self.host_states[entry] = self.snapshots[snapshot]
        assert len({entry for _, entry in ops.window_stores}) == len(ops.window_stores)
        entries = {e for n, (load, *_) in self.loading.items() if n not in self.abandoned for e, _ in load.windows}
        assert entries.isdisjoint(entry for _, entry in ops.window_stores), "an entry was reused during a load from it"
        for page, entry in ops.window_stores:
            self.host_windows[entry] = [self.window_pool.get(slot) for slot in self.window_slots(page)]
        for load in ops.loads:
            states = [self.host_states[entry] for entry, _ in load.states]
            windows = [self.host_windows[entry] for entry, _ in load.windows]
            self.loading[load.id] = (load, [self.host[place] for place in load.places], states, windows)
            for _, page in load.windows:
                self.window_pool.update((slot, RUBBISH) for slot in self.window_slots(page))
            self.snapshots.update((snapshot, RUBBISH) for _, snapshot in load.states)
            for slot, pool in product(load.slots, self.pools):
                pool.pop(slot, None)

    def window_slots(self, page: int) -> range:
        return range(page, page + self.config.page_size)

    def end(self, number: int) -> None:
        load, values, states, windows = self.loading.pop(number)
        for (_, page), kept in zip(load.windows, windows):
            self.window_pool.update(zip(self.window_slots(page), kept))
        self.snapshots.update((snapshot, state) for (_, snapshot), state in zip(load.states, states))
        for slot, each in zip(load.slots, values):
            for pool, value in zip(self.pools, each):
                if value is not None:
                    pool[slot] = value
        self.unreported.append(number)


class CopyingWorker(_Copying, FakeWorker):
    """A copying worker without speculation; its steps can fail."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, late: float) -> None:
        super().__init__(config)
        self._begin(rng, late)

    def fail(self) -> StepPlan:
        """The oldest step fails, possibly after its copies. Its started copies end before the failure is reported;
        later steps do not run."""
        failed = self.queue.popleft()
        self.touched.popleft()
        before = set(self.loading)
        if self._rng.random() < 0.5:
            self.copy(failed)
        for number in self.loading.keys() - before:
            self.end(number)
        self.abandoned |= self.loading.keys()
        for slot in failed.slots:
            self.pool.pop(slot, None)
        self.queue.clear()
        self.touched.clear()
        self.last_number += 1
        return failed

    def _update_rows(self, plan: StepPlan) -> None:
        """A plan after a failed one repeats the failed plan's row releases and writes."""
        for row in plan.finished_rows:
            self.rows.pop(row, None)
        super()._update_rows(replace(plan, finished_rows=[]))


class CopyingStateWorker(CopyingWorker, StateWorker):
    """A copying worker of a model with states, whose snapshots are copied too."""

    def fail(self) -> StepPlan:
        failed = super().fail()
        stored = [slot for *_, slot in (*failed.state_ops.cuts, *failed.state_ops.saves)] if failed.state_ops else []
        self.snapshots.update(dict.fromkeys(stored, RUBBISH))
        return failed


class CopyingWindowedWorker(CopyingWorker, WindowedWorker):
    """A copying worker with a second pool for windowed layers, whose pages are copied too."""

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        arrived = set(plan.kv_ops.arrived) if plan.kv_ops is not None else set()
        pages = [page for n, (load, *_) in self.loading.items() if n not in arrived for _, page in load.windows]
        slots = {slot for page in pages for slot in self.window_slots(page)}
        assert self.reads[-1].isdisjoint(slots), "used while loading"

    def fail(self) -> StepPlan:
        failed = super().fail()
        self.reads.clear()
        mapped = self.page_of | dict(zip(failed.window_pages[::2], failed.window_pages[1::2]))
        self.window_pool.update((self._mapped(mapped, slot), RUBBISH) for slot in failed.slots)
        if self._rng.random() < 0.5:
            self.page_of = mapped
        return failed


class CopyingDrafter(_Copying, DraftingWorker):
    """A copying worker with speculation: the drafter's KV is copied too."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, late: float, seed: int, luck: float) -> None:
        super().__init__(config, seed, luck)
        self._begin(rng, late)
        self.pools = [self.pool, self.drafter_pool]


def written_slots(plan: StepPlan) -> set[int]:
    """Slots that a plan allocates."""
    reserved = plan.speculation.reserved if plan.speculation is not None else []
    return set(plan.slots).union(*(write.slots for write in reserved))


def used_snapshots(plan: StepPlan) -> set[int]:
    """Snapshots that a plan writes or reads."""
    ops = plan.state_ops
    written = {slot for *_, slot in (*ops.cuts, *ops.saves)} if ops is not None else set()
    return written | {new.snapshot for new in plan.new_rows}


class TierSimulation(Simulation):
    """`Simulation` with a host tier. Arrivals wake an idle core."""

    worker: CopyingWorker

    def __init__(
        self, config: SchedulerConfig, rng: random.Random, *, overlap: bool, late: float, luck: float = 0.0
    ) -> None:
        if config.speculation is not None:
            worker: Any = CopyingDrafter(config, rng, late, rng.randrange(10**6), luck)
        else:
            windows = CopyingWindowedWorker if config.window else CopyingWorker
            worker = (CopyingStateWorker if config.num_snapshots else windows)(config, rng, late)
        super().__init__(config, overlap=overlap, worker=worker)

    def take_arrivals(self) -> bool:
        for number in list(self.worker.loading)[:1]:
            self.worker.end(number)
        done, self.worker.unreported = self.worker.unreported, []
        if done:
            self.scheduler.kv_arrived(done)
        return bool(done) or (self.scheduler.is_held_back and super().take_arrivals())

    def check_end(self) -> None:
        connector = self.scheduler.kv_cache.connector
        assert connector is not None
        super().check_end()
        assert connector.num_stored == 0 and connector.num_loading == 0
