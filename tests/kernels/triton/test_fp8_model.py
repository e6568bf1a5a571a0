"""A tiny DeepSeek V3 in block FP8, loaded without dequantizing, on the Triton linear and expert rows.

Its logits equal an emulation in plain torch that dequantizes weights and rounds activations as FP8 does, and are near
those of the torch rows, which do not round activations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.kernels import device, tables
from moe_engine.kernels.device import Device, Need, cpu_device
from moe_engine.kernels.experts import triton_experts
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.linear import triton_linear
from moe_engine.kernels.linear.protocol import LinearCapabilities, PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import BLOCK_FP8, FP8, BlockFP8, BlockWeight, RowFP8, RowWeight
from moe_engine.kernels.registry import select
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config_file import load_model_config
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.models.expert_format import width_group
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.layers.feed_forward.stored_experts import StoredExperts
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.tensors.model import Kind, expert_names, model_tensors
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology
from tests.kernels.cpu.formulas import gated
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import multiplied
from tests.models.fp8 import dequantize_fp8, quantize_fp8
from tests.models.stepper import Chunk, Stepper, make_backends

SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 2, "num_experts_per_tok": 2, "q_lora_rank": 128, "kv_lora_rank": 64, "num_hidden_layers": 2,
    "initializer_range": 0.06,
}  # fmt: skip


def rounded(x: Tensor, power_of_two: bool) -> Tensor:
    return reference.dequantize_rows(reference.quantize_rows(x, power_of_two)).to(x.dtype)


class EmulatedLinear(TorchLinear):
    """The definition of block FP8, in float32."""

    @property
    def capabilities(self) -> LinearCapabilities:
        return LinearCapabilities({BlockFP8: self.prepare_blocks, RowFP8: self.prepare_blocks})

    def prepare_blocks(self, weight: BlockWeight | RowWeight, bias: Tensor | None = None) -> PreparedLinear:
        prepared = self.prepare(reference.dequantize_weight(weight), bias)
        return replace(prepared, data=(prepared.data, weight.power_of_two))

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if isinstance(weight.data, Tensor):
            return super().run(x, weight)
        data, power_of_two = weight.data
        return F.linear(rounded(x, power_of_two), data, weight.bias)


class EmulatedExperts(TorchExperts):
    @property
    def capabilities(self) -> ExpertsCapabilities:  # type: ignore[override]
        kept = QuantizedExperts(self.allocate_blocks, self.load_expert_blocks)
        return ExpertsCapabilities({BlockFP8: kept, RowFP8: kept})

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: str, format: BlockFP8 | RowFP8 = BLOCK_FP8
    ) -> ExpertWeights:
        self.power_of_two = format.power_of_two
        return self.allocate(num_experts, hidden, width, torch.float32, device)

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        self.load_expert(weights, expert, *map(reference.dequantize_weight, (gate, up, down)))

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        assert batch.offsets is not None
        gate_up, downs = weights.data
        out, offsets = torch.empty_like(batch.x), batch.offsets.tolist()
        for expert in range(weights.num_experts):
            span = slice(offsets[expert], offsets[expert + 1])
            gate, up = F.linear(rounded(batch.x[span], self.power_of_two), gate_up[expert]).chunk(2, 1)
            out[span] = F.linear(rounded(F.silu(gate) * up, self.power_of_two), downs[expert])
        return out


def stepper(
    path: Path,
    linear: TorchLinear | None = None,
    experts: object = None,
    overrides: dict[str, Any] | None = None,
    **options: str,
) -> Stepper:
    config = load_model_config(path, overrides)
    backends = make_backends(config)
    if linear is not None:
        ops = TritonOps() if isinstance(linear, TritonLinear) else backends.ops  # with norms that quantize
        backends = replace(backends, ops=ops, linear=linear, experts=experts)  # type: ignore[arg-type]
    model = load_model(path, config, LoadOptions("float32", **options), backends)
    return Stepper(model, config, backends)


def logits_of(loaded: Stepper) -> Tensor:
    """A prompt of 5 tokens, then a decode step."""
    tokens = torch.randint(0, 256, (6,), generator=torch.Generator().manual_seed(5)).tolist()
    found = loaded.step([Chunk(0, tokens[:5], False)])
    for token in tokens[5:]:
        found += loaded.step([Chunk(0, [token], True)])
    return torch.cat(found)


@pytest.mark.parametrize("scale_dtype", ["float32", "e8m0"])
def test_logits(tmp_path: Path, scale_dtype: str) -> None:
    overrides = {"quantization_config": {"scale_fmt": "ue8m0"}} if scale_dtype == "e8m0" else None
    path = make_checkpoint("deepseek_v3", tmp_path, seed=3, fp8=True, scale_dtype=scale_dtype, **SIZES)
    kept = stepper(path, TritonLinear(), TritonExperts(), overrides)
    plain = stepper(path)
    assert kept.model.weight_bytes < 0.5 * plain.model.weight_bytes  # type: ignore[attr-defined]
    got, want = logits_of(kept), logits_of(stepper(path, EmulatedLinear(), EmulatedExperts(), overrides))
    assert got.isfinite().all()
    assert (got - want).abs().max() < 0.02 * want.abs().max()  # ties decided by an earlier rounding
    loose = logits_of(plain)
    assert (got - loose).norm() < 0.1 * loose.norm()
    assert (got - loose).abs().max() > 1e-3 * loose.abs().max()  # activations have been rounded


def test_dummy_weights_stay_fp8(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True, **SIZES)
    for file in path.glob("*.safetensors"):
        file.unlink()
    kept = stepper(path, TritonLinear(), TritonExperts(), load_format="dummy")
    logits = logits_of(kept)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_ranks_of_an_expert_hold_whole_blocks(tmp_path: Path) -> None:
    """Three blocks of 128 columns on two ranks: results add up, memory is that of the ledger. Four ranks split them:
    the weights are dequantized, also in the ledger."""
    path = make_checkpoint("deepseek_v3", tmp_path, seed=3, fp8=True, **SIZES | {"moe_intermediate_size": 384})
    config, kernel = load_model_config(path), TritonExperts()
    moe, format = config.moe, config.weight_format.held_by(multiplied("triton"))
    assert moe is not None and format.name == "fp8"
    reader = WeightReader(path, torch.bfloat16, format=config.weight_format)
    x, ids = torch.randn(3, 256).bfloat16(), torch.tensor([[0, 1], [3, 2], [2, 0]], dtype=torch.int32)
    experts = [spec for spec in model_tensors(config) if spec.copies > 1 and spec.kind is Kind.LINEAR]

    def loaded(rank: int, ranks: int) -> ExpertWeights:
        stored = StoredExperts(
            kernel, "model.layers.1.mlp.experts", moe, 256, expert_names(config), Share(rank, ranks),
            group=width_group(config, keeps_blocks=True),
        )  # fmt: skip
        return stored.load(reader, range(4))

    def counted(ranks: int, of: WeightFormat = format) -> int:
        specs = [spec for spec in experts if spec.name.startswith("model.layers.1.")]
        none, some = (sizes.tensor_bytes(config, specs[:n], 2, Topology(ranks), format=of) for n in (0, len(specs)))
        return some - none

    def run(weights: ExpertWeights) -> Tensor:
        router = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
        return kernel.run_routed(x, router, ids, weights).float()

    whole, *parts = loaded(0, 1), loaded(0, 2), loaded(1, 2)
    assert [(part.width, part.data.gate_up.dtype) for part in parts] == [(256, FP8), (128, FP8)]
    want = run(whole)
    torch.testing.assert_close(sum(map(run, parts)), want, rtol=0.05, atol=0.05 * float(want.abs().max()))
    assert counted(1) == whole.num_bytes and counted(2) == parts[0].num_bytes
    assert counted(4) == counted(4, PLAIN) == loaded(0, 4).num_bytes


def test_blocks_of_a_stored_weight(tmp_path: Path) -> None:
    """Slices at block edges are returned as stored; other slices and plain weights are refused."""
    from safetensors.torch import save_file

    tensors = quantize_fp8({"x_proj.weight": torch.randn(300, 400)}, "e8m0") | {"y_proj.weight": torch.randn(8, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    want, shape = dequantize_fp8(tensors)["x_proj.weight"], (300, 400)
    reader = WeightReader(tmp_path, torch.float32, format=BlockFP8Format(scale_format="ue8m0"))
    kernel_format = reader.format.kernel_format("x_proj")
    assert kernel_format == BlockFP8(power_of_two=True)
    for rows, cols in ((None, None), (slice(128, 300), None), (slice(0, 256), slice(128, 384))):
        cut = Cut(rows, cols)
        assert reader.keeps("x_proj", shape, cut)
        blocks = reader.linear("x_proj", shape, cut, out=kernel_format.empty(*cut.shape(shape), "cpu"))
        assert blocks.power_of_two and blocks.data.dtype == FP8
        assert torch.equal(reference.dequantize_weight(blocks), want[rows or slice(None), cols or slice(None)])
    assert not reader.keeps("x_proj", shape, Cut(slice(64, 256)))
    assert not reader.keeps("x_proj", shape, Cut(cols=slice(0, 200)))
    assert not reader.keeps("y_proj", (8, 8))
    assert not WeightReader(tmp_path, torch.float32, format=BlockFP8Format((64, 64))).keeps("x_proj", shape)
    with pytest.raises(CheckpointError, match=r"shape \[300, 400\], config.json implies \[300, 500\]"):
        reader.linear("x_proj", (300, 500), out=kernel_format.empty(300, 500, "cpu"))


def test_stacked_projections_keep_blocks_where_none_is_cut() -> None:
    reader = DummyReader(torch.float32, format=BlockFP8Format())
    names = ["model.layers.0.a", "model.layers.0.b"]
    linear = load_linear(TritonLinear(), reader, names, [256, 60], 300)
    assert isinstance(linear.weight.data, BlockWeight) and linear.weight.data.scales.shape == (3, 3)
    assert isinstance(load_linear(TritonLinear(), reader, names[::-1], [60, 256], 300).weight.data, Tensor)
    assert isinstance(load_linear(TorchLinear(), reader, names, [256, 60], 300).weight.data, Tensor)
    half = load_linear(TritonLinear(), reader, names, [512, 256], 300, out_shares=[Share(1, 2)] * 2)
    assert isinstance(half.weight.data, BlockWeight) and half.weight.data.data.shape == (384, 300)


def test_which_devices_multiply_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.multiplies_fp8("cpu")
    for capability, want in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(device, "probe", lambda kind, found=capability: Device(kind, "a GPU", found))
        assert device.multiplies_fp8("cuda") is want


def test_devices_without_fp8_get_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_linear, triton_experts):
        monkeypatch.setattr(module, "multiplies_fp8", lambda kind: False)
    gate, up, down = (reference.quantize_weight(torch.randn(n, k) / 12) for n, k in ((96, 144), (96, 144), (144, 96)))
    x = torch.randn(5, 144).bfloat16()
    kernel = TritonLinear()
    got = kernel.run(x, kernel.prepare_blocks(gate))
    want = x.double() @ reference.dequantize_weight(gate, torch.float64).T
    assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() < 0.01 * want.abs().max()
    experts = TritonExperts()
    weights = experts.allocate_blocks(1, 144, 96, "cpu")
    experts.load_expert_blocks(weights, 0, gate, up, down)
    assert weights.num_bytes == 3 * 144 * 96 * 2
    routed = experts.run_routed(x, torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32), weights)
    want = gated(x, *map(reference.dequantize_weight, (gate, up, down)))
    assert (routed.double() - want).abs().max() < 0.02 * want.abs().max()


def test_the_rows_name_what_they_need() -> None:
    cuda = Device("cuda", "NVIDIA H200", (9, 0))
    for family, rows in (("linear", tables.LINEAR), ("experts", tables.EXPERTS)):
        assert select(family, rows, "triton", cuda, Need("bfloat16")).row.name == "triton"
        with pytest.raises(ValueError, match="CUDA"):
            select(family, rows, "triton", cpu_device(), Need("bfloat16"))
