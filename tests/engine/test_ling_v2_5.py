"""Ling 2.6 in a whole engine: bytes of the pools, weights by name, other weights while serving."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.executor.make_worker import worker_options
from moe_engine.frontend.engine import Engine
from moe_engine.frontend.weights.weight_updates import WeightUpdates
from moe_engine.worker.weight_read import ReadArgs, WeightRead
from tests.engine.harness import InProcessEngine
from tests.models.ling_v2_5 import make_ling

pytestmark = pytest.mark.usefixtures("forked_processes")
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_total_tokens": 320, "max_running_requests": 4, "chunked_prefill_size": 32,
    "max_mamba_cache_size": 8, "speculative_algorithm": "NEXTN", "speculative_num_steps": 2,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
}  # fmt: skip
NAMES = ("query_key_value", "query_layernorm", "key_layernorm", "g_norm", "g_proj", "dense")
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def test_bytes_and_weights_by_name(tmp_path: Path) -> None:
    path = make_ling(tmp_path / "model", random.randrange(2**31), num_mtp_layers=1)
    stored = load_file(path / "model.safetensors")
    engine = InProcessEngine(path, tmp_path / "status", **FLAGS)
    try:
        ledger, runner = engine.config.ledger, engine.worker.runner
        assert runner.rows.states.num_bytes == ledger.bytes_of("request states") > 0
        assert runner.kv_pool.num_bytes == ledger.kv_bytes
        read = WeightRead(runner, worker_options(engine.config), engine.worker.experts).read
        for name in NAMES:
            name = f"model.layers.0.attention.{name}.weight"
            own, want = name.replace(".dense.", ".o_proj.").replace(".attention.", ".self_attn."), stored[name][:10]
            found = read(ReadArgs(own, 10))
            values = torch.zeros(want.numel())
            places = torch.frombuffer(bytearray(found["numbers"]), dtype=torch.int64)
            values[places] = torch.frombuffer(bytearray(found["values"]), dtype=torch.float32)
            torch.testing.assert_close(values, want.flatten(), rtol=1e-6, atol=1e-6)
    finally:
        engine.close()


def test_weights_of_another_checkpoint(tmp_path: Path) -> None:
    """All of them are replaced while serving, those of the MTP layer too."""
    path, other = (make_ling(tmp_path / name, random.randrange(2**31), num_mtp_layers=1) for name in ("a", "b"))
    prompts = [[random.randrange(250) for _ in range(40)] for _ in range(2)]

    def answers(engine: Engine) -> list[tuple[list[int], int]]:
        found: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        return [(one["output_ids"], one["meta_info"]["spec_num_correct_drafts"]) for one in found]

    with Engine(str(other), **FLAGS) as engine:
        first = answers(engine)
        engine._loop.run(WeightUpdates(engine._frontend).update(str(path), None, None))
        output = answers(engine)
    with Engine(str(path), **FLAGS) as engine:
        assert output == answers(engine) != first
