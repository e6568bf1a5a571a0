"""Engines on a simulated device with FP8 checkpoints: a scale per row or per matrix, and blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.kernels.linear import triton_linear
from moe_engine.kernels.linear.tiles import MOST_NORMED
from moe_engine.kernels.quantization.protocol import RowsToNorm
from moe_engine.models.layers.attention import latent_queries
from tests.engine.harness import InProcessEngine
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.format_checks import write_pair
from tests.models.fp8 import quantize_fp8
from tests.models.quantized_floats import FLOATS, quantize_floats
from tests.models.v4_checkpoints import CSA, HCA
from tests.models.v4_mtp import make_agreeing
from tests.models.v4_quantized import PLAIN_PARTS, SECTION
from tests.simulated_cuda import kernels
from tests.simulated_cuda.on_device.test_engines import FEW, GREEDY, LIMITS, check_answers, script, serve, watched
from tests.speculation.agreeing import agreeing_checkpoint

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


def in_blocks(path: Path) -> Path:
    """The checkpoint with its projections in e4m3 blocks, and those of an indexer; V4's in published names, with scales
    that are powers of two."""
    config, tensors = path / "config.json", load_file(path / "model.safetensors")
    published = "embed.weight" in tensors
    plain = PLAIN_PARTS if published else ("weights_proj", "norm", "embed", "lm_head", ".gate.")
    kept = {name: x for name, x in tensors.items() if x.dim() != 2 or any(part in name for part in plain)}
    own = {name.removesuffix("weight") + "_proj.weight": x for name, x in tensors.items() if name not in kept}
    stored = quantize_fp8(own, "e8m0" if published else "float32")
    if published:
        stored = {name.replace("weight_scale_inv", "scale"): x for name, x in stored.items()}
    write_tensors(path, kept | {name.replace("._proj.", "."): x for name, x in stored.items()})
    section = SECTION if published else {key: SECTION[key] for key in SECTION if key != "scale_fmt"}
    fields = {"quantization_config": section} | ({"expert_dtype": "fp8"} if published else {})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return path


V4_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 1, "layer_types": [CSA], "num_hash_layers": 0, "sliding_window": 8, "index_topk": 3,
    "compress_rates": {CSA: 2, HCA: 8}, "index_n_heads": 4, "n_routed_experts": 4, "o_lora_rank": 128,
}  # fmt: skip


@pytest.mark.drawn(2, group="engines on a device")
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_few_latents_are_normed_by_their_products(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the CPU, which multiplies unquantized rows; decodes launch no norm between a query's products."""
    fields: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    if kind == "deepseek_v32":
        fields |= {"index_head_dim": 16, "index_topk": 8}
    if kind == "deepseek_v4":
        path = in_blocks(make_agreeing(tmp_path / "model", 7, **V4_FIELDS))
    else:
        path = in_blocks(agreeing_checkpoint(kind, tmp_path / "model", 5, **fields))
    requests = script([GREEDY, GREEDY])
    expected = serve(path, tmp_path, requests, device="cpu")
    flags = FEW | {"linear_backend": "triton", "cuda_graph_max_bs": 2, "chunked_prefill_size": 4}
    normed: list[int] = []

    def noted(rows: Tensor, *norm: Any) -> RowsToNorm:
        normed.append(len(rows))
        return RowsToNorm(rows, *norm)

    monkeypatch.setattr(latent_queries, "RowsToNorm", noted)
    monkeypatch.setattr(triton_linear, "quantizes_few_heads", lambda count, heads, consumer: count <= 2)
    found = serve(path, tmp_path, requests, device="cuda", **flags)
    check_answers(found.answers, expected.answers, tolerance=0.1)
    assert found.num_graphs == 2 and found.waits == [] and any(step.cuda_graph for step in found.steps)
    assert kind != "deepseek_v4" or "heads_quantize_kernel" in kernels.launches
    assert {1, 2} <= set(normed) and max(normed) <= MOST_NORMED
