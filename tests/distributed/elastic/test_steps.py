"""Step sync of the surviving attention groups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moe_engine.core.dp_sync import StepFactsMessage
from moe_engine.elastic.steps import LOST, STEPS, SurvivorExchange, SurvivorSync
from moe_engine.errors import EngineDeadError
from moe_engine.types import StepFacts, StepPlan


def test_steps_restart_without_a_lost_group(tmp_path: Path) -> None:
    exchanges = [SurvivorExchange(group, 3, f"ipc://{tmp_path}/steps-{group}") for group in range(3)]
    for exchange in exchanges:
        exchange.connect([other.address for other in exchanges])
    steps = [SurvivorSync(exchange, lambda: None) for exchange in exchanges[:2]]
    exchanges[2].send(1, StepFacts(num_tokens=9))  # its last message
    exchanges[0].send(1, StepFacts(num_tokens=8))  # of a step that never ran

    def part(group: int) -> list[tuple[StepFacts, ...] | None]:
        steps[group].regroup(1, [True, True, False])
        return [
            steps[group].sync_step(StepPlan(40 + n), StepFacts(num_tokens=10 * group + n)).dp_facts for n in range(3)
        ]

    try:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(part, range(2))
        expected = [(StepFacts(num_tokens=n), StepFacts(num_tokens=10 + n), LOST) for n in range(3)]
        assert first == second == expected
    finally:
        for exchange in exchanges:
            exchange.close()


def exchanges_of(folder: Path, count: int) -> list[SurvivorExchange]:
    made = [SurvivorExchange(group, count, f"ipc://{folder}/steps-{group}") for group in range(count)]
    for exchange in made:
        exchange.connect([other.address for other in made])
    return made


def check() -> None:
    raise EngineDeadError("a rank is lost")


def test_a_message_that_arrives_before_regroup_is_kept(tmp_path: Path) -> None:
    """A peer that regroups first starts the new generation while this rank is still in the old one."""
    here, peer, third = exchanges_of(tmp_path, 3)
    alive = [True, True, False]
    peer.regroup(1, alive)
    peer.send(STEPS + 1, StepFacts(num_tokens=21))
    assert here.socket.poll(30_000)
    assert not here.begun(1)  # reads the message, which belongs to no step of the old generation
    steps = SurvivorSync(here, check)  # a wait for a dropped message ends at `check`
    steps.regroup(1, alive)
    assert steps.is_due()
    expected = (StepFacts(num_tokens=11), StepFacts(num_tokens=21), LOST)
    assert steps.sync_step(StepPlan(1), StepFacts(num_tokens=11)).dp_facts == expected
    for exchange in (here, peer, third):
        exchange.close()


def test_turns_of_prompts_count_the_groups_that_are_alive(tmp_path: Path) -> None:
    """One of two remaining groups is half of them, for any number of lost groups."""
    here, peer, *others = exchanges_of(tmp_path, 5)
    alive = [True, True, False, False, False]
    steps = SurvivorSync(here, lambda: None)
    steps.regroup(1, alive)
    peer.regroup(1, alive)
    assert steps.num_groups == 2
    for number, (facts, may_prefill) in enumerate(
        [(StepFacts(num_running=3), False), (StepFacts(num_running=3, num_waiting=1), True)], 1
    ):
        peer.send(STEPS + number, facts)
        steps.sync_step(StepPlan(number), StepFacts(num_running=3))
        assert steps.may_prefill() is may_prefill
    for exchange in (here, peer, *others):
        exchange.close()


def test_parts_of_impossible_generations_are_dropped(tmp_path: Path) -> None:
    first, second = exchanges_of(tmp_path, 2)
    for message in (
        StepFactsMessage(2 * STEPS + 1, 1, StepFacts()),  # two generations of two groups: no group would remain
        StepFactsMessage(99 * STEPS + 1, 1, StepFacts()),
        StepFactsMessage(STEPS, 1, StepFacts()),
        StepFactsMessage(STEPS + 3, 1, StepFacts()),
        StepFactsMessage(STEPS + 1, 0, StepFacts()),
        StepFactsMessage(STEPS + 1, 2, StepFacts()),
        StepFactsMessage(-1, 1, StepFacts()),
    ):
        first._take(message)
    assert first.num_dropped == 7 and first._facts == {}
    first.regroup(1, [True, False])
    first._take(StepFactsMessage(1, 1, StepFacts()))  # sent before the loss: not a fault
    assert first.num_dropped == 7 and first._facts == {}
    first._take(StepFactsMessage(STEPS + 1, 1, StepFacts()))
    assert first.num_dropped == 8 and first._facts == {}
    for exchange in (first, second):
        exchange.close()
