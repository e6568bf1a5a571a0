"""Expert load of a simulation against sums over single experts; straggler ranks, EPLB and redundant experts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from moe_engine.cli.main import main
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.simulator.expert_load import Balancer, ExpertLoad, zipf_counts
from moe_engine.tuning.simulator.fleet import FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from tests.models.published import V3
from tests.tuning.plan_models import small_deepseek
from tests.tuning.test_simulator import config, requests, simulate


def skew_by_hand(counts, table, num_ranks):
    """Each copy of an expert gets an equal part of its tokens; the mean over layers of busiest rank / mean rank."""
    factors = []
    for tokens, slots in zip(counts.tolist(), table.tolist()):
        if not any(tokens):
            continue
        ranks = [0.0] * num_ranks
        for slot, expert in enumerate(slots):
            ranks[slot * num_ranks // len(slots)] += tokens[expert] / slots.count(expert)
        factors.append(max(ranks) / (sum(ranks) / num_ranks))
    return sum(factors) / len(factors)


def draw(rebalance: RebalanceSettings | None = None) -> ExpertLoad:
    num_ranks, held = random.choice([2, 4, 8]), random.choice([2, 4])
    layout = ExpertLayout(num_ranks * held, num_ranks, num_ranks * random.choice([0, 1, 2]))
    moe_layers = [False, *[True] * random.randint(1, 5)]
    counts = zipf_counts(random.uniform(0.3, 1.5), moe_layers, layout.num_experts, random.getrandbits(32))
    return ExpertLoad(counts, layout, ExpertSettings(num_redundant=layout.num_redundant, rebalance=rebalance))


def test_zipf():
    counts = zipf_counts(0.7, [False, True, True], 64, random.getrandbits(32))
    assert not counts[0].any() and (counts[1] != counts[2]).any()
    for layer in (1, 2):
        falling = sorted(counts[layer].tolist(), reverse=True)
        shares = [falling[0] / tokens for tokens in falling]
        assert shares == pytest.approx([place**0.7 for place in range(1, 65)], rel=1e-6)


def test_skew_is_the_busiest_rank_over_the_mean():
    load = draw()
    placement = load.first_placement()
    balancer = Balancer(load)
    num_ranks = load.layout.num_ranks
    expected = skew_by_hand(load.counts, placement.physical_to_logical, num_ranks)
    assert balancer.skew == pytest.approx(expected)
    assert load.gains()["eplb"] == pytest.approx(
        skew_by_hand(load.counts, load.planned().physical_to_logical, num_ranks)
    )
    rank, share = load.straggler(placement)
    slots = placement.by_rank[:, rank]
    tokens = sum(load.counts[i, e] / placement.num_valid[i, e] for i, row in enumerate(slots) for e in row)
    assert share == pytest.approx(tokens * num_ranks / load.counts.sum())


def test_skew_of_zipf_in_closed_form():
    """One expert per rank: the busiest rank has the share 1 / H of the most popular expert, H the sum of 1 / i**s, and
    EPLB has no choice. With the same number of redundant experts a rank has two halves of popular experts, or
    similar."""
    num_experts, exponent = random.choice([8, 16, 64]), random.uniform(0.3, 1.5)
    counts = zipf_counts(exponent, [True] * 3, num_experts, random.getrandbits(32))
    load = ExpertLoad(counts, ExpertLayout(num_experts, num_experts), ExpertSettings())
    expected = num_experts / sum(place**-exponent for place in range(1, num_experts + 1))
    assert Balancer(load).skew == pytest.approx(expected, rel=1e-6)
    gains = load.gains()
    assert gains["eplb"] == pytest.approx(expected, rel=1e-6)
    assert 1 - 1e-9 <= gains[f"eplb, {num_experts} redundant experts"] < expected


def test_rebalancing_moves_experts_pass_by_pass():
    settings = RebalanceSettings(interval=random.randint(5, 50), layers_at_once=random.randint(1, 3))
    load = draw(settings)
    balancer, skews = Balancer(load), []
    for _ in range(settings.interval + 200):
        skews.append(balancer.skew)
        balancer.passed(1)
    first, last = skews[0], balancer.skew
    assert skews[: settings.interval + 1] == [first] * (settings.interval + 1)
    table = balancer.placement.physical_to_logical
    assert last == pytest.approx(skew_by_hand(load.counts, table, load.layout.num_ranks)) and last <= first
    assert last == pytest.approx(load.gains()["eplb"], rel=0.03) or last < load.gains()["eplb"]


class SkewedCost:
    """A step takes as long as its busiest rank."""

    def step(self, shape: StepShape) -> StepCost:
        return StepCost(0.01 * shape.expert_skew)


def test_steps_wait_for_the_straggler():
    load = draw()
    spec = FleetSpec(ReplicaSpec(config(), SkewedCost(), experts=load))
    outcome = simulate(spec, requests(random.Random(3), 40, 50.0))[1]
    assert outcome.busy_seconds == pytest.approx(0.01 * Balancer(load).skew * outcome.num_steps)
    assert outcome.expert_load["skew_first"] == outcome.expert_load["skew_last"] == Balancer(load).skew


def simulate_v3(tmp_path, flags, count=40, layers=V3["num_hidden_layers"]):
    path, out = tmp_path / "config.json", tmp_path / "out.json"
    path.write_text(json.dumps(V3 | {"num_hidden_layers": layers}))
    form = ["--tp", "8", "--attn-dp-size", "8", "--ep-size", "8", "--moe-a2a-backend", "auto"]
    load = ["--num-prompts", str(count), "--random-input-len", "500", "--random-output-len", "60"]
    code = main(
        ["simulate", "--model-path", str(path), "--hardware", "8xH200", "--output-file", str(out), *form, *load, *flags]
    )
    return code, json.loads(out.read_text()) if not code else {}


def test_command_with_a_dump(tmp_path, capsys):
    """Loads from a recorded dump: the straggler slows prompts; a plan of EPLB for the same counts does not. V3's
    shapes with a tenth of its layers: the plan of a rebalance takes a CPU second per dozen layers."""
    layers = 6
    counts = zipf_counts(0.9, [i >= 3 for i in range(layers)], 256, random.getrandbits(32)) >> 20
    dump = tmp_path / "dump.pt"
    torch.save({"logical_count": torch.from_numpy(counts)[None]}, dump)
    code, skewed = simulate_v3(tmp_path, ["--expert-load", str(dump)], layers=layers)
    assert code == 0 and "busiest rank over the mean" in capsys.readouterr().out
    table = np.arange(256)[None].repeat(layers, 0)
    assert skewed["expert_load"]["skew_first"] == pytest.approx(skew_by_hand(counts, table, 8), rel=1e-6)
    flags = ["--expert-load", str(dump), "--init-expert-location", str(dump)]
    planned = simulate_v3(tmp_path, flags, layers=layers)[1]
    assert planned["expert_load"]["skew_first"] == pytest.approx(skewed["expert_load"]["skew_of_placements"]["eplb"])
    assert planned["mean_ttft_ms"] < skewed["mean_ttft_ms"]
    flags = ["--enable-eplb", "--eplb-rebalance-num-iterations", "30", "--ep-num-redundant-experts", "8"]
    moved = simulate_v3(tmp_path, ["--expert-load", str(dump), *flags], 400, layers)[1]["expert_load"]
    assert moved["skew_last"] < moved["skew_first"]


def test_command_refuses(tmp_path, capsys):
    small = small_deepseek()
    dump = tmp_path / "small.pt"
    shape = small["num_hidden_layers"], small["n_routed_experts"]
    torch.save({"logical_count": torch.ones(1, *shape, dtype=torch.int64)}, dump)
    cases = {
        ("--expert-load", str(dump)): f"has {shape[0]} layers x {shape[1]} experts, the model of --model-path has 61 x",
        ("--expert-load", "nowhere.pt"): "nowhere.pt",
        ("--expert-zipf", "-1"): "--expert-zipf is -1",
        ("--expert-zipf", "1", "--expert-skew", "2"): "not allowed with",
        ("--cost-file", "x"): "either --cost-file",
    }
    for flags, words in cases.items():
        assert simulate_v3(tmp_path, flags)[0] == 2
        message = capsys.readouterr().err
        assert words in message and "Traceback" not in message
    assert main(["simulate", "--cost-file", "x", "--expert-zipf", "1"]) == 2
    assert "use --hardware" in capsys.readouterr().err
