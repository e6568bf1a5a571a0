"""Slots of LoRA adapters: random requests against the rules, least recent use, and bounded waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.lora_slots import MAX_OVERTAKES, LoraSlots
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.types import NO_LORA_SLOT, Request, SamplingParams, StepPlan, StepResult
from tests.scheduler.simulator import Simulation, make_request


def request(rid: str, adapter: int, length: int = 4, new: int = 3, pinned: bool = False) -> Request:
    sampling = SamplingParams(ignore_eos=True)
    return Request(rid, [7] * length, sampling, new, lora_id=adapter, lora_pinned=pinned)


def step(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.schedule()
    if not isinstance(plan, StepPlan):
        return None
    rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
    scheduler.update(StepResult(plan.number, rows, [[5] for _ in rows]))
    return plan


def test_batches_hold_at_most_so_many_adapters_and_all_requests_end() -> None:
    rng = random.Random(random.randrange(2**31))
    scheduler = Scheduler(SchedulerConfig(num_slots=512, context_len=64, max_rows=6, lora_slots=2))
    waiting = [request(f"r{i}", rng.randrange(5), rng.randrange(1, 9), rng.randrange(1, 6)) for i in range(60)]
    adapter_of, in_slot, rows = {r.rid: r.lora_id for r in waiting}, {}, {}
    while waiting or not scheduler.is_idle():
        for _ in range(min(len(waiting), rng.randrange(4))):
            scheduler.add(waiting.pop())
        plan = step(scheduler)
        if plan is None:
            continue
        in_slot |= dict(plan.lora_loads)
        rows |= {new.row: new for new in plan.new_rows}
        for row in plan.rows:
            adapter, slot = adapter_of[rows[row].rid], rows[row].lora_slot
            assert in_slot[slot] == adapter if adapter else slot == NO_LORA_SLOT
        assert len({rows[row].lora_slot for row in plan.rows} - {NO_LORA_SLOT}) <= 2
    assert scheduler.check_integrity() == []


def test_prefixes_are_not_shared_between_adapters() -> None:
    scheduler = Scheduler(SchedulerConfig(num_slots=512, context_len=128, max_rows=1, lora_slots=2))
    cached = []
    for i, adapter in enumerate((0, 1, 1, 2, 0, 3, 1)):
        scheduler.add(one := request(f"r{i}", adapter, 50, 1))
        while not scheduler.is_idle():
            step(scheduler)
        cached.append(one.cached_tokens)
    assert cached == [0, 0, 49, 0, 49, 0, 49]


def test_the_least_recently_used_adapter_loses_its_slot_unless_it_is_pinned() -> None:
    slots = LoraSlots(2)

    def use(adapter: int, pinned: bool = False) -> None:
        one = request("r", adapter, pinned=pinned)
        assert slots.may_join(one, False)
        slots.take(one)
        slots.release(one)

    for adapter in (1, 2, 1, 3):
        use(adapter)
    assert slots.take_loads() == [(0, 1), (1, 2), (1, 3)] and sorted(slots.adapters) == [1, 3]
    use(1, pinned=True)
    use(3)
    use(4)
    assert sorted(slots.adapters) == [1, 4]
    slots.retire(1)
    use(5)
    assert sorted(slots.adapters) == [4, 5]


def test_a_retired_adapter_keeps_its_slot_while_a_request_uses_it() -> None:
    slots, one = LoraSlots(1), request("r", 1)
    slots.take(one)
    slots.retire(1)
    assert not slots.may_join(request("s", 2), False)
    slots.release(one)
    assert slots.adapters == [] and slots.may_join(request("s", 2), False)


def test_a_lost_user_of_an_adapter_is_found_and_repaired() -> None:
    scheduler = Scheduler(SchedulerConfig(num_slots=512, context_len=64, max_rows=2, lora_slots=1))
    scheduler.add(lost := request("lost", 1))
    step(scheduler)
    lost.lora_slot = NO_LORA_SLOT  # its end does not count it
    assert len(scheduler.check_integrity()) == 1 and scheduler.check_integrity() == []
    scheduler.add(request("other", 2))
    for _ in range(9):
        step(scheduler)
    assert scheduler.is_idle() and scheduler.check_integrity() == []


def test_waiting_for_a_slot_ends() -> None:
    """A stream of requests with the adapter in the only slot: another adapter gets its turn."""
    scheduler = Scheduler(SchedulerConfig(num_slots=2048, context_len=64, max_rows=4, lora_slots=1))
    numbers = iter(range(10**6))
    for _ in range(3):
        scheduler.add(request(f"a{next(numbers)}", 1))
    step(scheduler)
    scheduler.add(request("b", 2))
    base = 0
    while "b" in scheduler.table.live and scheduler.table.live["b"].row < 0:
        while len(scheduler.table.queue) < 4:
            scheduler.add(request(f"a{(number := next(numbers))}", 1 if number % 3 else 0))
        plan = step(scheduler)
        base += sum(new.lora_slot == NO_LORA_SLOT for new in plan.new_rows) if plan is not None else 0
        assert next(numbers) < 40 * MAX_OVERTAKES
    assert base  # requests of the base model were admitted meanwhile
    for _ in range(20):
        step(scheduler)
    assert "b" not in scheduler.table.live


def urgent_behind(running: list[int], waiting: list[int], slots: int, **config: Any) -> tuple[list[str], Simulation]:
    """The requests in the order of their ends: some run with these adapters, then some of priority 0 wait, then an
    urgent one arrives with adapter 9."""
    base = SchedulerConfig(num_slots=2048, context_len=128, max_rows=8, lora_slots=slots)
    sim = Simulation(replace(base, uses_priority=True, **config))
    ended: list[str] = []

    def add(rid: str, adapter: int, new: int, priority: int) -> None:
        one = make_request(rid, [3] * 5, new, ignore_eos=True, priority=priority)
        one.lora_id = adapter
        sim.add(one)

    for i, adapter in enumerate(running):
        add(f"r{i}", adapter, 30, 0)
        for _ in range(3):
            sim.turn()
    for i, adapter in enumerate(waiting):
        add(f"w{i}", adapter, 5, 0)
    add("urgent", 9, 5, 50)
    while sim.turn():
        ended += [rid for rid, outcome in sim.outcomes.items() if outcome.reason is not None and rid not in ended]
    ended += [rid for rid in sim.outcomes if rid not in ended]
    sim.check_end()
    return ended, sim


def test_an_urgent_request_is_not_overtaken_by_less_urgent_ones_with_other_adapters() -> None:
    ended, _ = urgent_behind([1], [1, 1, 0, 1], 1, disable_priority_preemption=True)
    assert ended.index("urgent") == 2 and set(ended[:2]) == {"w2", "r0"}, "one of the base model and the running one"


@pytest.mark.parametrize("mixed", [False, True])
def test_an_urgent_request_preempts_the_users_of_an_adapter(mixed: bool) -> None:
    """The fewest: one request has adapter 2."""
    ended, sim = urgent_behind([1, 1, 2], [], 2, enable_mixed_chunk=mixed)
    assert ended[0] == "urgent"
    assert [sim.outcomes[f"r{i}"].request.retractions for i in range(3)] == [0, 0, 1]
    ended, sim = urgent_behind([1, 1, 2], [], 2, priority_preemption_threshold=50)
    assert ended[0] != "urgent" and not sim.scheduler.stats().num_preemptions_total


def test_loads_of_failed_steps_are_sent_again() -> None:
    scheduler = Scheduler(SchedulerConfig(num_slots=512, context_len=64, max_rows=2, lora_slots=2))
    scheduler.add(request("r", 3))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan) and plan.lora_loads == [(0, 3)]
    scheduler.step_failed(plan.number, "broken")
    again = step(scheduler)
    assert again is not None and again.lora_loads == [(0, 3)] and again.new_rows[0].lora_slot == 0
