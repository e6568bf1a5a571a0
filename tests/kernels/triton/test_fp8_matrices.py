"""FP8 checkpoints with one scale for a matrix, or one per row, on kernels that multiply them as stored.

Results of the former are those of the same numbers stored as blocks with equal scales; those of the latter equal an
emulation in plain torch that dequantizes weights and rounds activations as FP8 does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.quantization.protocol import BLOCK_FP8
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.footprint import held_bytes
from moe_engine.models.formats.float8 import MatrixFloat8
from moe_engine.models.formats.fused_float8 import FusedFloat8
from moe_engine.models.formats.module_rules import Modules
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.needs import expert_widths
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.topology import Topology
from moe_engine.planning.parallelism.resolve_parallel import even_groups
from tests.kernels.triton.test_fp8_model import SIZES, EmulatedExperts, EmulatedLinear, logits_of, stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import multiplied, write_pair
from tests.models.quantized_floats import FLOATS, fused_fp8, quantize_floats

LLAMA: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 4}
NAMES = ("fp8, static", "fp8, static, published", "modelopt", "compressed fp8, matrix")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_blocks(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as a block-FP8 checkpoint."""
    found = {name: tensor for name, tensor in stored.items() if "scale" not in name}
    for name, data in stored.items():
        ends = [end for end in ("_scale", "_scale_inv") if name + end in stored]
        if ends:
            grid = torch.ones([-(-size // 128) for size in data.shape])
            found[f"{name}_scale_inv"] = grid * stored[name + ends[0]].float()
    return found


def counted_bytes(config: ModelConfig, ranks: int = 1) -> int:
    """The ledger's weights with kernels that multiply FP8."""
    format = config.weight_format.held_by(multiplied("triton"))
    return sizes.weight_bytes(config, 4, topology=Topology(ranks), format=format)


def error(got: Tensor, want: Tensor) -> float:
    """Relative, of the row in the middle: a rounding may change the experts of some rows."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.each_value
def test_a_matrix_with_one_scale_is_multiplied_as_stored(tmp_path: Path, name: str, kind: str) -> None:
    seed = random.randrange(1000)
    path = make_checkpoint(kind, tmp_path / "q", seed, tokenizer=False, **(SIZES if kind != "llama" else LLAMA))
    stored, plain = quantize_floats(load_file(path / "model.safetensors"), name)
    blocks = make_checkpoint(kind, tmp_path / "blocks", seed, tokenizer=False, **(SIZES if kind != "llama" else LLAMA))
    write_pair(blocks, in_blocks(stored), plain, {"quantization_config": BLOCKS})
    (tmp_path / "plain").rename(tmp_path / "plain of blocks")
    path, other = write_pair(path, stored, plain, {"quantization_config": FLOATS[name][1]})
    kept, same = (stepper(each, EmulatedLinear(), EmulatedExperts()) for each in (path, blocks))
    got, want = logits_of(kept), logits_of(stepper(other))
    assert torch.equal(got, logits_of(same))
    assert 0 < error(got, want) < 0.5  # activations have been rounded
    held = held_bytes(stepper(path, TritonLinear(), TritonExperts()).model)
    assert abs(held - counted_bytes(kept.config)) < 0.001 * held


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("name", ["fbgemm_fp8", "w8a8_fp8", "compressed fp8, rows"])
@pytest.mark.each_value
def test_rows_with_scales_are_multiplied_as_stored(tmp_path: Path, name: str, kind: str) -> None:
    seed = random.randrange(1000)
    path = make_checkpoint(kind, tmp_path / "q", seed, tokenizer=False, **(SIZES if kind != "llama" else LLAMA))
    stored, plain = quantize_floats(load_file(path / "model.safetensors"), name)
    path, other = write_pair(path, stored, plain, {"quantization_config": FLOATS[name][1]})
    kept = stepper(path, TritonLinear(), TritonExperts())
    got, want = logits_of(kept), logits_of(stepper(path, EmulatedLinear(), EmulatedExperts()))
    assert error(got, want) < 0.1  # ties decided by an earlier rounding; most seeds 1e-6
    exact = logits_of(stepper(other))
    assert 0 < error(got, exact) < 0.5  # activations have been rounded
    held = held_bytes(kept.model)
    assert abs(held - counted_bytes(kept.config)) < 0.001 * held < 0.0006 * sizes.weight_bytes(kept.config, 4)


@pytest.mark.parametrize("scheme", [MatrixFloat8(), FusedFloat8(8)], ids=["experts apart", "experts in common tensors"])
def test_ranks_hold_what_they_hold_of_blocks(tmp_path: Path, scheme: MatrixFloat8 | FusedFloat8) -> None:
    """Three blocks of 128 columns of an expert: two ranks hold whole ones, four ranks dequantize them."""
    path = make_checkpoint("deepseek_v3", tmp_path, tokenizer=False, fp8=True, **SIZES | {"moe_intermediate_size": 384})
    blocks = load_model_config(path)
    rules = ((Modules(parts=("*.experts.*",)), scheme), (Modules(targets=("Linear",)), MatrixFloat8()))
    skipped = Modules(parts=("lm_head", "*.mlp.gate"))
    config = replace(blocks, weight_format=SchemeFormat("fp8", rules, skipped))
    for ranks in (1, 2, 4):
        assert expert_widths(config, ranks) == expert_widths(blocks, ranks)
        assert even_groups(config, ranks) == even_groups(blocks, ranks)
        assert counted_bytes(config, ranks) == counted_bytes(blocks, ranks), ranks


def test_experts_in_common_tensors(tmp_path: Path) -> None:
    experts, width, hidden = 3, 256, 384
    for halves in (False, True):
        parts, values = fused_fp8(torch.randn(experts, 2 * width, hidden), halves)
        stored = {f"m.experts.gate_up_proj{end}": part.contiguous() for end, part in parts.items()}
        save_file(stored, tmp_path / "model.safetensors")
        format = SchemeFormat("fp8", ((Modules(parts=("*.experts.*",)), FusedFloat8(experts)),))
        reader = WeightReader(tmp_path, torch.float32, format=format)
        for part, name in enumerate(("gate", "up")):
            prefix, want = f"m.experts.1.{name}_proj", values[1][part * width : (part + 1) * width]
            for cut in (Cut(), Cut(slice(128, 256)), Cut(None, slice(128, 384))):
                assert reader.keeps(prefix, (width, hidden), cut)
                out = BLOCK_FP8.empty(*cut.shape((width, hidden)), "cpu")
                reader.linear(prefix, (width, hidden), cut, out=out)
                assert torch.equal(dequantize_weight(out), cut.of(want))
            assert not reader.keeps(prefix, (width, hidden), Cut(slice(64, 192)))
