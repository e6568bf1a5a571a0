"""The order of the queue under each policy, and bounded waiting times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError, InputError
from moe_engine.scheduler import NEEDS_RESULT, POLICIES, SchedulerConfig
from moe_engine.scheduler.kv_cache.radix_cache import RadixCache
from moe_engine.scheduler.policies import Policy
from moe_engine.scheduler.retraction import victim_order
from moe_engine.scheduler.run_settings import RunSettings
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.waiting_queue import MAX_STALE, Waiting, WaitingQueue
from moe_engine.types import Request
from tests.scheduler.simulator import Simulation, make_request


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"num_slots": 10_000, "context_len": 4096} | changes
    return SchedulerConfig(**values)  # type: ignore[arg-type]


def order(cfg: SchedulerConfig, requests: list[Request], tree: RadixCache | None = None) -> list[str]:
    queue = WaitingQueue(cfg)
    for i, request in enumerate(requests):
        request.seq = i
        queue.push(request)
    tree = tree or RadixCache(cfg.page_size, lambda slots, after: None)
    return [entry.request.rid for entry in Policy(RunSettings(cfg)).order(queue, tree)]


def cached(*prompts: list[int]) -> RadixCache:
    tree = RadixCache(1, lambda slots, after: None)
    slot = 1
    for prompt in prompts:
        tree.insert(tree.root(), prompt, list(range(slot, slot + len(prompt))), 0)
        slot += len(prompt)
    return tree


def test_fcfs_is_by_arrival() -> None:
    assert order(config(), [make_request(r, [1, 2]) for r in "cab"]) == ["c", "a", "b"]


def test_lof_is_longest_output_first() -> None:
    requests = [make_request("a", [1], 5), make_request("b", [1], 9), make_request("c", [1], 5)]
    assert order(config(policy="lof"), requests) == ["b", "a", "c"]


def test_random_is_a_seeded_permutation() -> None:
    requests = [make_request(str(i), [1]) for i in range(30)]
    one = order(config(policy="random", random_seed=1), requests)
    assert sorted(one) == sorted(r.rid for r in requests) and one != [r.rid for r in requests]
    assert one == order(config(policy="random", random_seed=1), requests)


def test_lpm_is_longest_cached_prefix_first_and_stable() -> None:
    tree = cached([1] * 50, [2] * 80)
    requests = [make_request("none", [3] * 9), make_request("short", [1] * 60), make_request("long", [2] * 90)]
    requests.append(make_request("none2", [4] * 9))
    assert order(config(policy="lpm"), requests, tree) == ["long", "short", "none", "none2"]


def test_lpm_becomes_fcfs_in_a_long_queue() -> None:
    tree = cached([2] * 80)
    requests = [make_request(str(i), [1, i]) for i in range(128)] + [make_request("hit", [2] * 90)]
    assert order(config(policy="lpm"), requests, tree)[0] == "0"
    assert order(config(policy="lpm"), requests[1:], tree)[0] == "hit"


def test_lpm_lets_one_of_a_family_compute_the_shared_prefix() -> None:
    family = [make_request(r, [7] * 40 + [i]) for i, r in enumerate("abc")]
    requests = [family[0], family[1], make_request("other", [8] * 40), family[2]]
    assert order(config(policy="lpm"), requests) == ["a", "other", "b", "c"]
    assert order(config(policy="lpm", in_batch_check_threshold=-1), requests) == ["a", "b", "other", "c"]
    other_namespace = make_request("d", [7] * 40, extra_key="tenant")
    assert order(config(policy="lpm"), [family[0], family[1], other_namespace]) == ["a", "d", "b"]
    short = [make_request(r, [7] * 31 + [i]) for i, r in enumerate("ab")]
    assert order(config(policy="lpm"), [*short, make_request("x", [9])]) == ["a", "b", "x"]


def test_dfs_weight_follows_the_heaviest_subtree() -> None:
    tree = cached([1, 1], [1, 1, 2, 2], [1, 1, 3, 3], [5, 5])
    requests = [
        make_request("none", [9, 9]),
        make_request("five", [5, 5, 0]),
        make_request("one", [1, 1, 0]),
        make_request("two", [1, 1, 2, 2, 0]),
        make_request("three", [1, 1, 3, 3, 0]),
        make_request("three+", [1, 1, 3, 3, 1]),
    ]
    assert order(config(policy="dfs-weight"), requests, tree) == ["three", "three+", "two", "one", "five", "none"]


def test_priority_then_arrival() -> None:
    requests = [make_request(f"{p}{i}", [1], priority=p) for i, p in enumerate([5, None, 9, 5, 9])]
    assert order(config(policy="priority", uses_priority=True), requests) == ["92", "94", "50", "53", "None1"]
    low = config(uses_priority=True, schedule_low_priority_values_first=True)
    assert order(low, requests) == ["50", "53", "92", "94", "None1"]
    lof = [
        make_request("a", [1], 3, priority=1),
        make_request("b", [1], 9, priority=1),
        make_request("c", [1], 1, priority=2),
    ]
    assert order(config(policy="lof", uses_priority=True), lof) == ["c", "b", "a"]


def test_cache_policies_without_cache_are_fcfs() -> None:
    cfg = config(policy="lpm", disable_radix_cache=True)
    assert cfg.effective_policy == "fcfs"


def test_retracted_requests_go_to_the_front_by_arrival() -> None:
    cfg = config(policy="lof")
    queue = WaitingQueue(cfg)
    requests = [make_request(r, [1], i) for i, r in enumerate("abcd")]
    for i, request in enumerate(requests):
        request.seq = i
    queue.push(requests[2])
    queue.push(requests[3])
    queue.push(requests[1], front=True)
    queue.push(requests[0], front=True)
    assert [e.request.rid for e in queue.entries] == ["a", "b", "d", "c"]


@pytest.mark.parametrize("policy", ["lpm", "lof", "dfs-weight", "random"])
def test_no_request_starves_under_steady_arrivals(policy: str) -> None:
    cfg = config(policy=policy, max_rows=2, max_overtakes=8, num_slots=600)
    sim = Simulation(cfg, check_every=10)
    sim.add(make_request("warm", [3] * 40, 4))
    sim.run_to_end()
    for i in range(6):
        sim.add(make_request(f"early{i}", [3] * 40 + [i], 9))
    sim.add(make_request("victim", [4], 1))  # least output, no cached prefix
    for i in range(400):
        sim.add(make_request(f"r{i}", [3] * 40 + [i], 9))
        sim.turn()
        sim.turn()
        if sim.outcomes["victim"].reason:
            break
    assert sim.outcomes["victim"].reason
    sim.run_to_end()
    sim.check_end()


def test_retraction_order() -> None:
    def running(rid: str, prompt: int, outputs: int, priority: int | None = None) -> Request:
        request = make_request(rid, [1] * prompt, 100, priority=priority)
        request.output_ids = [2] * outputs
        return request

    some = [running("a", 5, 3), running("b", 9, 3), running("c", 50, 7), running("d", 1, 2, priority=3)]
    assert [r.rid for r in victim_order(some, config())] == ["d", "b", "a", "c"]
    assert [r.rid for r in victim_order(some, config(policy="priority", uses_priority=True))] == ["b", "a", "c", "d"]


def test_retraction_caches_the_computed_prefix_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(num_slots=56, init_new_token_ratio=0.0, retract_decode_steps=2)
    sim = Simulation(cfg)
    sim.keep_plans = True
    for i in range(2):
        sim.add(make_request(f"r{i}", [i + 3] * (8 + i), 30, eos=False, stop=(10_000,)))  # growth is estimated
    with caplog.at_level(logging.INFO, "moe_engine"):
        sim.run_to_end()
    retracted = [o.request for o in sim.outcomes.values() if o.request.retractions]
    assert [r.rid for r in retracted] == ["r1"]
    again = [new for plan in sim.plans for new in plan.new_rows if new.rid == "r1"]
    assert len(again) == 2 and len(again[1].token_ids) > 9
    assert len(again[1].slots) > 0, "the retracted request resumes from the cache"
    lines = [r.getMessage() for r in caplog.records]
    assert any(
        line.startswith("KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.0000 -> 0.")
        for line in lines
    )
    sim.check_end()


def test_a_much_more_urgent_request_preempts() -> None:
    sim = Simulation(config(policy="priority", uses_priority=True, max_rows=2))
    sim.add(make_request("low", [3] * 5, 50, eos=False, priority=0))
    sim.add(make_request("mid", [4] * 5, 50, eos=False, priority=5))
    for _ in range(5):
        sim.turn()
    sim.add(make_request("near", [5] * 5, 3, eos=False, priority=10))
    for _ in range(15):
        sim.turn()
    assert sim.scheduler.stats().num_preemptions_total == 0, "10 is not above the threshold"
    sim.add(make_request("high", [6] * 5, 3, eos=False, priority=11))
    for _ in range(8):
        sim.turn()
    assert sim.outcomes["high"].reason == "length"
    assert sim.outcomes["low"].request.retractions == 1 and sim.outcomes["mid"].request.retractions == 0
    sim.run_to_end()
    sim.check_end()


@pytest.mark.parametrize(("more", "preempted"), [({}, 1), ({"disable_priority_preemption": True}, 0)])
def test_preemption_can_be_disabled_and_requests_without_a_priority_have_the_default(
    more: dict[str, Any], preempted: int
) -> None:
    sim = Simulation(config(policy="priority", uses_priority=True, max_rows=1, default_priority_value=3, **more))
    sim.add(make_request("low", [3] * 5, 20, eos=False, priority=0))
    sim.turn()
    for rid, priority in (("none", None), ("least", 2), ("high", 50)):
        sim.add(make_request(rid, [6] * 5, 3, eos=False, priority=priority))
    order = [entry.request.rid for entry in sim.scheduler.table.queue.entries]
    assert order == ["high", "none", "least"]
    sim.run_to_end()
    assert sim.scheduler.stats().num_preemptions_total == preempted
    sim.check_end()


def test_preemption_waits_for_the_step_in_flight() -> None:
    sim = Simulation(config(policy="priority", uses_priority=True, max_rows=1))
    sim.add(make_request("low", [3] * 5, 50, eos=False, priority=0))
    sim.turn()
    sim.turn()
    sim.add(make_request("high", [6] * 5, 3, eos=False, priority=50))
    assert sim.scheduler.schedule() is NEEDS_RESULT
    sim.run_to_end()
    sim.check_end()


def test_a_full_queue_refuses_or_displaces() -> None:
    sim = Simulation(config(max_queued_requests=1))
    sim.add(make_request("a", [3]))
    with pytest.raises(InputError, match="The request queue is full") as error:
        sim.scheduler.add(make_request("b", [3]))
    assert error.value.status == 503
    sim = Simulation(config(max_queued_requests=1, policy="priority", uses_priority=True))
    sim.add(make_request("a", [3], priority=1))
    sim.add(make_request("b", [3], priority=2))
    assert sim.outcomes["a"].reason == "abort"
    with pytest.raises(InputError):
        sim.scheduler.add(make_request("c", [3], priority=2))


def test_config_refuses_what_cannot_work() -> None:
    assert set(POLICIES) == {"fcfs", "lpm", "dfs-weight", "lof", "random", "priority"}
    for changes, flag in (
        ({"policy": "best"}, "--schedule-policy"),
        ({"page_size": 64}, "--page-size"),
        ({"chunked_prefill_size": 2, "page_size": 4}, "--chunked-prefill-size"),
        ({"policy": "lpm", "uses_priority": True}, "--enable-priority-scheduling"),
        ({"max_rows": 0}, "--max-running-requests"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"request_waiting_timeout": 0.0}, "--request-waiting-timeout"),
        ({"request_running_timeout": -1.0}, "--request-running-timeout"),
    ):
        with pytest.raises(ConfigError, match=flag):
            config(**changes)


# -- counts without a walk over the queue


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["push", "push", "front", "remove", "admit"]), st.integers(0, 999))),
       st.sampled_from(["fcfs", "lof", "lpm", "random"]))  # fmt: skip
def test_queue_counts_match_its_entries(steps: list[tuple[str, int]], policy: str) -> None:
    queue = WaitingQueue(config(policy=policy))
    entries: list[Waiting] = []
    ran: list[Request] = []  # requests that may be retracted
    for now, (step, number) in enumerate(steps):
        if step == "push":
            request = make_request(str(now), [1, 2], 1 + number % 7)
            request.seq, request.queued_at = now, float(now)
            entries.append(queue.push(request))
        elif step == "front" and ran:
            request = ran.pop(number % len(ran))
            request.retractions += 1
            entries.append(queue.push(request, front=True))
        elif entries and step in ("remove", "admit"):
            entry = entries.pop(number % len(entries))
            queue.admit([entry]) if step == "admit" else queue.remove(entry)
            ran.append(entry.request)
        queue.promote_aged()
        assert queue.num_retracted == sum(entry.request.retractions > 0 for entry in entries)
        assert queue.oldest_arrival() == min((entry.request.queued_at for entry in entries), default=None)
        assert not queue._oldest or queue._oldest[0][2].is_queued  # no prompt of an ended request stays at the head


def test_removed_entries_are_released() -> None:
    """A request that never runs must not keep later requests alive in memory."""
    queue = WaitingQueue(config(policy="lof"))
    queue.push(make_request("old", [1], 1))
    for i in range(2000):
        request = make_request(str(i), [1], 9)
        request.seq, request.queued_at = i + 1, float(i + 1)
        queue.remove(queue.push(request))
    assert queue.oldest_arrival() == 0.0 and len(queue._oldest) <= 2 * len(queue) + MAX_STALE + 1


class _Unwalked(list[Waiting]):
    def __iter__(self) -> Iterator[Waiting]:
        raise AssertionError("the entries were scanned")


def test_statistics_do_not_walk_over_the_queue() -> None:
    scheduler = Scheduler(config(max_rows=2))
    for i in range(5):
        scheduler.add(make_request(str(i), [1, 2]))

    scheduler.table.queue.entries = _Unwalked(scheduler.table.queue.entries)
    stats = scheduler.stats()
    assert (stats.num_waiting, stats.num_retracted) == (5, 0) and stats.oldest_wait_seconds >= 0
