"""GLM-4.1V, GLM-4.5V and GLM-4.6V against transformers: towers, requests in an engine, pixels, names and config. Logits
and positions are in `test_image_text`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageTextModel
from moe_engine.models.header_check import check_headers
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.image_parity import check_requests
from tests.models.published import GLM_4_1V, GLM_4_5V
from tests.models.sparse import clear_draw
from tests.models.test_config import parse
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import (
    GLM,
    IMAGE,
    MERGE,
    PATCH,
    TOKEN_PIXELS,
    VIDEO,
    VOLUME,
    Oracle,
    make_checkpoint,
    random_pixels,
    with_images,
)


@pytest.fixture(scope="module", params=GLM)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), random.randrange(2**31))


@pytest.mark.parametrize(
    "tower",
    [
        {"hidden_size": 48, "num_heads": 3, "image_size": PATCH, "rms_norm_eps": 0.1},
        {"depth": 1, "attention_bias": True, "image_size": 9 * PATCH, "rope_parameters": {"rope_theta": 100.0}},
    ],
)
def test_towers(tower: dict[str, Any], tmp_path: Path) -> None:
    """More and fewer learned positions than patches, one among them, in one direction each; two frames attend apart."""
    path = make_checkpoint("glm4v", tmp_path, random.randrange(2**31), tower=tower)
    values = torch.randn(2 * 4 * 14, 3 * 2 * PATCH**2)
    model = stepper.load(path, "cpu", max_positions=8, max_image_tokens=8).model
    assert isinstance(model, ImageTextModel)
    with torch.no_grad():
        found = Oracle(path).model.model.visual(values, torch.tensor([[1, 4, 14]] * 2)).pooler_output
    assert_close(model.encode(values, (2, 4, 14)), found)


def test_requests(path: Path, tmp_path: Path) -> None:
    """Two images of a size are two prefixes; two images in a prompt, one first; text alone."""
    generator, oracle = torch.Generator().manual_seed(random.randrange(2**31)), Oracle(path)
    texts = [torch.randint(0, 250, (length,)).tolist() for length in (9, 6, 12)]

    def drawn() -> Any:
        first, same = random_pixels(3, 4, generator), random_pixels(3, 4, generator)
        small = random_pixels(1, 2, generator)
        parts: list[list[Any]] = [[texts[0], first, texts[1]], [texts[0], same, texts[1]], [small, texts[1], first]]
        asked = [with_images(own) for own in [*parts, [texts[2]]]]
        for ids, images, _ in asked:
            oracle.logits(ids, images)
        return [(ids, places, images) for ids, images, places in asked]

    check_requests(path, oracle, clear_draw(drawn, needed=path.name.startswith("glm4v_moe")), tmp_path / "status")


@pytest.mark.parametrize("kind", ["Glm4vImageProcessor", "Glm46VImageProcessorFast"])
def test_pixels(path: Path, kind: str, tmp_path: Path) -> None:
    """transformers' processors, also with fewer pixels; the largest image is the planner's."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    processor = Glm4vImageProcessorPil if kind.startswith("Glm4v") else Glm46VImageProcessorPil
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    own = {"size": VOLUME, "patch_size": PATCH, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own | {"image_processor_type": kind}))
    args: dict[str, Any] = {"model_path": str(tmp_path), "max_total_tokens": 64}
    vision = prepare(EngineArgs.from_kwargs(**args)).model.vision
    assert vision is not None and vision.max_patches == 60 * MERGE**2 and vision.video_token == VIDEO
    tall = random.randint(10, 300)
    # a side shorter than a token counts as one: images of more than 12 times their other side exceed 12 tokens
    wide = random.randint(max(10, tall // 10), min(300, 10 * tall))
    for height, width in ((tall, wide), (8, 9), (2000, 300)):
        values = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
        for most in (60, 12):
            size = VOLUME | {"longest_edge": 2 * most * TOKEN_PIXELS**2}
            want = processor(**own | {"size": size})([image_module.fromarray(values)], return_tensors="np")
            found = load_processor(str(tmp_path), max_pixels=most * TOKEN_PIXELS**2)
            got = found([image_module.fromarray(values)], return_tensors="np")
            assert np.array_equal(got["image_grid_thw"], want["image_grid_thw"])
            assert np.array_equal(got["pixel_values"], want["pixel_values"])
            assert len(got["pixel_values"]) <= most * MERGE**2 == found.max_patches


def test_headers_and_sizes(path: Path) -> None:
    """All tensors are known by the names of the files; the weights take the memory of the ledger."""
    config, files = load_model_config(path), read_checkpoint(path)
    check_headers(path, files, config)
    ledger = prepare(EngineArgs.from_kwargs(model_path=str(path), dtype="float32", max_total_tokens=64)).ledger
    stored = sum(file.tensors[name].num_bytes for name, file in files.items())
    assert ledger.bytes_of("weights") == pytest.approx(stored, rel=2e-2)
    del files["visual.embeddings.position_embedding.weight"]
    with pytest.raises(CheckpointError, match=r"embeddings.position_embedding.weight .* is missing"):
        check_headers(path, files, config)


@pytest.mark.parametrize(("fields", "total"), [(GLM_4_1V, 10.29e9), (GLM_4_5V, 107.7e9)])
def test_published_models(tmp_path: Path, fields: dict[str, Any], total: float) -> None:
    """GLM-4.1V's first files have the text model's fields beside `vision_config`."""
    config = parse(tmp_path, fields)
    assert sizes.num_parameters(config) == pytest.approx(total, rel=1e-2)
    text_alone = sizes.num_parameters(replace(config, vision=None)) - config.vocab_size * config.hidden_size
    assert model_facts(fields).num_parameters == pytest.approx(text_alone, rel=1e-3)  # without tower and embedding
    assert [config.rope.axes.count(axis) for axis in range(3)] == [8, 12, 12] and config.rope.width == 64
    assert config.vision is not None and (config.vision.num_positions, config.vision.intermediate) == (576, 4096)
    text = fields.get("text_config", {name: value for name, value in fields.items() if name != "vision_config"})
    outer = {name: fields[name] for name in ("architectures", "model_type", "vision_config")}
    ids = {name: fields[name] for name in ("image_token_id", "video_token_id")}
    flat, nested = parse(tmp_path, {**text, **outer, **ids}), parse(tmp_path, outer | ids | {"text_config": text})
    assert (flat.rope, flat.attention, flat.moe, flat.vision) == (
        nested.rope,
        nested.attention,
        nested.moe,
        nested.vision,
    )
    other = parse(
        tmp_path, fields | {"architectures": ["Glm46VForConditionalGeneration"]} if not config.moe else fields
    )
    assert (other.rope, other.vision) == (config.rope, config.vision)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_act": "gelu"}, r"vision_config\.hidden_act 'gelu' is not supported"),
        ({"num_heads": 7}, "num_heads 7 does not divide hidden_size"),
        ({"out_hidden_size": 60}, "out_hidden_size 60 is not hidden_size 64"),
        ({"image_size": PATCH - 1}, "image_size is smaller than patch_size"),
    ],
)
def test_refused_towers(path: Path, wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vision_config": raw["vision_config"] | wrong}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_sections_of_other_sums_are_refused(path: Path, tmp_path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="mrope_section needs three counts with the sum"):
        load_model_config(tmp_path)
    assert raw["image_token_id"] == IMAGE
