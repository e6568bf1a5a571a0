"""Routing by cached prefixes: the known prefixes against a list of prompts, the balance bound, and the cached tokens of
simulated sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.frontend.dp_routing import MAX_AHEAD, Load, Room, Router
from moe_engine.frontend.known_prefixes import BLOCK, KnownPrefixes, prompt_blocks
from moe_engine.planning.flags.validate import check
from moe_engine.tuning.simulator.agents import Agents, AgentShape
from moe_engine.tuning.simulator.arrivals import arrival_times
from moe_engine.tuning.simulator.fleet import FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers
from tests.examples import examples
from tests.tuning.test_simulator import Linear, config, simulate

ROOM = Room(kv_tokens=200 * BLOCK, max_requests=8)


class Model:
    """Known prefixes as lists of tokens, each with the time of its last use; of one use the longest is the oldest."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks, self._uses, self._time = max_blocks, dict[tuple[int, ...], tuple[int, int]](), 0

    def use(self, tokens: list[int]) -> None:
        self._time += 1
        for stop in range(BLOCK, len(tokens) + 1, BLOCK):
            self._uses[tuple(tokens[:stop])] = (self._time, -stop)
        for prefix in sorted(self._uses, key=self._uses.__getitem__)[: -self._max_blocks or None]:
            del self._uses[prefix]

    def match(self, tokens: list[int]) -> int:
        return max((len(prefix) for prefix in self._uses if tuple(tokens[: len(prefix)]) == prefix), default=0)


def prompt(family: Sequence[int], rest: int) -> list[int]:
    """Blocks of the tokens in `family`, so that prompts share prefixes, then further tokens."""
    return [token for token in family for _ in range(BLOCK)] + list(range(100, 100 + rest))


prompts = st.builds(prompt, st.lists(st.integers(0, 1), max_size=5), st.integers(0, BLOCK - 1))


@settings(max_examples=examples(40))
@given(st.integers(1, 12), st.lists(st.tuples(prompts, st.integers(0, 40)), max_size=14))
def test_known_prefixes_are_those_used_last(max_blocks: int, steps: list[tuple[list[int], int]]) -> None:
    known, model = KnownPrefixes(max_blocks * BLOCK + 5), Model(max_blocks)
    for tokens, answer in steps:
        found = prompt_blocks(tokens)
        assert known.match(found.keys) == model.match(tokens)
        assert not found.keys or (found.keys[0] in known.blocks) == (model.match(tokens) > 0)
        whole = [*tokens, *range(7, 7 + answer)]
        assert found.with_answer(whole[len(tokens) :]) == prompt_blocks(whole).keys
        known.use(found.with_answer(whole[len(tokens) :]))
        model.use(whole)
        assert len(known) <= max_blocks
        assert known.match(prompt_blocks(whole).keys) == model.match(whole)


def test_prompts_of_another_namespace_share_no_blocks() -> None:
    tokens = list(range(3 * BLOCK))
    assert not set(prompt_blocks(tokens, "a").keys) & set(prompt_blocks(tokens, "b").keys)
    assert prompt_blocks(tokens, ("a", 1)).keys == prompt_blocks(list(tokens), ("a", 1)).keys


def router_of(count: int, room: Room = ROOM) -> Router:
    return Router(count, "cache_aware", room)


def test_a_request_follows_its_prefix_unless_the_scheduler_is_busier_by_more() -> None:
    router, tokens = router_of(3), list(range(4 * BLOCK))
    blocks = router.blocks_of(tokens)
    router.ended(1, blocks, [])
    saved = 4 * BLOCK
    assert router.choose((0, 1, 2), blocks) == 1
    assert router.choose((0, 2), blocks) in (0, 2)
    assert router.sent(0, router.blocks_of(list(range(7, 50)))) == 43
    for load, follows in (
        (Load(1, MAX_AHEAD * saved, saved), True),
        (Load(1, MAX_AHEAD * saved, saved + 1), False),
        (Load(1, MAX_AHEAD * saved + 1, 0), False),
        (Load(ROOM.max_requests, saved, 0), False),
    ):
        router.loads[1] = load
        assert (router.choose((0, 1, 2), blocks) == 1) is follows
    router.loads = [replace(load) for _ in range(3)]
    assert router.choose((0, 1, 2), blocks) == 1  # no scheduler has room
    assert router.sent(1, blocks) == 0
    router.forget()
    assert router.sent(1, blocks) == 4 * BLOCK


def test_a_prompt_that_many_share_spreads_over_schedulers_with_free_cache() -> None:
    system, saved = list(range(4 * BLOCK)), 4 * BLOCK
    for spreads in (True, False):
        router = router_of(2)
        router.ended(0, router.blocks_of(system), [])
        router.ended(1, router.blocks_of([8] * (100 if spreads else 200) * BLOCK), [])
        for number in range(7):
            blocks = router.blocks_of([*system, *[100 + number] * BLOCK])
            router.loads[0] = Load(1, MAX_AHEAD * saved // (1 + number), 0)
            assert router.choose((0, 1), blocks) == 0
            router.loads[0] = Load(1, MAX_AHEAD * saved // (1 + number) + 1, 0)
            assert router.choose((0, 1), blocks) == (1 if spreads or not number else 0)
            router.sent(0, blocks)
        session = router.blocks_of([*system, *[100] * BLOCK, *[9] * BLOCK])
        router.loads[0] = Load(1, MAX_AHEAD * 5 * BLOCK, 0)
        if spreads:  # a session continues its own prefix, which no other prompt has
            assert router.choose((0, 1), session) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_loads_stay_balanced(shared: bool) -> None:
    """Requests of sessions, some of which end: whatever follows its prefix, a load exceeds the least by no more than
    the bound; requests without a shared prefix are distributed exactly as by their tokens."""
    rng = random.Random(random.getrandbits(32))
    router, plain = router_of(4, replace(ROOM, kv_tokens=1 << 20)), Router(4, "total_tokens")
    plain.loads = router.loads
    sessions = [[rng.randrange(9, 99) for _ in range(rng.randrange(300))] for _ in range(6)]
    running: list[tuple[int, list[int], int]] = []
    followed = 0
    for number in range(300):
        if running and rng.random() < 0.5:
            endpoint, tokens, uncomputed = running.pop(rng.randrange(len(running)))
            load = router.loads[endpoint]
            load.num_requests, load.num_tokens = load.num_requests - 1, load.num_tokens - len(tokens)
            load.num_uncomputed -= uncomputed
            router.ended(endpoint, router.blocks_of(tokens), [])
        session = rng.choice(sessions)
        session += [rng.randrange(9, 99) for _ in range(rng.randrange(60))]
        tokens = session[:] if shared else [number, *session]
        blocks = router.blocks_of(tokens)
        assert blocks is not None
        plain._next, before = router._next, [load.num_tokens for load in router.loads]
        endpoint = router.choose(range(4), blocks)
        least = plain.choose(range(4))
        uncomputed = router.sent(endpoint, blocks)
        saved = len(tokens) - uncomputed
        followed += endpoint != least
        assert endpoint == least or before[endpoint] - min(before) <= MAX_AHEAD * saved
        load = router.loads[endpoint]
        load.num_requests, load.num_tokens = load.num_requests + 1, load.num_tokens + len(tokens)
        load.num_uncomputed += uncomputed
        running.append((endpoint, tokens, uncomputed))
    assert (followed > 20) is shared and (shared or followed == 0)


def test_sessions_of_two_schedulers_hit_as_many_tokens_as_those_of_one() -> None:
    """Two groups or replicas of half the KV cache, simulated: 95% of the cached tokens of one scheduler."""
    groups = random.choice((1, 2))
    shape = AgentShape(turns=5, system_len=128, input_len=96, output_len=24, pause=1.0, groups=3)
    found = {}
    for method in ("one", "cache_aware", "total_tokens"):
        slots = 64_000 if method == "one" else 32_000
        spec = FleetSpec(ReplicaSpec(config(num_slots=slots), Linear()), method="round_robin")
        if method != "one":
            replica = replace(spec.replica, num_groups=groups)
            spec = replace(spec, replica=replica, num_replicas=2 // groups, method=method)
        workload = Agents(shape, arrival_times("poisson", 2.0, random.Random(5)), 8, seed=4)
        outcome = simulate(spec, workload)[1]
        found[method] = outcome.cached_tokens / outcome.prompt_tokens
    assert found["cache_aware"] >= 0.95 * found["one"]
    assert found["total_tokens"] < 0.9 * found["one"]


def test_flags() -> None:
    with pytest.raises(ConfigError, match=r"--load-balance-method cache_aware .* --disable-radix-cache"):
        check(EngineArgs.from_kwargs(load_balance_method="cache_aware", disable_radix_cache=True))


def test_one_prompt_of_all_at_a_low_rate_is_answered_as_soon_as_by_load() -> None:
    """Simulated: the other groups compute the shared prompt too, so that no group decodes for all."""
    rng, now, arrivals, numbers = random.Random(random.getrandbits(32)), 0.0, list[Arrival](), Numbers(1 << 40)
    for _ in range(50):
        now += rng.expovariate(2.0)
        first, new = numbers.take(200), rng.randint(100, 300)
        arrivals.append(Arrival(now, [*range(2048), *range(first, first + 200)], new, new))
    replica = ReplicaSpec(config(num_slots=64_000), Linear(row=1e-3), num_groups=4)
    mean = {}
    for method in ("cache_aware", "total_tokens"):
        outcome = simulate(FleetSpec(replica, method=method), Fixed(arrivals, len(arrivals)))[1]
        mean[method] = sum(answer.latency for answer in outcome.recorder.answers) / len(arrivals)
    assert mean["cache_aware"] < 1.15 * mean["total_tokens"]
