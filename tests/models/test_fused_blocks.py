"""Block FP8 with the experts of a layer in common tensors: logits equal those of the values that the format defines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.kernels.quantization.protocol import BlockWeight
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.fused_blocks import with_fused_experts
from moe_engine.models.header_check import check_headers
from moe_engine.models.weights import WeightReader
from tests.models import vision_checkpoints
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import logits_of, write_pair
from tests.models.fp8 import dequantize_fp8, quantize_fp8

KINDS = ("qwen3_vl_moe", "qwen3_5_moe", "mistral4")


def fused_fp8(tensors: dict[str, Tensor], block: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts in FP8, in the tensors that they are in, with the scales of an expert's matrix one after the other; their
    values in float32."""
    stored, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = [quantize_fp8({"x_proj.weight": matrix}, block=block) for matrix in stored.pop(name)]
        stored[name] = torch.stack([expert["x_proj.weight"] for expert in experts])
        stored[f"{name}_scale_inv"] = torch.stack([expert["x_proj.weight_scale_inv"] for expert in experts])
        plain[name] = torch.stack([dequantize_fp8(expert, block)["x_proj.weight"] for expert in experts])
    return stored, plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [16, 48], ids=["whole blocks", "a block of gate and up"])
def test_logits_are_those_of_the_dequantized_experts(tmp_path: Path, kind: str, block: int) -> None:
    seed = random.randrange(1000)
    if kind == "mistral4":
        path = make_checkpoint(kind, tmp_path / "q", seed, tokenizer=False)
    else:
        path = vision_checkpoints.make_checkpoint(kind, tmp_path / "q", seed, moe_intermediate_size=32)
    stored, plain = fused_fp8(load_file(path / "model.safetensors"), block)
    assert len(stored) > len(plain)
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    path, other = write_pair(path, stored, plain, {"quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_get_blocks_as_stored(tmp_path: Path, transposed: bool) -> None:
    """Of an expert's whole matrix, and of a rank's rows or columns; a block that gate and up share is not kept."""
    experts, width, hidden = 3, 256, 384
    whole = torch.randn(experts, 2 * width, hidden)
    stored, plain = fused_fp8({"m.experts.gate_up_proj": whole.mT.contiguous() if transposed else whole}, 128)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    format = with_fused_experts(BlockFP8Format(), experts, transposed)
    reader = WeightReader(tmp_path, torch.float32, format=format)
    for part, name in enumerate(("gate", "up")):
        prefix = f"m.experts.1.{name}_proj"
        values = plain["m.experts.gate_up_proj"][1]
        want = (values.T if transposed else values)[part * width : (part + 1) * width]
        for cut in (Cut(), Cut(slice(128, 256)), Cut(None, slice(128, 384))):
            assert reader.keeps(prefix, (width, hidden), cut)
            out = BlockWeight.empty(*cut.shape((width, hidden)), "cpu")
            reader.linear(prefix, (width, hidden), cut, out=out)
            scales = out.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(out.data.float() * scales, cut.of(want))
        assert not reader.keeps(prefix, (width, hidden), Cut(slice(64, 192)))
    assert format.keeps(reader, "m.experts.1.gate_proj", (192, hidden), Cut())  # type: ignore[arg-type]
    assert not format.keeps(reader, "m.experts.1.up_proj", (192, hidden), Cut())  # type: ignore[arg-type]
