"""Requirements and conflicts of --elastic-ep, and how many ranks may be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.device import Device
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.parallelism.resolve_elastic import Coverage
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan, resolve_parallel
from moe_engine.planning.resolution_log import Record
from tests.models.checkpoints import make_checkpoint

GOOD: dict[str, Any] = {
    "tp_size": 4,
    "attn_dp_size": 4,
    "enable_dp_lm_head": True,
    "moe_dense_tp_size": 1,
    "moe_a2a_backend": "all_to_all",
    "ep_num_redundant_experts": 16,
    "elastic_ep": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    folder: Path = tmp_path_factory.mktemp("configs")
    kinds = ("deepseek_v3", "llama")
    return {kind: load_model_config(make_checkpoint(kind, folder / kind, 1, tokenizer=False)) for kind in kinds}


def plan_of(model: ModelConfig, device: str = "cpu", **flags: Any) -> tuple[ParallelPlan, Record]:
    record = Record()
    flags = {name: value for name, value in flags.items() if value is not None}
    machine = Machine(Device(device, device), 0, 0, 1)
    return resolve_parallel(EngineArgs.from_kwargs(**flags), model, machine, None, record), record


def test_losses_are_covered_as_far_as_slots_go(models: dict[str, ModelConfig]) -> None:
    plan, record = plan_of(models["deepseek_v3"], **GOOD)
    assert plan.coverage == Coverage(16, 8)
    reasons = [decision.reason for decision in record.decisions if decision.name == "elastic_ep"]
    assert reasons == ["2 of 4 ranks have slots for all experts: 2 may be lost"]
    assert plan_of(models["deepseek_v3"], **{**GOOD, "elastic_ep": False})[0].coverage is None
    for left, needed in ((3, 8), (2, 16), (1, 48)):
        assert Coverage(16, 8).redundant_needed(left, 4) == needed
        assert Coverage(16, (16 + needed) // 4).covers(left) and not Coverage(16, (16 + needed) // 4 - 1).covers(left)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp_size": 1, "attn_dp_size": 1, "enable_dp_lm_head": False}, "one rank; give --tp-size"),
        ({"attn_dp_size": 2}, "a group of 2 ranks .* give --attn-dp-size 4"),
        ({"moe_a2a_backend": "none", "ep_size": 4}, "--moe-a2a-backend none .* give all_to_all"),
        ({"moe_dense_tp_size": None}, "give --moe-dense-tp-size 1"),
        ({"enable_dp_lm_head": False}, "give --enable-dp-lm-head"),
        ({"nnodes": 2, "dist_init_addr": "here:2000"}, "give --nnodes 1"),
        ({"device": "cuda"}, "ranks on cuda .* give --device cpu"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap .* leave it out"),
        ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap .* leave it out"),
        ({"delete_ckpt_after_loading": True}, "leave out --delete-ckpt-after-loading"),
        ({"ep_num_redundant_experts": 0}, "12 slots for 16 experts.*--ep-num-redundant-experts 8 covers one"),
    ],
)
def test_incompatible_flags_are_named(models: dict[str, ModelConfig], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--elastic-ep: .*{words}"):
        plan_of(models["deepseek_v3"], **{**GOOD, **flags})


def test_a_model_without_experts_has_none_to_lose(models: dict[str, ModelConfig]) -> None:
    with pytest.raises(ConfigError, match="--elastic-ep: LlamaForCausalLM has no experts"):
        plan_of(models["llama"], **{**GOOD, "moe_a2a_backend": None, "ep_num_redundant_experts": None})
