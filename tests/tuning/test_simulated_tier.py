"""The host-RAM tier of the prefix cache in the simulator: hits, times of copies; trees of drafts; what is left out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_engine.cli.main import main
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.simulator.fleet import FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers
from moe_engine.types import SpeculationConfig
from tests.tuning.test_simulator import Linear, config, sessions, simulate, summary
from tests.tuning.test_simulator_input import costs

PREFIX, TAIL, TURNS = 128, 16, 8


def prefixes(rng: random.Random, num_prefixes: int) -> Fixed:
    """`TURNS` requests with each prefix, so far apart that each ends before the next one, in rounds of random order."""
    numbers, now, arrivals = Numbers(1 << 40), 0.0, []
    heads = [numbers.take(PREFIX) for _ in range(num_prefixes)]
    for _ in range(TURNS):
        for head in rng.sample(heads, num_prefixes):
            now += 1.0
            tail = numbers.take(TAIL)
            prompt = [*range(head, head + PREFIX), *range(tail, tail + TAIL)]
            arrivals.append(Arrival(now, prompt, rng.randint(2, 9)))
    return Fixed(arrivals, len(arrivals))


def limits(**changes: object) -> SchedulerConfig:
    """A pool for a few prefixes."""
    return config(num_slots=1024, max_rows=4, page_size=16, chunked_prefill_size=256, **changes)


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.each_value
def test_evicted_prefixes_are_loaded(policy: str, num_groups: int):
    rng, count = random.Random(random.getrandbits(32)), 24
    seed, spec = rng.getrandbits(32), ReplicaSpec(limits(), Linear(), num_groups)
    tier = replace(spec, scheduler=limits(host_tier_tokens=1 << 16, hicache_write_policy=policy), load_seconds=1e-6)
    without = simulate(FleetSpec(spec), prefixes(random.Random(seed), count))[1]
    found = simulate(FleetSpec(tier), prefixes(random.Random(seed), count))[1]
    # at most one computation of each prefix in each group, and a second where only the second use stores
    uses = num_groups * (2 if policy == "write_through_selective" else 1)
    assert found.cached_tokens >= count * (TURNS - uses) * PREFIX > 2 * without.cached_tokens
    exact = simulate(FleetSpec(replace(tier, exact=True)), prefixes(random.Random(seed), count))[1]
    assert exact.cached_tokens == found.cached_tokens


def test_groups_whose_prompts_wait_for_their_turn_store_as_in_single_steps():
    """A group without decodes has steps of copies while its prompts wait."""
    for _ in range(3):
        seed, scheduler = random.getrandbits(32), config(
            num_slots=1024, max_rows=4, page_size=16, chunked_prefill_size=64, host_tier_tokens=1 << 16,
            hicache_write_policy="write_through",
        )  # fmt: skip
        spec = ReplicaSpec(scheduler, Linear(), num_groups=4, load_seconds=1e-6)
        runs, single = (
            simulate(FleetSpec(replace(spec, exact=exact)), sessions(random.Random(seed), 20.0))[1]
            for exact in (False, True)
        )
        assert runs.num_steps == single.num_steps and summary(runs) == summary(single)


def test_copies_take_their_time():
    spec = ReplicaSpec(limits(host_tier_tokens=1 << 16, hicache_write_policy="write_through"), Linear())
    seed, means = random.getrandbits(32), []
    without = simulate(FleetSpec(replace(spec, scheduler=limits())), prefixes(random.Random(seed), 24))[1]
    for seconds in (0.0, 1e-3):
        outcome = simulate(FleetSpec(replace(spec, load_seconds=seconds)), prefixes(random.Random(seed), 24))[1]
        means.append(sum(answer.ttft for answer in outcome.recorder.answers) / 24 / TURNS)
    # tokens of a request that come from the tier, which leaves the pool about as it is without one
    loads = (outcome.cached_tokens - without.cached_tokens) / 24 / TURNS
    assert means[1] - means[0] == pytest.approx(1e-3 * loads, rel=0.15)


def test_no_more_drafts_of_a_tree_are_accepted_than_it_is_deep():
    tree = SpeculationConfig("nextn", 2, topk=4, num_draft_tokens=12)
    spec = ReplicaSpec(config(speculation=tree), Linear(), acceptance=(0.9,))
    arrivals = [Arrival(0.0, [number + 1], 200) for number in range(20)]
    outcome = simulate(FleetSpec(spec), Fixed(arrivals, 20))[1]
    assert outcome.accept_length == pytest.approx(1 + 0.9 + 0.9**2, rel=0.03)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--enable-hierarchical-cache", "--hicache-size", "1"], "copies from host memory take no time"),
        (["--stream-interval", "4"], "clients get every token immediately"),
        ([], None),
    ],
)
def test_what_is_left_out_is_said(tmp_path, capsys, flags, words):
    path = tmp_path / "costs.json"
    path.write_text(replace(costs(), launch={}).to_json())
    assert main(["simulate", "--cost-file", str(path), "--num-prompts", "3", "--disable-tqdm", *flags]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: not simulated")]
    assert [words in note for note in notes] == ([True] if words else [])


@pytest.mark.parametrize(
    "flags",
    [
        ["--is-embedding"],
        ["--hicache-storage-backend", "file", "--enable-hierarchical-cache", "--hicache-size", "1"],
        ["--kv-connector", "package.module:Class", "--enable-hierarchical-cache", "--hicache-size", "1"],
    ],
)
def test_what_cannot_be_left_out_is_refused(tmp_path, capsys, flags):
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    assert main(["simulate", "--cost-file", str(path), *flags]) == 2
    assert f"{flags[0]}: a simulation" in capsys.readouterr().err
