"""The scheduler of a request: the least loaded, in turn among equals, never a scheduler that cannot serve the
request."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moe_engine.frontend.dp_routing import Load, Router


def choices(router: Router, count: int, able: tuple[int, ...]) -> list[int]:
    return [router.choose(able) for _ in range(count)]


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "total_tokens", "cache_aware"])
def test_equals_take_turns(method: str) -> None:
    assert choices(Router(3, method), 7, (0, 1, 2)) == [0, 1, 2, 0, 1, 2, 0]
    assert choices(Router(4, method), 4, (1, 3)) == [1, 3, 1, 3]


def test_methods_use_their_metric() -> None:
    loads = [Load(3, 10), Load(1, 500), Load(2, 10)]
    found = {}
    for method in ("cache_aware", "round_robin", "total_requests", "total_tokens"):
        router = Router(3, method)
        router.loads = loads
        found[method] = router.choose((0, 1, 2))
    assert found == {"cache_aware": 2, "total_tokens": 2, "total_requests": 1, "round_robin": 0}
    router = Router(3, "total_requests")
    router.loads = loads
    assert router.choose((0, 2)) == 2


@pytest.mark.parametrize("method", ["total_requests", "total_tokens"])
def test_loads_stay_even(method: str) -> None:
    """Requests of any length, some of which end: the numbers of requests differ by at most one."""
    rng = random.Random(3)
    router = Router(4, method)
    running: list[tuple[int, int]] = []
    largest = 0
    for _ in range(400):
        if running and rng.random() < 0.3:
            lane, tokens = running.pop(rng.randrange(len(running)))
            router.loads[lane].num_requests -= 1
            router.loads[lane].num_tokens -= tokens
        tokens = rng.randint(1, 60)
        largest = max(largest, tokens)
        before = [load.num_tokens if method == "total_tokens" else load.num_requests for load in router.loads]
        lane = router.choose(range(4))
        assert before[lane] == min(before)
        router.loads[lane].num_requests += 1
        router.loads[lane].num_tokens += tokens
        running.append((lane, tokens))
    assert sum(load.num_requests for load in router.loads) == len(running)


def test_round_robin_shares_evenly_whatever_the_loads() -> None:
    router = Router(3, "round_robin")
    router.loads[0] = Load(50, 5000)
    assert set(Counter(choices(router, 30, (0, 1, 2))).values()) == {10}
