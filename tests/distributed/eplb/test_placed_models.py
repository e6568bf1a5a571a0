"""Placed and redundant experts: the logits of one rank, and every choice counted once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.models.config_file import load_model_config
from moe_engine.parallel.context import SINGLE
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.parallel.recording.merge import sum_parts
from moe_engine.parallel.topology import Topology
from moe_engine.worker.startup.expert_setup import with_experts
from tests.distributed.dispatch.ranks import World
from tests.distributed.eplb.worlds import Case, load, run_placed, run_script
from tests.distributed.models import script
from tests.distributed.world_fixture import world_of
from tests.models.checkpoints import make_checkpoint

SEED = 5
TOLERANCE = 1e-4  # of the largest logit
EXPERTS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("placed"), {}

    def make(kind: str) -> Path:
        if kind not in made:
            more = {"num_mtp_layers": 1} if kind == "deepseek_v3" else {}
            made[kind] = make_checkpoint(kind, folder / kind, SEED, tokenizer=False, **more)
        return made[kind]

    return make


world = world_of(2, 4)


def shuffled(path: Path, redundant: int, seed: int) -> str:
    """A placement for --init-expert-location: every expert, and replicas of some."""
    config, rng = load_model_config(path), np.random.default_rng(seed)
    assert config.moe is not None
    experts = config.moe.num_experts
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.choice(experts, redundant, replace=False)])).tolist()
        for _ in range(config.num_layers)
    ]
    return json.dumps({"physical_to_logical_map": rows})


def settings(path: Path, redundant: int, seed: int, **more: Any) -> ExpertSettings:
    location = shuffled(path, redundant, seed)
    return ExpertSettings(num_redundant=redundant, location=location, **{"recorder_mode": "stat", **more})


def alone(path: Path, row: str, mtp: bool = False) -> tuple[script.Trace, torch.Tensor]:
    """Logits of one rank with every expert once, and the counts [S, L, E] of its passes."""
    loaded = load(Case(path, Topology(), ExpertSettings(recorder_mode="stat"), row, mtp), SINGLE)
    loaded.control.start()
    (trace,) = run_script(loaded, SEED)
    part = loaded.control.dump_part()
    assert part is not None
    counts = sum_parts([part])["logical_count"]
    assert counts.any()
    return trace, counts


def check(case: Case, results: list[Any], want: script.Trace, counts: torch.Tensor) -> None:
    traces = [(group, got) for group, got, _ in results]
    script.check_traces(traces, want, case.topology.attn_dp_size, str(case), TOLERANCE)
    parts = [part for _, _, part in results if part is not None]
    assert len(parts) == (len(results) if case.topology.travels else 1)
    assert torch.equal(sum_parts(parts)["logical_count"], counts), str(case)


def test_one_rank_with_copies(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("deepseek_v3")
    for row in ("torch", "cpu"):
        want, counts = alone(path, row, mtp=True)
        for dispatch in ("static", "dynamic"):
            case = Case(path, Topology(), settings(path, 3, 1, dispatch=dispatch), row, mtp=True)
            loaded = load(case, SINGLE)
            loaded.control.start()
            (trace,) = run_script(loaded, SEED)
            check(case, [(0, trace, loaded.control.dump_part())], want, counts)


@pytest.mark.drawn(1)
def test_many_ranks(world: World, checkpoint: Callable[[str], Path]) -> None:
    """Every form of EP: all ranks process all tokens, or tokens are dispatched, with DP attention or without."""
    n = world.n
    ways = [
        (Topology(n, ep_size=n), "dynamic", "stat"),
        (Topology(n, attn_dp_size=2, ep_size=2), "dynamic", "stat"),  # with 4 ranks also sharded by width
        (Topology(n, ep_size=n, moe_a2a_backend="allgather"), "static", "stat_approx"),
        (Topology(n, attn_dp_size=n, ep_size=n, moe_a2a_backend="all_to_all"), "static", "stat"),
        (Topology(n, attn_dp_size=n, ep_size=n, moe_a2a_backend="shared_memory"), "dynamic", "stat_approx"),
    ]
    for kind, row in (("deepseek_v3", "torch"), ("qwen3_moe", "cpu")):
        path = checkpoint(kind)
        mtp = kind == "deepseek_v3"
        cases = [
            Case(path, topology, settings(path, 4, seed, dispatch=dispatch, recorder_mode=mode), row, mtp)
            for seed, (topology, dispatch, mode) in enumerate(ways)
        ]
        of_ranks = world.ranks.call(run_placed, cases, SEED, timeout_s=90.0)
        want, counts = alone(path, row, mtp)
        for number, case in enumerate(cases):
            check(case, [results[number] for results in of_ranks], want, counts)


def test_refusals(checkpoint: Callable[[str], Path]) -> None:
    config = load_model_config(checkpoint("deepseek_v3"))
    with pytest.raises(ConfigError, match=r"--init-expert-location: physical_to_logical_map has shape \[1, 2\]"):
        with_experts(SINGLE, config, ExpertSettings(location='{"physical_to_logical_map": [[0, 1]]}'), "cpu")
    assert with_experts(SINGLE, config, ExpertSettings(recorder_mode="stat"), "cpu") is SINGLE
