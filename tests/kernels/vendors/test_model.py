"""A tiny DeepSeek V3 in block FP8 on the vendor rows, all with emulators: logits near those of the torch rows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.experts.flashinfer_trtllm import TrtllmExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.ops.protocol import HeadNorms, OpsCapabilities, RotaryTable
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.quantization import reference
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator
from tests.kernels.vendors.trtllm_moe_emulator import TrtllmMoeEmulator
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends

ATTENTION = {
    "flashinfer": lambda: FlashInferMLA(flashinfer_emulator.module()),
    "fa3": lambda: FA3MLA(fa3_emulator.module()),
    "flashmla": lambda: FlashMLA(flash_mla_emulator.module(), expanded=TorchMLA()),
}


def stepper(path: Path, max_expanded_tokens: int = 16384, **rows: Any) -> Stepper:
    config = load_model_config(path)
    backends = replace(make_backends(config, dtype="bfloat16", page_size=64), **rows)
    model = load_model(path, config, LoadOptions("bfloat16"), backends, max_expanded_tokens=max_expanded_tokens)
    return Stepper(model, config, backends, torch.bfloat16, page_size=64)


def logits_of(loaded: Stepper) -> Tensor:
    """Two prompts, one in two chunks, and decode steps beside a prompt."""
    tokens = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    found = loaded.step([Chunk(0, tokens[:70], False)])
    found += loaded.step([Chunk(0, tokens[70:71], True), Chunk(1, tokens[71:76], False)])
    found += loaded.step([Chunk(0, tokens[76:78], True), Chunk(1, tokens[78:79], True)])
    return torch.cat([part.float() for part in found])


@pytest.mark.parametrize("name,arch", [("flashinfer", 10), ("fa3", 9), ("flashmla", 9)])
def test_logits(checkpoint, name, arch):
    emulator = DeepGemmEmulator(arch)
    gemm = DeepGemm(emulator.module, (arch, 0), reference)
    products = {"linear": DeepGemmLinear(gemm), "experts": DeepGemmExperts(gemm)}
    loaded, plain = stepper(checkpoint, attention=ATTENTION[name](), **products), stepper(checkpoint)
    assert loaded.model.weight_bytes < 0.8 * plain.model.weight_bytes
    got, same_products, want = (logits_of(one) for one in (loaded, stepper(checkpoint, **products), plain))
    trial = {"bf16 contiguous"} if arch == 9 else set()  # True if Hopper's build takes group ends
    assert {key[0] for key in emulator.compiled} == {"dense", "contiguous"} | trial
    assert (got - same_products).norm() < 0.08 * want.norm()  # bf16; a tie in the router may go the other way
    assert (got - want).norm() < 0.3 * want.norm()  # FP8, on Blackwell with weights quantized twice


def test_logits_of_fused_experts(checkpoint):
    """TensorRT-LLM's fused experts, with the shared expert in a slot of its own."""
    emulator = TrtllmMoeEmulator()
    experts = TrtllmExperts(TorchExperts(), emulator.module, reference.quantize_rows)
    loaded, plain = stepper(checkpoint, experts=experts), stepper(checkpoint)
    got, want = logits_of(loaded), logits_of(plain)
    assert emulator.calls == [70, 6, 3]  # one layer of two is a mixture
    assert (got - want).norm() < 0.3 * want.norm()  # FP8


@pytest.mark.parametrize("name", ATTENTION)
def test_long_contexts_are_expanded_in_parts(checkpoint, name):
    """Parts of 32 and 16 tokens: the logits of the torch row, which expands whole contexts; only decodes are
    absorbed."""
    attention = ATTENTION[name]()
    absorbed, counts = attention.absorbed, []

    def counted(q: Tensor, *rest: Any) -> Tensor:
        counts.append(len(q))
        return absorbed(q, *rest)

    attention.absorbed = counted
    got = logits_of(stepper(checkpoint, max_expanded_tokens=32, attention=attention))
    want = logits_of(stepper(checkpoint))
    assert (got - want).norm() < 0.08 * want.norm()  # bf16; a tie in the router may go the other way
    assert counts == [1, 1, 3, 3]  # for each step with decodes, in two layers


class Grouping(TorchOps):
    """With the rows of grouped-query attention in one call, as on a GPU; counts those that add a bias."""

    def __init__(self) -> None:
        self.capabilities = OpsCapabilities(routes_shared=True, grouped_rows=self.grouped_rows)
        self.num_biases = 0

    def grouped_rows(
        self, q: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms | None, positions: Tensor, table: RotaryTable,
        slots: Tensor, k_cache: Tensor, v_cache: Tensor | None, bias: Tensor | None = None, trailing: bool = False,
    ) -> Tensor:  # fmt: skip
        assert norms is not None and v is not None and v_cache is not None and not trailing
        if bias is not None:
            self.num_biases += 1
            parts = (q, k, v)
            own = bias.view(-1, q.shape[2]).split([part.shape[1] for part in parts])
            q, k, v = (part + added for part, added in zip(parts, own))
        q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        self.rotate_leading(q, positions, table)
        self.rotate_leading(k, positions, table)
        self.write_kv(k, v, slots, k_cache, v_cache)
        return q


def test_the_bias_of_a_projection_is_added_with_the_cache_rows(tmp_path: Path) -> None:
    """GLM-4.6 with DeepGEMM, whose product adds no bias: the same bits as with a launch of its own."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
    path = make_checkpoint("glm4_moe", tmp_path, seed=random.randrange(2**31), fp8=True, num_hidden_layers=2, **sizes)
    gemm = DeepGemm(DeepGemmEmulator(9).module, (9, 0), reference)
    config, grouping = load_model_config(path), Grouping()
    found = []
    for ops in (grouping, TorchOps()):
        backends = replace(make_backends(config, dtype="bfloat16"), linear=DeepGemmLinear(gemm), ops=ops)
        model = load_model(path, config, LoadOptions("bfloat16"), backends)
        found.append(logits_of(Stepper(model, config, backends, torch.bfloat16)))
    assert grouping.num_biases == 2 * 3  # layers, steps
    assert torch.equal(*found)
