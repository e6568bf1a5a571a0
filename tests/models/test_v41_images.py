"""Images of DeepSeek V4.1: tower, logits and requests against the formulas; sizes of images; config; prompts."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.media.image_process import _processed, load_processor
from moe_engine.models import sizes
from moe_engine.models.batch import ImageRows
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.header_check import check_headers
from moe_engine.models.tensors.model import model_tensors
from moe_engine.models.vision.deepseek_v41_pixels import DeepseekV41Processor
from moe_engine.tokenizer.deepseek_v41 import DeepseekV41Chat
from tests.models import stepper
from tests.models.checkpoints import write_tensors
from tests.models.deepseek_v41 import FIELDS, make_v41
from tests.models.image_parity import around, check_logits, check_requests
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_deepseek_v41 import PAGE, TIE
from tests.models.test_parity import assert_close
from tests.models.v41_images import V41Oracle
from tests.models.v41_quantized import WIDTHS, quantized_v41
from tests.models.v41_tower import IMAGE, VISION, picture
from tests.models.vision_checkpoints import Pixels


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> V41Oracle:
    return V41Oracle(make_v41(tmp_path_factory.mktemp("v41"), random.randrange(2**31), vision=VISION))


def clear_prompt(made: V41Oracle, images: list[Pixels], count: int) -> tuple[list[int], list[int], list[Pixels]]:
    for _ in range(50):
        tokens, places = around(images, IMAGE, count)
        if made.is_clear(tokens, images, TIE):
            return tokens, places, images
    raise AssertionError("no clear draw")


@pytest.mark.parametrize("row", all_rows())
def test_logits(made: V41Oracle, row: str) -> None:
    """Of whole tokens and of cut ones at the edges."""
    prompt, text = clear_prompt(made, [picture(7, 11)], 30), clear_prompt(made, [], 20)[0]
    loaded, (image,) = stepper.load(made.path, row, page_size=PAGE), prompt[2]
    assert isinstance(loaded.model, ImageInputs)
    rows = loaded.model.encode(image.values, image.grid)
    assert_close(rows, made.embed(image))
    assert_close(loaded.model.encode((other := picture(3, 6)).values, other.grid), made.embed(other))
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, text=text, page_size=PAGE)


def test_requests(made: V41Oracle, tmp_path: Path) -> None:
    first, second = picture(6, 9), picture(10, 1)
    asked = [clear_prompt(made, images, 6) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")


PUBLISHED_VISION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 32, "num_attention_heads": 16,
    "patch_size": 14, "downsample_ratio": 3, "rope_theta": 10000.0, "max_image_tokens": 1024, "min_pixels": 295936,
    "max_wh_ratio": None,
}  # fmt: skip


def config_of(path: Path, vision: dict[str, Any]) -> ModelConfig:
    text = FIELDS | {"engram_compressed_vocab_size": 99092, "hidden_size": 5120}
    raw = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": text}
    (path / "config.json").write_text(json.dumps(raw | {"vision_config": vision, "image_token_id": 129264}))
    return load_model_config(path)


def test_published_tower(tmp_path: Path) -> None:
    """412 million parameters and the projector; an image of the least size has 13 rows of 13 tokens."""
    config = config_of(tmp_path, PUBLISHED_VISION)
    vision = config.vision
    assert vision is not None and vision.image_token == 129264
    sizes = {spec.name: spec.num_elements for spec in model_tensors(config) if spec.name.startswith("visual.")}
    projector = sum(size for name, size in sizes.items() if ".aligner." in name or ".image_" in name)
    assert sum(sizes.values()) - projector == pytest.approx(412e6, rel=0.01)
    assert projector == (9 * 1024 + 1 + 5120 + 1 + 3) * 5120
    assert vision.num_tokens((1, 39, 39)) == 13 * 14 + 2
    router = [spec.name for spec in model_tensors(config) if spec.name.endswith("bias_vl")]
    assert len(router) == config.num_layers
    assert config_of(tmp_path, PUBLISHED_VISION | {"num_hidden_layers": 0}).vision is None
    with pytest.raises(ConfigError, match=r"vision_config\.num_attention_heads 5 does not divide 1024"):
        config_of(tmp_path, PUBLISHED_VISION | {"num_attention_heads": 5})


@pytest.mark.parametrize(
    ("given", "scaled"),
    [
        ((546, 546), (546, 546)), ((100, 100), (546, 546)), ((640, 480), (644, 490)), ((1920, 1080), (1708, 966)),
        ((4000, 3000), (1512, 1134)), ((100, 5000), (112, 5012)), ((30000, 20), (30002, 28)),
    ],
)  # fmt: skip
def test_sizes_of_images(given: tuple[int, int], scaled: tuple[int, int]) -> None:
    """Those of transformers' processor."""
    assert DeepseekV41Processor().sizes(*given) == scaled


def test_limits_of_images() -> None:
    """Whole patches, at most so many tokens, the proportions kept to a patch; a lower limit of pixels; squeezed."""
    processor = DeepseekV41Processor(most=random.randint(8, 1024), least=random.randint(1, 300000))
    for limited in (processor, processor.within(random.randint(1, 200000))):
        for _ in range(200):
            size = limited.sizes(random.randint(1, 3000), random.randint(1, 3000))
            assert not any(side % 14 for side in size)
            columns, rows = (-(-side // 42) for side in size)
            assert rows * (columns + 1) + 2 <= limited.most
            assert size[0] * size[1] // 14**2 <= limited.max_patches
    assert DeepseekV41Processor(widest=3).sizes(9000, 30) == DeepseekV41Processor().sizes(90, 30)


def test_pixels(tmp_path: Path) -> None:
    """Read in rows of patches, channel by channel; gray beside an image that is narrower than its patches."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    own = {"model_type": "deepseek_v41", "vision_config": {"min_pixels": 100, "max_image_tokens": 40}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    processor = load_processor(str(tmp_path))
    values = np.random.default_rng(random.randrange(1000)).integers(0, 256, (28, 20, 3), dtype=np.uint8)
    image_module.fromarray(values).save(out := io.BytesIO(), "PNG")
    done = _processed(processor, 1 << 20, out.getvalue())
    assert done.problem is None and done.grid == (1, 2, 2)
    found = np.frombuffer(done.pixels, np.float32).reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3)
    assert np.allclose(found[:, 4:24] * 0.5 + 0.5, values / 255, atol=1e-6)
    assert np.allclose(found[:, :4] * 0.5 + 0.5, 127 / 255) and np.allclose(found[:, 24:] * 0.5 + 0.5, 127 / 255)


def test_prompts() -> None:
    """Parts have an empty line between them, of users, of the system and of tools."""
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    chat = DeepseekV41Chat()
    written = "a\n\n<｜deepseek_image｜>\n\nb"
    assert f"<｜User｜>{written}<｜Assistant｜>" in chat.render([{"role": "user", "content": parts}])
    turns = [{"role": "system", "content": parts}, {"role": "user", "content": "c"}]
    assert f"<｜System｜>{written}<｜User｜>c" in chat.render(turns)
    called = [{"role": "user", "content": "c"}, {"role": "tool", "content": parts, "tool_call_id": "1"}]
    assert f"<tool_result>{written}</tool_result>" in chat.render(called)


class Choices:
    """Counts the tokens whose experts layers record."""

    counting = True

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def ids_buffer(self, num_tokens: int) -> Tensor:
        return torch.full((num_tokens, FIELDS["num_experts_per_tok"]), -1, dtype=torch.int32)

    def on_select(self, layer: int, ids: Tensor) -> None:
        assert bool((ids >= 0).all())
        self.tokens[layer] = self.tokens.get(layer, 0) + len(ids)


@pytest.mark.parametrize("row", all_rows())
def test_choices_of_all_steps_are_recorded(made: V41Oracle, row: str) -> None:
    """Steps with image tokens and without: a layer that is one call is several in the former."""
    loaded, image = stepper.load(made.path, row, page_size=PAGE), picture(3, 3)
    model: Any = loaded.model
    choices: Any = Choices()
    for moe in model.moes:
        moe.record(choices)
    tokens = [5, *image.placeholders(IMAGE), 6]
    batch = loaded.batch([Chunk(0, tokens, False)])
    places = torch.arange(1, 1 + image.num_tokens)
    rows = ImageRows(places, model.encode(image.values, image.grid), places.expand(3, -1))
    model.forward(replace(batch, images=rows))
    loaded.step([Chunk(0, [7], True)])
    assert choices.tokens == dict.fromkeys(range(FIELDS["num_hidden_layers"]), len(tokens) + 1)


def test_memory_is_what_the_ledger_says(made: V41Oracle) -> None:
    """Of the weights with the tower, and of its results: a token for each row of `encode`."""
    loaded, image = stepper.load(made.path, "torch", page_size=PAGE), picture(4, 7)
    model: Any = loaded.model
    assert model.weight_bytes == pytest.approx(sizes.weight_bytes(loaded.config, 4), rel=0.01)
    rows, vision = model.encode(image.values, image.grid), loaded.config.vision
    assert vision is not None and rows.shape == (vision.num_tokens(image.grid), vision.row_width)
    most = DeepseekV41Processor().max_patches
    assert vision.most_tokens(most) >= DeepseekV41Processor().most


def test_published_form(tmp_path: Path) -> None:
    """Block FP8, experts in FP4 and tables in FP8 beside a tower that is not quantized."""
    torch.manual_seed(random.randrange(2**31))
    source = make_v41(tmp_path / "source", random.randrange(2**31), vision=VISION, **WIDTHS)
    stored, values = quantized_v41(source, tmp_path)
    oracle = V41Oracle(values)
    tokens, places, (image,) = clear_prompt(oracle, [picture(5, 6)], 10)
    loaded = stepper.load(stored, "torch", page_size=PAGE)
    model: Any = loaded.model
    rows = model.encode(image.values, image.grid)
    assert_close(rows, oracle.embed(image))
    check_logits(loaded, stored, "torch", oracle, (tokens, places, [image]), rows, IMAGE, 1e-3, page_size=PAGE)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vision.blocks.1.attn.wo.bias": None}, "visual.blocks.1.attn.wo.bias"),
        ({"image_newline": torch.zeros(32)}, "image_newline"),
        ({"layers.3.ffn.gate.bias_vl": None}, "model.layers.3.mlp.gate.bias_vl"),
        ({"vision.blocks.1.attn.k_norm.weight": torch.zeros(12)}, "visual.blocks.1.attn.k_norm.weight"),
    ],
)
def test_headers_of_the_tower(made: V41Oracle, tmp_path: Path, changed: dict[str, Tensor | None], words: str) -> None:
    """A tensor that is missing, has another shape or belongs to no part is named; the text alone needs none of them."""
    shutil.copytree(made.path, path := tmp_path / "model")
    tensors: dict[str, Tensor | None] = load_file(path / "model.safetensors") | changed
    write_tensors(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    config, files = load_model_config(path), read_checkpoint(path)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        check_headers(path, files, config)
    check_headers(path, files, replace(config, vision=None))
