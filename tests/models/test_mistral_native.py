"""Mistral Large 3 in Mistral's own files against transformers: tower, logits, requests; FP8 and NVFP4 as published;
config, names and refusals."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels.weight_forms import FP8_BLOCKS
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import MLAConfig
from moe_engine.models.config_file import load_model_config, read_fields
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.header_check import check_headers
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from moe_engine.models.tensors.vision import vision_tensors
from moe_engine.models.vision.own_processors import own_processor
from moe_engine.models.vision.pixtral_pixels import PixtralProcessor
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.format_checks import logits_of
from tests.models.image_parity import around, check_logits, check_requests
from tests.models.mistral3_checkpoints import BREAK, END, IMAGE, MERGE, PATCH, Mistral3Oracle, RowPixels
from tests.models.mistral_native import make_mistral_large3
from tests.models.parameters import num_active_parameters
from tests.models.published import MISTRAL_LARGE_3
from tests.models.quantized_floats import matrix_fp8, nvfp4_compressed
from tests.models.rows import all_rows

pytestmark = pytest.mark.usefixtures("forked_processes")

NVFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "config_groups": {
        "NVFP4A16": {
            "format": "nvfp4-pack-quantized", "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 16, "type": "float", "strategy": "tensor_group"},
        },
    },
    "ignore": [
        "model.embed_tokens", "re:patch_merger.*", "re:vision_encoder.*", "re:vision_language_adapter.*",
        "re:.*gate$", "re:.*attention.*", "lm_head",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["scaled yarn", "yarn"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mistral3Oracle:
    scale = {"mscale": 1.0, "mscale_all_dim": 1.0} if request.param else {"attention_factor": 1.0}
    rope = {"type": "yarn", "factor": 8, "beta_fast": 4, "beta_slow": 1, "original_max_position_embeddings": 64}
    rope |= {"llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 24, "rope_theta": 1e4}
    seed = random.randrange(2**31)
    return make_mistral_large3(tmp_path_factory.mktemp("made"), seed, rope_scaling=rope | scale)


def picture(rows: int, columns: int) -> RowPixels:
    grid = (1, MERGE * rows, MERGE * columns)
    return RowPixels(grid, torch.randn(grid[1] * grid[2], 3 * PATCH**2))


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Mistral3Oracle, row: str) -> None:
    image = picture(3, 5)
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, ImageInputs)
    rows = loaded.model.encode(image.values, image.grid)
    check_logits(loaded, made.path, row, made, (*around([image], IMAGE, count=80), [image]), rows, IMAGE)


def test_requests(made: Mistral3Oracle, tmp_path: Path) -> None:
    first, second = picture(2, 3), picture(4, 1)
    asked = [(*around(images, IMAGE), images) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")


def fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    """Scales of a matrix and of its input under Mistral's names."""
    ends = {".weight": "weight", ".weight_scale": "qscale_weight", ".input_scale": "qscale_act"}
    return {f"{name.removesuffix('weight')}{ends[end]}": part for end, part in matrix_fp8(value)[0].items()}


def experts_nvfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    """Matrices of experts; the input's scale of the shared ones in bfloat16."""
    if "experts" not in name:
        return {name: value}
    dtype, prefix = torch.bfloat16 if "shared" in name else torch.float32, name.removesuffix(".weight")
    scale = {f"{prefix}.input_global_scale": torch.tensor([60.0], dtype=dtype)}
    return {prefix + end: part for end, part in nvfp4_compressed(value)[0].items()} | scale


def values(name: str, value: Tensor, form: str) -> Tensor:
    return matrix_fp8(value)[1] if form == "fp8" else nvfp4_compressed(value)[1] if "experts" in name else value


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_published_formats(tmp_path: Path, form: str) -> None:
    """Logits are those of the values of the stored numbers."""
    path, plain = tmp_path / "stored", tmp_path / "plain"
    make_mistral_large3(path, 5, fp8 if form == "fp8" else experts_nvfp4)
    make_mistral_large3(plain, 5, lambda name, value: {name: values(name, value, form)})
    raw = json.loads((path / "params.json").read_text())
    published = {"quantization": MISTRAL_LARGE_3["quantization"]} if form == "fp8" else {"quantization_config": NVFP4}
    (path / "params.json").write_text(json.dumps(raw | published))
    check_headers(path, read_checkpoint(path), config := load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-4, atol=1e-4)
    assert isinstance(config.weight_format, SchemeFormat)
    attention = config.weight_format.scheme_of("model.layers.1.self_attn.kv_b_proj")
    expert = config.weight_format.scheme_of("model.layers.1.mlp.experts.*.up_proj")
    assert expert is not None and (attention is None) == (form == "nvfp4")
    assert (expert.form == FP8_BLOCKS) == (form == "fp8")


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "params.json").write_text(json.dumps(fields))
    return folder


def test_published_sizes(tmp_path: Path) -> None:
    """675B with the tower's 2.5B; 39B of the text model for a token."""
    config = load_model_config(write(tmp_path, MISTRAL_LARGE_3))
    vision = config.vision
    assert vision is not None and vision.row_ends == (12, 13) and vision.max_patches == 0
    tower = sum(torch.Size(shape).numel() for _, shape, _ in vision_tensors(vision))
    text, active = sizes.num_parameters(config) - tower, num_active_parameters(config) - tower
    assert tower == pytest.approx(2.5e9, rel=4e-2) and text == pytest.approx(673e9, rel=2e-3)
    assert active == pytest.approx(39e9, rel=2e-2)
    assert isinstance(config.attention, MLAConfig) and config.attention.latent_eps == 1e-6
    assert config.context_length == 294912 and config.kv_bytes_per_token("bfloat16") == 61 * 576 * 2
    assert config.rope.softmax_factor == config.rope.attention_factor == 1.0 and config.rope.query_beta == 0.1
    file, raw = read_fields(tmp_path)
    assert file.name == "params.json" and read_fields(file) == (file, raw)
    small = text - config.vocab_size * config.hidden_size - model_facts(raw).num_parameters
    assert 0 <= small < 3e6
    processor = own_processor(tmp_path)
    assert isinstance(processor, PixtralProcessor) and (processor.patch, processor.longest) == (14, 1540)


def test_refusals(tmp_path: Path) -> None:
    moe, vision = MISTRAL_LARGE_3["moe"], MISTRAL_LARGE_3["vision_encoder"]
    for wrong, message in (
        ({"moe": None}, "moe is missing: of Mistral's own files, models with MLA and experts are served"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing: of Mistral's own files"),
        ({"moe": moe | {"use_load_balancing_bias": True}}, "moe.use_load_balancing_bias True is not supported"),
        ({"quantization": {"qformat_weight": "int4"}}, "quantization.qformat_weight 'int4' is not supported"),
        ({"vision_encoder": vision | {"mm_projector_id": ""}}, "vision_encoder.mm_projector_id '' is not supported"),
        (
            {"llama_4_scaling": {"original_max_position_embeddings": 4096, "beta": 0.1}},
            "llama_4_scaling.original_max_position_embeddings is 4096, that of yarn 8192",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_model_config(write(tmp_path, MISTRAL_LARGE_3 | wrong))
    config = {"architectures": ["PixtralForConditionalGeneration"], "vision_config": {"model_type": "pixtral"}}
    text = read_fields(write(tmp_path, MISTRAL_LARGE_3))[1]["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    with pytest.raises(ConfigError, match=r"vision_config is served from params\.json only"):
        load_model_config(tmp_path)


def test_files(made: Mistral3Oracle, tmp_path: Path) -> None:
    """A missing file of the index; image settings of params.json."""
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == 256
    assert config.model.vision.row_ends == (BREAK, END)
    index = json.loads((made.path / "consolidated.safetensors.index.json").read_text())
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"has no config\.json; quantize the model in transformers' files"):
        quantize_checkpoint(made.path, tmp_path / "out", Target("fp8", 128), lambda _: None)
    with pytest.raises(CheckpointError, match=r"consolidated-00001-of-00002.safetensors and 1 more of 2 weight files"):
        read_checkpoint(tmp_path)
