"""Transfers between two schedulers under random faults: correct KV, an end of each request, no leaks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.tiers import state_transfers
from moe_engine.types import Request
from tests.examples import examples
from tests.scheduler.simulator import make_request
from tests.scheduler.transfer_simulator import Network, ServerSimulation

BASE = SchedulerConfig(num_slots=400, context_len=300, max_rows=4, chunked_prefill_size=32, host_tier_tokens=300)


def pair(
    config: SchedulerConfig, rng: random.Random, late: float
) -> tuple[ServerSimulation, ServerSimulation, Network]:
    """A prefill and a decode server, and a network without faults."""
    prefill, decode = (ServerSimulation(config, mode, rng, late) for mode in ("prefill", "decode"))
    return prefill, decode, Network(prefill, decode, rng, 0.0)


def run_both(prefill: ServerSimulation, decode: ServerSimulation, network: Network) -> None:
    while not (prefill.scheduler.is_idle() and decode.scheduler.is_idle()):
        prefill.turn()
        decode.turn()
        network.step()


def transfer(
    prefill: ServerSimulation, decode: ServerSimulation, network: Network, room: int, prompt: list[int]
) -> tuple[int, Request]:
    """Runs a request on both servers, as from the router, until nothing moves: the tokens whose KV was transferred, and
    the decode server's request."""
    before = decode.tier.num_transferred_tokens
    for server, new in ((prefill, 1), (decode, 4)):
        request: Request = make_request(str(room), list(prompt), new, ignore_eos=True)
        request.bootstrap = ("host", 1, room)
        server.add(request)
    while prefill.turn() | decode.turn() | network.step():
        pass
    return decode.tier.num_transferred_tokens - before, request


def play(
    seed: int, *, num: int, page_size: int = 1, faults: float = 0.0, aborts: float = 0.0, failures: float = 0.0,
    places: int = 300, late: float = 0.3, fast: int = 0, limits: Mapping[str, float | None] = {},
    states: tuple[int, int] = (0, 0),
) -> tuple[ServerSimulation, ServerSimulation, Network]:  # fmt: skip
    """A trace of sessions; both servers get each request, as from the router. `fast`: the prefill server and the
    network run during a step of the decode server, with a small pool. `states`: snapshots, and states in the tier."""
    rng = random.Random(seed)
    config = replace(BASE, **limits, page_size=page_size, host_tier_tokens=places - places % page_size)
    config = replace(config, num_slots=400 - 400 % page_size, chunked_prefill_size=32 - 32 % page_size)
    config = replace(config, num_snapshots=states[0], host_snapshots=states[1], mamba_track_interval=8)
    small = replace(config, num_slots=144, context_len=140) if fast else config
    if fast:
        config = replace(config, host_tier_tokens=2000)
    prefill, decode = (ServerSimulation(*each, rng, late) for each in ((config, "prefill"), (small, "decode")))
    network = Network(prefill, decode, rng, faults)
    prompts: list[list[int]] = []
    added = 0
    while added < num:
        if rng.random() < 0.4:
            prompt = [rng.randrange(50) for _ in range(rng.randint(2, 120))]
            if prompts and rng.random() < 0.5:
                prompt = (rng.choice(prompts) + prompt)[: small.context_len - 60]
            prompts.append(prompt)
            for server, new in rng.sample([(prefill, 1), (decode, 8)], 2):
                if rng.random() < 0.02 * (faults > 0):
                    continue  # this half never arrives
                request: Request = make_request(str(added), prompt, new, ignore_eos=True)
                request.bootstrap = ("host", 1, added)
                server.add(request)
                for _ in range(rng.randint(0, fast)):
                    prefill.turn()
                    network.step()
            added += 1
        for server in (prefill, decode):
            if rng.random() < aborts and server.outcomes:
                server.abort(rng.choice(list(server.outcomes)))
            if rng.random() < failures:
                server.fail_step()
            server.turn()
        if rng.random() < 0.7:
            network.step()
    for _ in range(5000):
        prefill.turn()
        decode.turn()
        if not network.step():
            if prefill.scheduler.is_idle() and decode.scheduler.is_idle():
                break
            network.expire()
    prefill.check_end()
    decode.check_end()
    assert not prefill.tier.outgoing and not decode.tier.incoming
    return prefill, decode, network


def test_prompts_are_computed_once() -> None:
    """The simulation checks tokens: each context slot must have the KV of its tokens."""
    _prefill, decode, _network = play(1, num=30, places=2000)
    total = sum(len(o.request.prompt_ids) for o in decode.outcomes.values())
    assert decode.tier.num_transferred_tokens > total / 4 and decode.tier.num_failed_transfers == 0
    assert decode.scheduler.totals.cached_tokens > total / 2


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 1, 4]),
    faults=st.sampled_from([0.0, 0.05, 0.3]),
    aborts=st.sampled_from([0.0, 0.1]),
    failures=st.sampled_from([0.0, 0.05]),
    places=st.sampled_from([40, 300]),
    late=st.sampled_from([0.0, 0.8]),
    fast=st.sampled_from([0, 12]),
    waiting=st.sampled_from([None, 0.05, 0.3]),
    running=st.sampled_from([None, 0.05, 0.3]),
)
def test_random_faults_leak_nothing_and_use_no_wrong_bytes(
    seed: int, page_size: int, faults: float, aborts: float, failures: float, places: int, late: float, fast: int,
    waiting: float | None, running: float | None,
) -> None:  # fmt: skip
    limits = {"request_waiting_timeout": waiting, "request_running_timeout": running}
    options = {"faults": faults, "aborts": aborts, "failures": failures, "late": late}
    play(seed, num=12, page_size=page_size, places=places, fast=fast, limits=limits, **options)


def test_only_tokens_that_neither_device_nor_host_has_are_transferred() -> None:
    rng = random.Random(2)
    prefill, decode, network = pair(replace(BASE, host_tier_tokens=2000), rng, 0.3)
    session = [rng.randrange(50) for _ in range(100)]
    others = [[rng.randrange(50) for _ in range(150)] for _ in range(3)]
    prompts = [session, *others, session + [rng.randrange(50) for _ in range(30)]]
    moved, asked = zip(*(transfer(prefill, decode, network, room, prompt) for room, prompt in enumerate(prompts)))
    assert decode.scheduler.stats().host_hit_tokens_total >= 90  # the session had left the device
    assert moved[0] == 99 and moved[-1] <= 30, moved
    assert asked[0].cached_tokens == 99 and asked[0].tiers == (99, 0, "")  # received KV is in the host tier
    prefill.check_end()
    decode.check_end()


def test_time_limits_of_both_servers_end_requests_and_their_transfers() -> None:
    """A request that waits for the other half, or for its KV, waits: the limit of the queue applies."""
    waited, ran = [0, 0], [0, 0]
    for seed in range(6):
        servers = play(seed, num=12, limits={"request_waiting_timeout": 0.06, "request_running_timeout": 0.06})[:2]
        for side, server in enumerate(servers):
            stats = server.scheduler.stats()
            waited[side] += stats.waiting_timeouts_total
            ran[side] += stats.running_timeouts_total
            ended = sum("-timeout (0.06 s)" in outcome.message for outcome in server.outcomes.values())
            assert ended == stats.waiting_timeouts_total + stats.running_timeouts_total
    assert min(waited) > 0 and ran[1] > 0, (waited, ran)


def test_transfers_write_behind_the_copies_of_a_step_in_flight() -> None:
    """A place of the tier can be released by its node, and reused by a transfer, before the step that stores to it has
    run."""
    waits = seed = 0
    while waits < 2:
        _prefill, _decode, network = play(seed, num=10, places=40, fast=12)
        waits += sum(room.after > 0 for room in network.rooms.values())
        seed += 1
        assert seed < 20


def test_a_room_in_use_is_left_to_its_request() -> None:
    """The second of two requests with one room computes its prompt."""
    rng = random.Random(0)
    prefill, decode, network = pair(BASE, rng, 0.0)
    for rid, server in (("a", prefill), ("a", decode), ("b", decode)):
        request = make_request(rid, [rng.randrange(50) for _ in range(60)] if rid == "b" else list(range(50)), 4)
        request.bootstrap = ("host", 1, 7)
        server.add(request)
    run_both(prefill, decode, network)
    assert decode.tier.num_transferred_tokens == 49 and not decode.tier.num_failed_transfers
    decode.check_end()


@pytest.mark.exhaustive
def test_a_thousand_faults() -> None:
    count = seed = 0
    while count < 1000:
        _prefill, _decode, network = play(seed, num=40, faults=0.2, aborts=0.1, failures=0.02, places=100)
        count += network.num_cuts + network.num_corrupted
        seed += 1


def test_servers_with_other_weights_refuse_each_other() -> None:
    """Weights that were replaced while serving: the transfer is refused with both names, and the prompt is computed."""
    rng = random.Random(0)
    prefill, decode, network = pair(BASE, rng, 0.0)
    for number, (ours, theirs) in enumerate([("step 7", ""), ("step 7", "step 8"), ("step 8", "step 8")]):
        prefill.tier.renew(ours)
        decode.tier.renew(theirs)
        for server in (prefill, decode):
            request = make_request(str(number), [number] * 60, 2, ignore_eos=True)
            request.bootstrap = ("host", 1, number)
            server.add(request)
        outgoing, incoming = prefill.scheduler.stats(), decode.scheduler.stats()
        assert outgoing.num_outgoing_transfers == incoming.num_incoming_transfers == 1
        run_both(prefill, decode, network)
        state = network.rooms[number].receiving
        named = f"weights: prefill server {ours}, decode server {theirs or 'those of its start'}"
        assert state is not None and state.reason == (named if ours != theirs else "")
    stats = decode.scheduler.stats()
    assert stats.transferred_tokens_total == 59 and stats.failed_transfers_total == 2
    assert stats.num_incoming_transfers == prefill.scheduler.stats().num_outgoing_transfers == 0


def test_states_travel_with_their_prompts() -> None:
    """The simulation checks states: each row must have seen exactly the tokens before its step."""
    rng = random.Random(2)
    config = replace(BASE, num_slots=2000, context_len=500, page_size=4, host_tier_tokens=2000)
    config = replace(config, num_snapshots=40, host_snapshots=80, mamba_track_interval=8)
    prefill, decode, network = pair(config, rng, 0.3)
    text, moved = [rng.randrange(50) for _ in range(100)], []
    for room in range(4):
        moved.append(transfer(prefill, decode, network, room, text)[0])
        text += [rng.randrange(50) for _ in range(40)]
    assert moved == [96, 40, 40, 40] and decode.tier.num_failed_transfers == 0
    prefill.check_end()
    decode.check_end()


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 4]),
    states=st.sampled_from([(5, 1), (5, 3), (40, 80)]),
    faults=st.sampled_from([0.0, 0.1]),
    aborts=st.sampled_from([0.0, 0.1]),
    failures=st.sampled_from([0.0, 0.05]),
    places=st.sampled_from([40, 300]),
    late=st.sampled_from([0.0, 0.8]),
    fast=st.sampled_from([0, 12]),
)
def test_random_faults_with_states(
    seed: int, page_size: int, states: tuple[int, int], faults: float, aborts: float, failures: float, places: int,
    late: float, fast: int,
) -> None:  # fmt: skip
    options = {"faults": faults, "aborts": aborts, "failures": failures, "late": late}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_transfers, "PIECE_TOKENS", 2)  # a state takes several pieces
        play(seed, num=12, page_size=page_size, places=places, fast=fast, states=states, **options)
