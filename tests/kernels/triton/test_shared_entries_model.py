"""DeepSeek V4.1 with Triton kernels, under the interpreter: the logits of the formulas in float64, in steps that the
host plans and in decodes with one plan at fixed addresses, as CUDA graphs replay them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.attention.shared_entries import SharedInPlace
from moe_engine.models.loader import LoadOptions, load_model
from tests.models.stepper import Chunk, Stepper, make_backends
from tests.models.test_deepseek_v41 import Made
from tests.models.test_parity import assert_close

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")
from moe_engine.kernels.compression.triton_compression import TritonCompression  # noqa: E402
from moe_engine.kernels.indexer.triton_indexer import TritonIndexer  # noqa: E402
from moe_engine.kernels.ops.triton_ops import TritonOps  # noqa: E402

PAGE = 16
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4, "compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2], "hc_mult": 2,
    "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2, "candidate_topk_blocks": 5,
    "candidate_block_size": 4, "sliding_window": 8, "hc_sinkhorn_iters": 4, "n_routed_experts": 4,
    "engram_layer_ids": [1], "engram_num_embeddings": [630],
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v41"), **FIELDS)


def stepper_of(path: Path) -> Stepper:
    config = load_model_config(path)
    backends = make_backends(config, page_size=PAGE)
    attention: Any = triton_attention.TritonMLA(num_programs=5)
    backends = replace(
        backends, attention=attention, indexer=TritonIndexer(), ops=TritonOps(), compression=TritonCompression()
    )
    model = load_model(path, config, LoadOptions("float32"), backends)
    return Stepper(model, config, backends, max_rows=4, max_context=96, page_size=PAGE)


def test_decodes_in_place(made: Made) -> None:
    """Contexts within the window, the top-k and the candidates, and beyond; entries of two tokens of one step and of
    two steps."""
    model = stepper_of(made.path)
    dummy = (model.slot_table < PAGE).any(1)
    first, second = [i for i, row in enumerate(model.row_of) if not dummy[row]][:2]
    lens = {first: 3, second: 29}
    for sequence, length in lens.items():
        assert_close(model.step([Chunk(sequence, made.tokens[:length], False)])[0], made.logits[:length])
    caches, lengths = copy.deepcopy(model.kv), list(model.lengths)
    decode_in_place(model, made, lens, 1)
    model.kv, model.lengths = caches, lengths  # the prompts again, which take most of the time
    decode_in_place(model, made, lens, 2)


def decode_in_place(model: Stepper, made: Made, lens: dict[int, int], count: int) -> None:
    """Three steps of `count` tokens after the prompts, with one plan."""
    planner = model.model.planner_of_decodes()  # type: ignore[attr-defined]
    plan: Any = None
    for _ in range(3):
        batch = model.batch([Chunk(s, made.tokens[n : n + count], True) for s, n in lens.items()])
        new = batch.attention.decode
        assert new is not None
        if plan is None:
            plan, queries = planner(batch.attention), new
            assert isinstance(plan, SharedInPlace) and plan.candidates is not None
        queries.context_lens[:] = new.context_lens
        queries.context_lens_device.copy_(new.context_lens_device)
        plan.renew()
        batch = replace(batch, attention=AttentionBatch(queries, None), attention_plan=plan)
        with torch.inference_mode():
            logits = model.model.logits(model.model.forward(batch))
        assert_close(logits, torch.cat([made.logits[n : n + count] for n in lens.values()]))
        lens = {sequence: n + count for sequence, n in lens.items()}
