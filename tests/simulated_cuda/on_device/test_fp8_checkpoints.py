"""Engines on a simulated device with FP8 checkpoints that have a scale per row or per matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.harness import InProcessEngine
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import write_pair
from tests.models.quantized_floats import FLOATS, quantize_floats
from tests.simulated_cuda import kernels
from tests.simulated_cuda.on_device.test_engines import GREEDY, LIMITS, script, watched

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 64}
ROTARY = 1 << 20


@pytest.mark.drawn(3, group="engines on a device")
@pytest.mark.parametrize("name", ["compressed fp8, rows", "modelopt"])
def test_weights_stay_as_stored(name: str, tmp_path: Path) -> None:
    """Captured decodes without waits; memory is that of the ledger."""
    path = make_checkpoint("qwen3_moe", tmp_path / "q", 3, num_hidden_layers=2, tokenizer=False, **SIZES)
    stored, plain = quantize_floats(load_file(path / "model.safetensors"), name)
    path, _ = write_pair(path, stored, plain, {"quantization_config": FLOATS[name][1]})
    flags = {**LIMITS, "cuda_graph_max_bs": 2}
    engine = InProcessEngine(path, tmp_path / "board", dtype="bfloat16", device="cuda", **flags)
    try:
        found = watched(engine, script([GREEDY, GREEDY]))
        counted, held = engine.config.ledger.bytes_of("weights"), engine.worker.info.weight_bytes
    finally:
        engine.close()
    assert found.num_graphs == 2 and found.waits == [] and any(step.cuda_graph for step in found.steps)
    assert set(kernels.launches) >= {"block_gemm_kernel", "gate_up_kernel", "down_kernel"}
    assert abs(held - counted) <= 0.02 * counted + ROTARY, (held, counted)
