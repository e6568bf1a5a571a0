"""EPLB on running ranks: the planned balance is reached, and moving experts changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.context import SINGLE
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.placement.balance import balancedness, layer_balancedness, rank_loads
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import MIN_GAIN, plan_placement
from moe_engine.parallel.placement.program import decode_moves, encode_moves
from moe_engine.parallel.topology import Topology
from moe_engine.worker.eplb.eplb_manager import ASK_EVERY
from tests.distributed.dispatch.ranks import World
from tests.distributed.eplb.worlds import Balanced, Case, balanced, load, run_balanced
from tests.distributed.world_fixture import world_of
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.drawn(4)

EXPERTS, REDUNDANT, LAYERS, INTERVAL, STEPS, TOKENS = 16, 8, 2, 6, 40, 24
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router whose bias strongly prefers a few experts, different ones per layer."""
    path = make_checkpoint(
        "deepseek_v3", tmp_path_factory.mktemp("skewed"), 3, tokenizer=False,
        n_routed_experts=EXPERTS, n_group=1, topk_group=1, num_hidden_layers=LAYERS, first_k_dense_replace=0,
    )  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    rng = torch.Generator().manual_seed(4)
    for layer in range(LAYERS):
        bias = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        bias.copy_(0.25 * torch.rand(bias.shape, generator=rng))
        bias[8 + 4 * layer : 11 + 4 * layer] += 0.7  # neighbors, with one copy each on one rank
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def drafting(skewed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a router, equal in both layers and in the MTP layer."""
    path = make_checkpoint(
        "deepseek_v3", tmp_path_factory.mktemp("drafting"), 5, tokenizer=False, num_mtp_layers=1,
        n_routed_experts=EXPERTS, n_group=1, topk_group=1, num_hidden_layers=LAYERS, first_k_dense_replace=0,
    )  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    for layer in range(LAYERS + 1):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"][8:11] += 0.7
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def prompts(skewed: Path) -> list[list[int]]:
    rng = torch.Generator().manual_seed(9)
    vocab = load_model_config(skewed).vocab_size
    return [torch.randint(0, vocab, (TOKENS,), generator=rng).tolist() for _ in range(STEPS)]


@pytest.fixture(scope="module")
def alone(skewed: Path, prompts: list[list[int]]) -> tuple[list[torch.Tensor], np.ndarray]:
    """Logits of each step and counts [S, L, E], of one rank."""
    loaded = load(Case(skewed, Topology(), ExpertSettings(recorder_mode="stat", buffer_size=STEPS)), SINGLE)
    loaded.control.start()
    loaded.look()
    counts = []
    logits = []
    for prompt in prompts:
        logits += balanced(loaded, [prompt]).logits
        view = loaded.control.snapshot()
        assert view is not None
        counts.append(np.array(view["counts"]))
    return logits, np.diff(np.stack([np.zeros_like(counts[0]), *counts]), axis=0)


world = world_of(4)


WAYS = {
    "all-see-all": (Topology(4, ep_size=4), "dynamic", "torch", 1),
    "allgather": (Topology(4, ep_size=4, moe_a2a_backend="allgather"), "static", "cpu", 2),
    "dp-all_to_all": (Topology(4, attn_dp_size=2, ep_size=4, moe_a2a_backend="all_to_all"), "dynamic", "torch", 1),
    "cut": (Topology(4, ep_size=2), "dynamic", "cpu", 1),  # both shards of an expert move together
}


def settings(dispatch: str, layers_at_once: int, **more: Any) -> ExpertSettings:
    rebalance = RebalanceSettings(interval=INTERVAL, layers_at_once=layers_at_once, **more)
    return ExpertSettings(num_redundant=REDUNDANT, dispatch=dispatch, recorder_mode="stat", rebalance=rebalance)


@pytest.mark.parametrize("way", WAYS)
def test_balance_rises_as_planned_and_tokens_do_not_change(
    world: World, skewed: Path, prompts: list[list[int]], alone: Any, way: str
) -> None:
    topology, dispatch, row, layers_at_once = WAYS[way]
    case = Case(skewed, topology, settings(dispatch, layers_at_once, adaptive=True), row)
    ranks: list[Balanced] = world.ranks.call(run_balanced, case, prompts, timeout_s=90.0)
    logits, counts = alone
    first = ranks[0]
    for rank, seen in enumerate(ranks):
        for number, (ours, theirs) in enumerate(zip(seen.logits, logits)):
            if len(ours):
                error = float((ours - theirs).abs().max() / theirs.abs().max())
                assert error < TOLERANCE, (rank, number, error)
        assert all((a == b).all() for a, b in zip(seen.tables, first.tables)), f"rank {rank} has other tables"
    layout = ExpertLayout(EXPERTS, topology.ep_size, REDUNDANT)
    trivial = ExpertPlacement.trivial(layout, LAYERS)
    begins = INTERVAL + ASK_EVERY  # steps on the trivial placement, before the first chunk is swapped in
    assert all((table == trivial.physical_to_logical).all() for table in first.tables[: begins + 1])
    counted = counts[:INTERVAL].sum(0)
    planned = plan_placement(counted, layout, "auto", trivial, MIN_GAIN)
    chunks = list(plan_moves(trivial, planned))
    ends = next(i for i, table in enumerate(first.tables) if (table == last_tables(chunks, trivial)).all())
    assert len(chunks) // LAYERS <= ends - begins <= len(chunks) + 1, "a chunk a step, of some layers"
    stats = first.states[ends]["eplb"]
    assert stats["before"] == pytest.approx(balancedness(trivial, counted))
    assert stats["after"] == pytest.approx(balancedness(planned, counted))
    later = counts[ends : ends + INTERVAL].sum(0)
    now = ExpertPlacement(first.tables[ends], EXPERTS, topology.ep_size)
    was, became = balancedness(trivial, later), balancedness(now, later)
    assert became > was + (0.15 if topology.ep_size == 4 else 0.05) and became > stats["after"] - 0.15, (
        was,
        became,
        stats,
    )
    assert stats["pause_seconds"] > 0 and 0 < stats["moving_passes"] <= ends - begins
    assert sum(seen.states[ends]["eplb"]["experts_received"] for seen in ranks) >= len(chunks)
    assert first.states[-1]["eplb"]["rebalances"] >= 1
    intervals = [[state["eplb"]["interval"] for state in seen.states] for seen in ranks]
    assert all(of_rank == intervals[0] for of_rank in intervals) and intervals[0][ends] == INTERVAL
    assert first.log[0] == f"[EPLBManager] system started, will rebalance per {INTERVAL} iterations."
    assert first.log[1] == "[EPLBManager] rebalance start" and first.log[2].startswith(
        "[EPLBManager] rebalance end time="
    )


@pytest.mark.parametrize("way", ["all-see-all", "dp-all_to_all"])
def test_experts_of_mtp_layers_move_too(world: World, drafting: Path, prompts: list[list[int]], way: str) -> None:
    topology, dispatch, row, layers_at_once = WAYS[way]
    alone = balanced(load(Case(drafting, Topology(), mtp=True), SINGLE), prompts)
    case = Case(drafting, topology, settings(dispatch, layers_at_once), row, mtp=True)
    ranks: list[Balanced] = world.ranks.call(run_balanced, case, prompts, timeout_s=90.0)
    for seen in ranks:
        for ours, theirs in zip(seen.logits + seen.drafts, alone.logits + alone.drafts):
            if len(ours):
                assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE
        assert all((a == b).all() for a, b in zip(seen.tables, ranks[0].tables))
    before, after = (ranks[0].tables[i] for i in (0, -1))
    assert before.shape == (LAYERS + 1, EXPERTS + REDUNDANT)
    copies = [int(np.isin(table[LAYERS], [8, 9, 10]).sum()) for table in (before, after)]
    assert copies[0] == 3 and copies[1] > 6, "the busy experts of the MTP layer got the redundant slots"


def last_tables(chunks: list[Any], start: ExpertPlacement) -> np.ndarray:
    table = start.physical_to_logical.copy()
    for chunk in chunks:
        table[chunk.layer] = chunk.table
    return table


def test_measured_loads_are_the_planned_ones(world: World, skewed: Path, prompts: list[list[int]], alone: Any) -> None:
    """Tokens received by the ranks, counted by the dispatcher, with a planned placement."""
    layout = ExpertLayout(EXPERTS, 4, REDUNDANT)
    counts = alone[1].sum(0)
    plan = plan_placement(counts, layout)
    trivial = ExpertPlacement.trivial(layout, LAYERS)
    found = {}
    for name, placement in (("trivial", trivial), ("plan", plan)):
        location = '{"physical_to_logical_map": %s}' % placement.physical_to_logical.tolist()  # noqa: UP031
        chosen = ExpertSettings(
            num_redundant=REDUNDANT, location=location, recorder_mode="stat_approx", report_metrics=True
        )
        case = Case(skewed, Topology(4, ep_size=4, moe_a2a_backend="all_to_all"), chosen)
        ranks = world.ranks.call(run_balanced, case, prompts, timeout_s=60.0)
        found[name] = ranks[0].states[-1]["balancedness"]["1000"]
        assert all(seen.states == ranks[0].states for seen in ranks)
        loads = rank_loads(placement, alone[1])
        assert found[name] == pytest.approx(float(layer_balancedness(loads).mean()), abs=0.06), name
    assert found["plan"] > found["trivial"] + 0.15, found


def test_nothing_moves_above_the_threshold(world: World, skewed: Path, prompts: list[list[int]]) -> None:
    case = Case(skewed, Topology(4, ep_size=4), settings("dynamic", 1, enough=0.01))
    ranks = world.ranks.call(run_balanced, case, prompts[: 2 * INTERVAL + ASK_EVERY], timeout_s=60.0)
    for seen in ranks:
        assert all((table == seen.tables[0]).all() for table in seen.tables)
        assert seen.states[-1]["eplb"]["experts_received"] == 0


def test_plans_survive_encoding() -> None:
    rng, layout = np.random.default_rng(12), ExpertLayout(12, 4, 4)
    old, new = (plan_placement(rng.lognormal(3, 1, (3, 12)), layout) for _ in range(2))
    chunks = list(plan_moves(old, new, chunk_size=2))
    decoded = decode_moves(encode_moves(chunks), old)
    assert [chunk for layer in decoded for chunk in layer] == chunks and len(decoded) == 3
    assert decode_moves(encode_moves([]), old) == []
