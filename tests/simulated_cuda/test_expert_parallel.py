"""Engines of several ranks on simulated GPUs whose tokens travel through the emulated DeepEP 2 to the experts of the
emulated DeepGEMM: the tokens of one rank on the CPU. The emulators refuse what the libraries refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.fork_server import ForkServer
from tests.models.checkpoints import write_tensors
from tests.models.fp8 import quantize_fp8
from tests.simulated_cuda.conftest import DEVICES, PRELOADED, ROOT
from tests.speculation.agreeing import agreeing_checkpoint

PACKAGES = f"{ROOT}/tests/simulated_cuda/packages"
SERVER = ForkServer(
    DEVICES | {"PYTHONPATH": f"{PACKAGES}:{DEVICES['PYTHONPATH']}"},
    (*PRELOADED, "tests.simulated_cuda.expert_parallel_engine"),
)
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.06,
}  # fmt: skip
"""Widths that DeepEP and DeepGEMM take."""
SECTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
RARE = (
    "normal alone", "masked", "four ranks, two groups, drafts", "eight ranks, two batches, moving experts, drafts",
)  # fmt: skip
"""Engines that the exhaustive run has."""


def make_model(folder: Path) -> None:
    path = agreeing_checkpoint("deepseek_v3", folder, random.randrange(1 << 20), num_mtp_layers=1, **SIZES)
    write_tensors(path, quantize_fp8(load_file(path / "model.safetensors")))
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": SECTION}))


@pytest.mark.drawn(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        "graphs",
        "graphs, drafts",
        "two batches, moving experts",
        "bf16 sent, old DeepGEMM",
        "low latency alone",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in RARE),
    ],
)
def test_tokens_through_libraries(case: str, devices: None, tmp_path: Path) -> None:
    """Groups by their ends, or with an old DeepGEMM by the group of each row, or padded ones; shared experts during
    dispatch, replayed decodes, drafts, two batches, experts that move."""
    make_model(tmp_path / "model")
    command = ["tests.simulated_cuda.expert_parallel_engine", str(tmp_path), str(random.randrange(2**32)), case]
    code, out, errors = SERVER.run(command, tmp_path, 800.0)
    assert code == 0, errors[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert found["differences"] == {} and found["problems"] == []
    sent = {"elastic_dispatch", "elastic_combine"}
    product = {"masked"} if case == "masked" else {"contiguous" if "old" in case else "contiguous_with_ends"}
    launched = set(found["launched"])
    assert launched >= product and (launched.isdisjoint(sent) if case == "masked" else launched >= sent)
    assert case == "masked" or "masked" not in launched, "a warm-up of products that DeepEP 2 does not need"
    assert (found["rebalances"] > 0) == ("moving" in case) and (found["drafted"] > 0) == ("drafts" in case)
    assert case != "normal alone" or not found["replayed"]
    assert found["replayed"] or not case.startswith(("graphs", "low latency")), found
