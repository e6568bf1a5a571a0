"""MiMo-V2.5: q, k and v joined by groups of heads in FP8 blocks that begin anew in each group; logits equal
transformers' MiMo-V2-Flash with the dequantized tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.joined_groups import JoinedGroupsFormat
from moe_engine.models.header_check import check_headers
from moe_engine.models.weights import WeightReader
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.fp8 import dequantize_fp8, quantize_fp8
from tests.models.rows import all_rows
from tests.models.stepper import Chunk, load
from tests.models.test_config import parse
from tests.models.test_mimo import PUBLISHED
from tests.models.test_parity import assert_close

GROUPS = 2
SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": GROUPS, "hidden_size": 200}
"""Groups of 136 and 176 rows: their last block has 8 or 48. A row has one block of columns and a part."""
FORMAT = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def join_groups(parts: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """q, k and v -> the joined FP8 matrix, its scales, and dequantized q, k and v."""
    joined, scales, found = [], [], []
    for each in zip(*(part.chunk(GROUPS) for part in parts)):
        stored = quantize_fp8({"model.layers.0.self_attn.q_proj.weight": torch.cat(each)})
        joined.append(stored["model.layers.0.self_attn.q_proj.weight"])
        scales.append(stored["model.layers.0.self_attn.q_proj.weight_scale_inv"])
        (values,) = dequantize_fp8(stored, dtype=torch.float32).values()
        found.append(values.split([len(part) for part in each]))
    return torch.cat(joined), torch.cat(scales), [torch.cat(part) for part in zip(*found)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of MiMo-V2.5, and one of MiMo-V2-Flash with its dequantized tensors."""
    folder = tmp_path_factory.mktemp("mimo")
    plain, path = make_checkpoint("mimo_v2_flash", folder / "plain", 5, tokenizer=False, **SHAPE), folder / "joined"
    tensors = load_file(plain / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name}
    for query in [name for name in tensors if name.endswith(".q_proj.weight")]:
        names = [query.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        matrix, scales, values = join_groups([tensors[name] for name in names])
        stored = {name: tensor for name, tensor in stored.items() if name not in names}
        joined = query.replace(".q_proj.", ".qkv_proj.")
        stored |= {joined: matrix, f"{joined}_scale_inv": scales}
        tensors |= dict(zip(names, values))
    write_tensors(plain, tensors)
    stored |= {"audio_encoder.proj.weight": torch.ones(2), "visual.merger.weight": torch.ones(2)}
    stored["model.mtp.layers.0.eh_proj.weight"] = torch.ones(2)
    path.mkdir()
    write_tensors(path, stored)
    fields = json.loads((plain / "config.json").read_text())
    fields |= {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "quantization_config": FORMAT}
    fields |= {"attention_projection_layout": "fused_qkv"}
    (path / "config.json").write_text(json.dumps(fields, indent=1))
    return path, plain


@pytest.mark.parametrize("row", all_rows())
def test_logits(checkpoints: tuple[Path, Path], row: str) -> None:
    path, plain = checkpoints
    tokens, want = reference_logits(plain, 3)
    model = load(path, row, seed=1)
    got = [model.step([Chunk(0, tokens[:40], False)])[0]]
    got += [model.step([Chunk(0, [token], True)])[0] for token in tokens[40:]]
    assert_close(torch.cat(got), want)


def test_the_published_model(tmp_path: Path) -> None:
    """q, k and v in bfloat16, experts in FP8."""
    own = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"}
    config = parse(tmp_path, PUBLISHED | own)
    assert sizes.num_parameters(config) == pytest.approx(309e9, rel=5e-3)
    assert model_facts(PUBLISHED | own).num_parameters / 1e9 == pytest.approx(309, rel=1e-2)
    format, layer = config.weight_format, "model.layers.1."
    assert isinstance(format, JoinedGroupsFormat) and format.groups == 4
    assert sum(format.rows[0]) == 13568 and sum(format.rows[1]) == 14848
    assert format.kernel_format(f"{layer}self_attn.q_proj") is None
    assert format.bytes_per_element(f"{layer}self_attn.q_proj", (12288, 4096), 2) == 2
    assert format.kernel_format(f"{layer}mlp.experts.0.up_proj") is not None


def test_parts_of_a_matrix(checkpoints: tuple[Path, Path]) -> None:
    """Slices of rows and columns, as ranks read them."""
    path, plain = checkpoints
    config, want = load_model_config(path), load_file(plain / "model.safetensors")
    reader = WeightReader(path, torch.float32, format=config.weight_format)
    for name, rows, cols in (("q", slice(24, 150), None), ("k", slice(24, 48), None), ("v", None, slice(100, 180))):
        prefix, cut = f"model.layers.0.self_attn.{name}_proj", Cut(rows, cols)
        whole = want[f"{prefix}.weight"]
        out = torch.empty(cut.shape(whole.shape))
        config.weight_format.load(reader, prefix, tuple(whole.shape), cut, out)
        assert out.equal(cut.of(whole))


def test_headers(checkpoints: tuple[Path, Path]) -> None:
    """Towers and MTP layers are left out; scales without blocks of their own for each group are named."""
    path, _ = checkpoints
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    other = path.with_name("other")
    other.mkdir(exist_ok=True)
    write_tensors(other, tensors | {name: tensors[name][:-1].contiguous()})
    with pytest.raises(CheckpointError, match="qkv_groups"):
        check_headers(other, read_checkpoint(other), config)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"attention_projection_layout": "other"}, "attention_projection_layout"),
        ({"quantization_config": None}, "attention_projection_layout"),
        ({"quantization_config": FORMAT | {"store_dtype": "mxfp4"}}, "store_dtype"),
    ],
)
def test_refused(checkpoints: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    fields = json.loads((checkpoints[0] / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=match):
        load_model_config(tmp_path)
