"""Step sync of schedulers: all groups' facts, in order, for the correct step; no scheduler blocks or falls behind."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_engine.core.dp_sync import DPSync, PrefillTurns, StepExchange
from moe_engine.core.shared_status import SharedStatus
from moe_engine.errors import EngineDeadError
from moe_engine.types import Speculation, StepFacts, StepPlan
from moe_engine.types.prefill_delay import DelayFacts


def lost() -> None:
    raise EngineDeadError("a rank is lost")


@pytest.fixture
def meshes(tmp_path: Path) -> Iterator[Callable[[int], list[StepExchange]]]:
    made: list[StepExchange] = []

    def make(count: int) -> list[StepExchange]:
        made.extend(StepExchange(group, count, f"ipc://{tmp_path}/steps-{group}") for group in range(count))
        for mesh in made:
            mesh.connect([other.address for other in made])
        return made

    yield make
    for mesh in made:
        mesh.close()


def test_all_get_the_same_facts_by_group(meshes: Callable[[int], list[StepExchange]]) -> None:
    """Schedulers at different speeds: an early scheduler waits, and early messages are kept for their step."""
    count, steps = 4, 60
    seen: list[list[tuple[StepFacts, ...]]] = [[] for _ in range(count)]

    def scheduler(mesh: StepExchange) -> None:
        rng, dp_sync = random.Random(mesh.group), DPSync(mesh, lambda: None)
        for number in range(steps):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.004)
            facts = StepFacts(num_tokens=100 * number + mesh.group, prefills=bool(mesh.group), num_waiting=number)
            plan = dp_sync.sync_step(StepPlan(number, rows=[mesh.group]), facts)
            assert plan.rows == [mesh.group] and plan.dp_facts is not None
            seen[mesh.group].append(plan.dp_facts)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(scheduler, meshes(count)))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    for number, everybody in enumerate(seen[0]):
        assert [facts.num_tokens for facts in everybody] == [100 * number + group for group in range(count)]
        assert [facts.prefills for facts in everybody] == [False, True, True, True]


def test_message_of_a_later_step_is_kept(meshes: Callable[[int], list[StepExchange]]) -> None:
    first, second, third = meshes(3)
    second.send(1, StepFacts(num_tokens=21))
    second.send(2, StepFacts(num_tokens=22))
    third.send(1, StepFacts(num_tokens=31))
    first.send(1, StepFacts(num_tokens=11))
    assert [facts.num_tokens for facts in first.gather(1, lambda: None)] == [11, 21, 31]
    assert first.begun(2) and not first.begun(3)
    first.send(2, StepFacts(num_tokens=12))
    with pytest.raises(EngineDeadError):
        first.gather(2, lost)  # the third message has not arrived
    third.send(2, StepFacts(num_tokens=32))
    assert [facts.num_tokens for facts in first.gather(2, lambda: None)] == [12, 22, 32]


def test_idle_scheduler_is_woken_by_a_step(meshes: Callable[[int], list[StepExchange]]) -> None:
    busy, idle = (DPSync(mesh, lambda: None) for mesh in meshes(2))
    assert not idle.is_due() and not busy.is_due()
    facts = StepFacts(num_tokens=5, num_logits=1, prefills=True)
    thread = threading.Thread(target=busy.sync_step, args=(StepPlan(1), facts))
    thread.start()
    deadline = time.monotonic() + 60
    while not idle.is_due():
        assert time.monotonic() < deadline
    plan = idle.sync_step(StepPlan(7), StepFacts())
    thread.join(60)
    assert plan.number == 7 and plan.dp_facts == (facts, StepFacts()) == busy.last
    assert not idle.is_due() and not idle.all_leave()


def test_facts_travel_whole(meshes: Callable[[int], list[StepExchange]]) -> None:
    first, second = meshes(2)
    facts = StepFacts()
    for i, field in enumerate(dataclasses.fields(StepFacts)):
        value = True if isinstance(field.default, bool) else 2 + i
        facts = dataclasses.replace(facts, **{field.name: value if field.default is not None else DelayFacts(i, 3)})
    second.send(1, facts)
    first.send(1, StepFacts())
    assert first.gather(1, lambda: None) == (StepFacts(), facts)


def test_groups_exit_when_all_are_idle(meshes: Callable[[int], list[StepExchange]]) -> None:
    steps = [DPSync(mesh, lambda: None) for mesh in meshes(2)]
    leaves = [[False, True, True], [False, False, True]]  # by group and step
    left: list[list[bool]] = [[], []]

    def scheduler(group: int) -> None:
        for leaving in leaves[group]:
            steps[group].sync_step(StepPlan(0), StepFacts(leaving=leaving))
            left[group].append(steps[group].all_leave())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(scheduler, range(2)))
    assert left == [[False, False, True]] * 2


def test_waiting_scheduler_detects_a_lost_rank(meshes: Callable[[int], list[StepExchange]]) -> None:
    with pytest.raises(EngineDeadError, match="a rank is lost"):
        DPSync(meshes(2)[0], lost).sync_step(StepPlan(1), StepFacts())


def test_turns_of_prompts() -> None:
    running, waiting = StepFacts(num_running=3), StepFacts(num_running=3, num_waiting=1)
    turns = PrefillTurns(patience=3)
    assert turns.open  # at the beginning no group decodes
    held = []
    for _ in range(4):
        turns.after((running, running, waiting))
        held.append(turns.open)
    assert held == [False, False, True, True]  # one of three waits until patience ends
    turns.after((running, running, StepFacts(num_running=3, prefills=True)))
    assert not turns.open
    turns.after((running, waiting, waiting))
    assert turns.open  # enough groups have prompts
    turns.after((running, running, running))
    assert not turns.open  # no prompts wait while they decode
    turns.after((StepFacts(), StepFacts(num_waiting=2), StepFacts()))
    assert turns.open  # no group decodes


def test_facts_of_a_plan() -> None:
    plan = StepPlan(
        3, rows=[0, 1, 2, 3], starts=[9, 8, 7, 0], counts=[1, 1, 1, 6], samples=[True, True, True, False],
        slots=list(range(9)), num_decodes=3, input_ids=[1] * 6,
    )  # fmt: skip
    assert StepFacts.of(plan, num_waiting=2) == StepFacts(num_tokens=9, num_logits=3, prefills=True, num_waiting=2)
    assert StepFacts.of(StepPlan(1)) == StepFacts()
    drafted = StepPlan(
        4, rows=[0, 1, 2], starts=[9, 8, 0], counts=[3, 1, 4], samples=[True, True, True], slots=list(range(8)),
        num_decodes=2, input_ids=[1] * 4, speculation=Speculation(2, True),
    )  # fmt: skip
    facts = StepFacts.of(drafted)
    assert (facts.num_logits, facts.num_drafting, facts.depth) == (3 + 1 + 1, 1, 2)


def test_a_status_from_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of machines differ: ages are sent, and unset fields stay unset."""
    here, there = (SharedStatus(tmp_path / name, create=True) for name in ("here", "there"))
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    here.write(ready=1, step=12, step_end=998.5, busy_since=990.0, last_turn=999.0, num_running=4, token_usage=0.25)
    packed, seen = here.pack(), here.read()
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    there.unpack(packed)
    assert there.read() == seen
    assert seen.step_age == 1.5 and seen.silence == 1.0 and seen.oldest_queued_age == 0.0
    there.unpack(SharedStatus(tmp_path / "new", create=True).pack())
    assert there.read().silence == 0.0 and not there.read().ready
